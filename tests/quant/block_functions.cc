// Built once per instruction set, with MXOPT_TEST_LEVEL as the end of the function's name. Nothing here may
// use an inline function that is not always inlined: the linker could then pick the copy that this machine
// can not run.
#include "support/block_functions.h"

#include "mxopt/quant/block_host.h"

#define MXOPT_TEST_JOIN(a, b) a##b
#define MXOPT_TEST_NAME(level) MXOPT_TEST_JOIN(block_functions_, level)

namespace mxopt::test {
namespace {

void round_to_bf16(const float* in, float* w, std::int64_t n) {
  host::round_to_bf16(in, w, n);
}
void widen_bf16(const Bf16* in, float* w, std::int64_t n) {
  host::widen_bf16(in, w, n);
}
std::uint32_t block_amax_bits(const float* w) {
  return host::block_amax_bits(w);
}
void column_amax_bits(std::uint32_t* amax, const float* w, std::int64_t n) {
  host::column_amax_bits(amax, w, n);
}
void encode_block(const float* w, float reciprocal, std::uint8_t* out) {
  host::encode_block(w, reciprocal, out);
}
void encode_columns(const float* w, const float* reciprocals, std::uint8_t* out, std::int64_t n) {
  host::encode_columns(w, reciprocals, out, n);
}
void decode(const std::uint8_t* codes, const float* scales, float* out, std::int64_t n) {
  host::decode(codes, scales, out, n);
}
std::int64_t count_nonfinite(const float* w, std::int64_t n) {
  return host::count_nonfinite(w, n);
}

}  // namespace

BlockFunctions MXOPT_TEST_NAME(MXOPT_TEST_LEVEL)() {
  return {round_to_bf16, widen_bf16,     block_amax_bits, column_amax_bits,
          encode_block,  encode_columns, decode,          count_nonfinite};
}

}  // namespace mxopt::test
