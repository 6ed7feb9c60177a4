// The lists of params that the benchmarks of a step share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mxopt/params/layout.h"
#include "mxopt/params/param_spec.h"

namespace mxopt::bench {

using Shape = std::vector<std::int64_t>;

struct ParamList {
  std::string name;
  std::vector<Shape> shapes;

  std::string shape_name() const {
    return shapes.size() == 1 ? shape_text(shapes[0]) : std::to_string(shapes.size()) + " params";
  }
};

inline ParamList one_matrix(std::int64_t rows, std::int64_t cols) {
  return {"one matrix", {{rows, cols}}};
}

inline ParamList many_small(int count) {
  return {std::to_string(count) + " of 160x96",
          std::vector<Shape>(static_cast<std::size_t>(count), Shape{160, 96})};
}

/// q, k, v, o, gate, up and down of `layers` layers.
inline ParamList llama_layers(std::string name, int layers, std::int64_t hidden, std::int64_t key_value,
                              std::int64_t feed_forward) {
  ParamList list{std::move(name), {}};
  for (int layer = 0; layer < layers; ++layer) {
    for (Shape shape : std::vector<Shape>{{hidden, hidden},
                                          {key_value, hidden},
                                          {key_value, hidden},
                                          {hidden, hidden},
                                          {feed_forward, hidden},
                                          {feed_forward, hidden},
                                          {hidden, feed_forward}}) {
      list.shapes.push_back(std::move(shape));
    }
  }
  return list;
}

/// 872,415,232 elements.
inline ParamList llama_8b() {
  return llama_layers("llama-3-8b, 4 layers", 4, 4096, 1024, 14336);
}
/// 1,711,276,032 elements.
inline ParamList llama_70b() {
  return llama_layers("llama-3-70b, 2 layers", 2, 8192, 1024, 28672);
}

/// Wide and short ones with odd numbers of bands and of blocks: at 32 ranks most shards begin and end inside
/// of a band.
inline ParamList odd_shapes() {
  return {"odd shapes",
          {{96, 28672},
           {160, 8224},
           {1120, 4160},
           {1056, 10976},
           {32, 131104},
           {2080, 5152},
           {64, 53280},
           {4064, 1056},
           {416, 24608},
           {7, 32, 1696}}};
}

inline std::vector<ParamSpec> specs_of(const ParamList& list, Storage storage,
                                       GradMode grad_mode = GradMode::kAccumulate) {
  std::vector<ParamSpec> specs;
  for (const Shape& shape : list.shapes) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(specs.size());
    spec.shape = shape;
    spec.storage = storage;
    spec.grad_mode = grad_mode;
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace mxopt::bench
