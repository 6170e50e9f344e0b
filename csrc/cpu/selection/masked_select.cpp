// The kept elements as a vector. They are counted first, since the vector must be allocated, and then packed.
// I/O: read mask twice, read the kept elements, write them.
#include "cpu/selection/pack.h"
#include "cpu/selection/patterns.h"

namespace safeops::cpu {

namespace {

Tensor masked_select(const Tensor& input, const Tensor& mask) {
  const View flags(mask);
  BitView x(input);
  const bool split = x.width == 16;
  x.split();
  const BitView m = mask_bits(flags, split);
  const Shape shape = broadcast(x.shape(), m.shape());
  const Order order = Order::contiguous(shape);
  Source<uint8_t> keep;
  keep.bind(m.view(), shape, order);
  const Slices slices(keep, shape.numel(), true);
  const int64_t total = slices.first.back(), elements = split ? total / 2 : total;
  const Tensor result = on_huge_pages(new_like(Shape(1, &elements), input), total * x.width);
  if (total == 0) return result;
  by_width(x.width, [&](auto t) {
    using T = decltype(t);
    Source<T> from;
    from.bind(x.view(), shape, order);
    T* out = reinterpret_cast<T*>(View(result).data);
    const Pack<T> pack = find_pack<T>(true, false);
    slices.run([&](int64_t start, int64_t stop, int64_t k) {
      alignas(64) uint8_t flag_buffer[kBuffer];
      alignas(64) T values[kBuffer];
      keep.prime(flag_buffer), from.prime(values);
      const int64_t limit = slices.limit(start, total);
      for (int64_t at = start; at < stop && k < limit; at += kChunk) {
        const int64_t n = std::min(kChunk, stop - at);
        const uint8_t* flag = keep.fetch(at, n, at + kAhead, flag_buffer);
        k += pack(flag, from.fetch(at, n, INT64_MAX, values), n, at, out + k, nullptr, limit - k);
      }
    });
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_masked_select", TORCH_BOX(&masked_select)); }

}  // namespace safeops::cpu
