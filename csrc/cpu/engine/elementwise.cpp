#include "cpu/engine/elementwise.h"

#include "cpu/engine/parallel.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace safeops::cpu {

template <class C>
void Elementwise<C>::run(Loop<C> loop, const void* op, StoredLoop<C> stored) const {
  const int64_t numel = shape.numel();
  if (numel == 0) return;
  Stored all;
  if (stored && !inputs.stored(0, numel, all, 1)) stored = nullptr;
  const int64_t step = stored ? kChunk : direct() ? kFine : kChunk / 2;
  const auto body = [&](int64_t begin, int64_t end) {
    typename Inputs<C>::Buffers buffers;
    alignas(64) C results[kMaxOutputs][kBuffer];
    alignas(64) uint8_t keep[kChunk];
    inputs.prime(buffers);
    Chunk<C> chunk;
    chunk.keep = keep;
    for (int i = outputs; i < kMaxOutputs; ++i) chunk.out[i] = results[i];
    for (int64_t at = begin * step, stop = std::min(end * step, numel); at < stop; at += step) {
      const int64_t n = std::min(step, stop - at);
      if (!stored) inputs.fetch(at, n, at + kAhead, buffers, chunk);
      for (int i = 0; i < outputs; ++i) chunk.out[i] = wanted[i] ? sink[i].target(at, results[i]) : nullptr;
      Stored run;
      if (stored && inputs.stored(at, n, run, 1))
        stored(op, run, chunk.out);
      else
        loop(op, chunk);
      for (int i = 0; i < outputs; ++i)
        if (wanted[i]) sink[i].commit(at, n, results[i], stored ? kNever : at + kAhead);
    }
  };
  parallel((numel + step - 1) / step, step, body);
}

template struct Elementwise<uint16_t>;
template struct Elementwise<uint32_t>;
template struct Elementwise<uint64_t>;
template struct Elementwise<float>;
template struct Elementwise<double>;

Tensor on_huge_pages(Tensor out, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  if (bytes < static_cast<int64_t>(2 * kPage)) return out;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(View(out).data);
  const uintptr_t first = (begin + kPage - 1) & ~(kPage - 1);
  const uintptr_t last = (begin + bytes) & ~(kPage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint, may fail
#endif
  return out;
}

Tensor output_like(const Shape& shape, DType dtype, const Tensor& t, const View& view) {
  return on_huge_pages(empty_like(shape, dtype, t, view), shape.numel() * size_of(dtype));
}

Tensor new_output(const Shape& shape, DType dtype, const Tensor& like) {
  return on_huge_pages(empty(shape, dtype, like), shape.numel() * size_of(dtype));
}

}  // namespace safeops::cpu
