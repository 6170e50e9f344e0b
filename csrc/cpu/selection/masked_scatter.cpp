// out[i] = mask[i] and rank(i) < source.numel() ? source[rank(i)] : input[i], where rank(i) is the number of kept
// elements before i. The backward has two gradients: of input, where kept elements of grad become 0, and of source, the
// kept elements of grad.
// I/O: read mask (twice with several threads), read input, read source, write out.
#include "cpu/selection/pack.h"
#include "cpu/selection/patterns.h"

namespace safeops::cpu {

namespace {

// out[i] = mask[i] ? 0 : x[i], the gradient of input.
template <class T>
void drop_loop(const uint8_t* mask, const T* x, int64_t n, T* out) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(x[i] & static_cast<T>(static_cast<T>(mask[i] != 0) - 1));
}

Tensor masked_scatter(const Tensor& input, const Tensor& source, const Tensor& mask) {
  const View flags(mask);
  STD_TORCH_CHECK(dtype_code(input) == dtype_code(source), "_masked_scatter: input and source must have one dtype");
  BitView x(input), s(source);
  const int64_t element_width = x.width;
  const Shape full = broadcast(x.shape(), flags.shape());
  const Tensor result = on_huge_pages(laid_like(full, input), full.numel() * element_width);
  BitView out(result);
  x.split(), s.split(), out.split();
  const BitView m = mask_bits(flags, element_width == 16);
  const Shape shape = out.shape();
  const int64_t numel = shape.numel(), available = s.numel();
  if (numel == 0) return result;
  const Order order = Order::contiguous(shape);
  Source<uint8_t> keep;
  keep.bind(m.view(), shape, order);
  const Slices slices(keep, numel);
  const Count count_kept = find_count();
  by_width(x.width, [&](auto t) {
    using T = decltype(t);
    Source<T> from, filler;
    Sink<T> to;
    from.bind(x.view(), shape, order);
    filler.bind(s.view(), s.shape(), Order::contiguous(s.shape()));
    to.bind(out.view(), shape, order);
    const Merge<T> merge = find_merge<T>();
    slices.run([&](int64_t start, int64_t stop, int64_t k) {
      alignas(64) uint8_t flag_buffer[kBuffer];
      alignas(64) T values[kBuffer], taken[kBuffer], results[kBuffer];
      keep.prime(flag_buffer), from.prime(values), filler.prime(taken);
      for (int64_t at = start; at < stop; at += kChunk) {
        const int64_t n = std::min(kChunk, stop - at);
        const uint8_t* flag = keep.fetch(at, n, at + kAhead, flag_buffer);
        const T* old = from.fetch(at, n, at + kAhead, values);
        const int64_t kept = count_kept(flag, n), most = std::min(kept, available - k);
        T* target = to.target(at, results);
        if (most <= 0) {
          std::memcpy(target, old, n * sizeof(T));
        } else {
          const T* next = filler.fetch(k, most, INT64_MAX, taken);
          const int64_t readable = filler.kind == Kind::kDirect ? available - k : next == taken ? kChunk : most;
          merge(flag, old, next, most, readable, n, target);
        }
        to.commit(at, n, target);
        k += kept;
      }
    });
  });
  return result;
}

std::tuple<Tensor, Tensor> masked_scatter_backward(const Tensor& grad, const Tensor& mask,
                                                   const std::vector<int64_t>& source_size) {
  const View flags(mask);
  BitView g(grad);
  const int64_t element_width = g.width;
  const Shape source(static_cast<int>(source_size.size()), source_size.data());
  const Tensor d_input = on_huge_pages(new_like(g.shape(), grad), g.numel() * element_width);
  const Tensor d_source = on_huge_pages(new_like(source, grad), source.numel() * element_width);
  g.split();
  const BitView m = mask_bits(flags, element_width == 16);
  const Shape shape = g.shape();
  const int64_t numel = shape.numel(), available = source.numel() * (element_width / g.width);
  int64_t used = 0;
  if (numel > 0) {
    const Order order = Order::contiguous(shape);
    Source<uint8_t> keep;
    keep.bind(m.view(), shape, order);
    const Slices slices(keep, numel);
    const Count count_kept = find_count();
    by_width(g.width, [&](auto t) {
      using T = decltype(t);
      Source<T> from;
      from.bind(g.view(), shape, order);
      T* dx = reinterpret_cast<T*>(View(d_input).data);
      T* ds = reinterpret_cast<T*>(View(d_source).data);
      const Pack<T> pack = find_pack<T>(true, false);
      const auto drop = safeops::cpu::pick<&drop_loop<T>>();
      slices.run([&](int64_t start, int64_t stop, int64_t k) {
        const int64_t limit = slices.limit(start, available);
        alignas(64) uint8_t flag_buffer[kBuffer];
        alignas(64) T values[kBuffer];
        keep.prime(flag_buffer), from.prime(values);
        for (int64_t at = start; at < stop; at += kChunk) {
          const int64_t n = std::min(kChunk, stop - at);
          const uint8_t* flag = keep.fetch(at, n, at + kAhead, flag_buffer);
          const T* x = from.fetch(at, n, at + kAhead, values);
          const int64_t kept = count_kept(flag, n), room = std::max<int64_t>(0, limit - k);
          if (room > 0) pack(flag, x, n, at, ds + k, nullptr, room);
          if (k + kept <= available) {
            drop(flag, x, n, dx + at);
          } else {  // source ends in this chunk: later elements of the output are input's
            for (int64_t i = 0, rank = k; i < n; ++i) {
              dx[at + i] = flag[i] && rank < available ? T{0} : x[i];
              rank += flag[i] != 0;
            }
          }
          k += kept;
        }
        if (!slices.counted()) used = k;
      });
    });
    if (slices.counted()) used = slices.first.back();
  }
  used = std::min(used, available);
  fill_all(View(d_source).data + used * g.width, available - used, g.width, 0);
  return {d_input, d_source};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_masked_scatter", TORCH_BOX(&masked_scatter));
  m.impl("_masked_scatter_backward", TORCH_BOX(&masked_scatter_backward));
}

}  // namespace safeops::cpu
