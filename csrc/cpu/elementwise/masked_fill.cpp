// out = fill_mask ? value : input, as bit patterns: elements that are not filled keep their bits, and NaN its payload.
// I/O: read input, read mask, write out.
#include "cpu/engine/elementwise.h"

namespace safeops::cpu {

namespace {

template <class Bits>
void fill_loop(const void* op, const Chunk<Bits>& chunk) {
  const Bits value = *static_cast<const Bits*>(op);
  const Bits* x = chunk.in[0];
  const uint8_t* mask = chunk.mask;
  Bits* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) out[i] = select(mask[i] != 0, value, x[i]);
}

template <class Bits>
void fill(const Shape& shape, const View& out, const View& input, const View& mask, Bits value) {
  Elementwise<Bits> loop(shape, out);
  loop.input(input);
  loop.mask(mask);
  loop.output(out);
  loop.run(pick<&fill_loop<Bits>>(), &value);
}

Tensor masked_fill(const Tensor& input, const Tensor& fill_mask, const std::optional<Tensor>& value, double number) {
  const View x(input), mask(fill_mask);
  STD_TORCH_CHECK(x.is_floating(), "_masked_fill: input must be floating point");
  const Shape shape = broadcast(x.shape(), mask.shape());
  const Tensor result = output_like(shape, x.dtype, input, x);
  const View out(result);
  const double fill_value = saturate(value ? read_scalar(View(*value)) : number, x.dtype);
  switch (x.dtype) {
    case DType::kHalf: fill<uint16_t>(shape, out, x, mask, Narrow<Half>::from(fill_value).bits); break;
    case DType::kBFloat16: fill<uint16_t>(shape, out, x, mask, Narrow<BFloat16>::from(fill_value).bits); break;
    case DType::kFloat: fill(shape, out, x, mask, bit_cast<uint32_t>(static_cast<float>(fill_value))); break;
    default: fill(shape, out, x, mask, bit_cast<uint64_t>(fill_value)); break;
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_masked_fill", TORCH_BOX(&masked_fill)); }

}  // namespace safeops::cpu
