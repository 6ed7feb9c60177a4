// Whether a first step of Adam left in a rank's bands what the reference says.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "support/reference_adam.h"
#include "support/reference_mxfp8.h"

#include "mxopt/optimizer/step_kernels.h"
#include "mxopt/params/bf16.h"
#include "mxopt/params/memory.h"

namespace mxopt::bench {

/// The first whole owned band of every param with planes and, where no other rank has put anything into their
/// scales, its cut bands: there, the reference quantizes the owned rows with zeros for the others. Made
/// before the step, as it reads the masters and the gradients.
class BandCheck {
 public:
  BandCheck(std::vector<SegmentRow> segments, DType grad_dtype, bool with_cut_bands, Device device,
            StreamRef stream)
      : segments_(std::move(segments)), device_(device), stream_(stream) {
    for (const SegmentRow& segment : segments_) {
      const std::int64_t band_elems = kBlockElems * segment.planes.cols;
      const std::int64_t end = segment.param_begin + segment.elems;
      bool has_whole = false;
      for (std::int64_t band = segment.param_begin / band_elems; band * band_elems < end; ++band) {
        const std::int64_t begin = std::max(segment.param_begin, band * band_elems);
        const std::int64_t count = std::min(end, (band + 1) * band_elems) - begin;
        const bool is_whole = count == band_elems;
        if (is_whole ? has_whole : !with_cut_bands || !segment.planes.has_column()) continue;
        has_whole = has_whole || is_whole;
        const std::int64_t offset = begin - segment.param_begin;
        pieces_.push_back({&segment, band, begin, count, read(segment.master + offset, count),
                           read_grads(segment.grad, grad_dtype, offset, count)});
      }
    }
  }

  BandCheck(BandCheck&&) = default;
  BandCheck& operator=(BandCheck&&) = default;

  /// Elements whose master, moments or plane bytes are others, and scale bytes that are.
  std::int64_t count_wrong(const reference::AdamSettings& settings) const {
    std::vector<Result> results;
    for (const Piece& piece : pieces_) results.push_back(read_result(piece));
    std::int64_t wrong = 0;
    const auto count = static_cast<std::int64_t>(pieces_.size());
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic) reduction(+ : wrong)
#endif
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      wrong += differences(pieces_[at], results[at], settings);
    }
    return wrong;
  }

 private:
  struct Piece {
    const SegmentRow* segment;
    std::int64_t band;
    std::int64_t begin;  // in the param
    std::int64_t elems;
    std::vector<float> masters, grads;
  };
  struct Result {
    std::vector<float> p, m, v;
    std::vector<std::uint8_t> rows, columns;              // of the piece
    std::vector<std::uint8_t> row_scales, column_scales;  // of the band
  };

  template <class T>
  std::vector<T> read(const T* from, std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    copy_bytes(values.data(), from, count * static_cast<std::int64_t>(sizeof(T)), device_, stream_);
    synchronize(device_, stream_);
    return values;
  }

  std::vector<float> read_grads(const void* grad, DType dtype, std::int64_t offset,
                                std::int64_t count) const {
    if (dtype == DType::kFp32) return read(static_cast<const float*>(grad) + offset, count);
    std::vector<float> values;
    for (const Bf16 value : read(static_cast<const Bf16*>(grad) + offset, count)) {
      values.push_back(bf16_to_fp32(value));
    }
    return values;
  }

  Result read_result(const Piece& piece) const {
    const SegmentRow& segment = *piece.segment;
    const MxView& planes = segment.planes;
    const std::int64_t offset = piece.begin - segment.param_begin;
    const std::int64_t row_bytes = kBlockElems * row_scale_stride(planes.cols);
    const std::int64_t column_bytes = column_scale_stride(planes.cols);
    Result result{read(segment.master + offset, piece.elems),
                  read(segment.exp_avg + offset, piece.elems),
                  read(segment.exp_avg_sq + offset, piece.elems),
                  read(planes.row_data + piece.begin, piece.elems),
                  {},
                  read(planes.row_scales + piece.band * row_bytes, row_bytes),
                  {}};
    if (planes.has_column()) {
      result.columns = read(planes.column_data + piece.begin, piece.elems);
      result.column_scales = read(planes.column_scales + piece.band * column_bytes, column_bytes);
    }
    return result;
  }

  /// By bits: the sign of a zero counts.
  static bool is_other(float a, float b) {
    return float_to_bits(a) != float_to_bits(b);
  }

  static std::int64_t differences(const Piece& piece, const Result& got,
                                  const reference::AdamSettings& settings) {
    const std::int64_t cols = piece.segment->planes.cols;
    reference::AdamState<float> state(piece.masters);
    reference::adam_step(state, piece.grads, settings, 1);
    const auto first = static_cast<std::size_t>(piece.begin - piece.band * kBlockElems * cols);
    std::vector<float> band(static_cast<std::size_t>(kBlockElems * cols), 0.0f);
    std::copy(state.p.begin(), state.p.end(), band.begin() + static_cast<std::ptrdiff_t>(first));
    const reference::Mxfp8 expected = reference::quantize(band, kBlockElems, cols, false);
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < got.p.size(); ++i) {
      wrong += is_other(got.p[i], state.p[i]) || is_other(got.m[i], state.m[i]) ||
               is_other(got.v[i], state.v[i]) || got.rows[i] != expected.row_data[first + i] ||
               (!got.columns.empty() && got.columns[i] != expected.column_data[first + i]);
    }
    for (std::size_t i = 0; i < got.row_scales.size(); ++i) {
      wrong += got.row_scales[i] != expected.row_scales[i];
    }
    for (std::size_t i = 0; i < got.column_scales.size(); ++i) {
      wrong += got.column_scales[i] != expected.column_scales[i];
    }
    return wrong;
  }

  std::vector<SegmentRow> segments_;  // not changed any more: pieces point into it
  Device device_;
  StreamRef stream_;
  std::vector<Piece> pieces_;
};

}  // namespace mxopt::bench
