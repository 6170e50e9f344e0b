// Elements as bit patterns. The selection ops move elements and compute nothing, so one pattern type of 1, 2, 4, 8 or
// 16 bytes serves all dtypes of that width.
#pragma once

#include "common/elements.h"
#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

inline DType bits_of(int64_t bytes) {
  switch (bytes) {
    case 1: return DType::kBool;
    case 2: return DType::kHalf;
    case 4: return DType::kFloat;
    case 8: return DType::kDouble;
    default: STD_TORCH_CHECK(false, "safeops: no elements of ", bytes, " bytes");
  }
}

struct Pair {  // complex128
  uint64_t real, imag;
};

// Calls f with a zero of the unsigned type that has `bytes` bytes (at most 8).
template <class F>
void by_width(int64_t bytes, const F& f) {
  switch (bytes) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    default: return f(uint64_t{});
  }
}

template <class F>
void by_any_width(int64_t bytes, const F& f) {
  if (bytes == 16)
    f(Pair{});
  else
    by_width(bytes, f);
}

// A view that owns its sizes and strides, so that its dims may be changed.
struct BitView {
  int ndim;
  int64_t size[kMaxDims], stride[kMaxDims];
  char* data;
  int64_t width;  // bytes of one element

  explicit BitView(const Tensor& t) : BitView(View(t), element_bytes(t)) {}

  // Turns a 0-dim tensor into a vector of one element.
  void make_vector() {
    if (ndim == 0) push(1, 1);
  }

  // Turns each element of 16 bytes into two elements of 8 bytes, along a new last dim.
  void split() {
    if (width != 16) return;
    for (int d = 0; d < ndim; ++d) stride[d] *= 2;
    push(2, 1);
    width = 8;
  }

  BitView(const View& view, int64_t width_) : ndim(view.ndim), data(view.data), width(width_) {
    STD_TORCH_CHECK(ndim < kMaxDims, "safeops: too many dimensions");
    for (int d = 0; d < ndim; ++d) {
      size[d] = view.sizes[d];
      stride[d] = view.strides[d];
    }
  }

  void push(int64_t n, int64_t step) {
    STD_TORCH_CHECK(ndim < kMaxDims, "safeops: too many dimensions");
    size[ndim] = n;
    stride[ndim++] = step;
  }

  Shape shape() const { return Shape(ndim, size); }

  int64_t count(int from, int to) const {
    int64_t n = 1;
    for (int d = from; d < to; ++d) n *= size[d];
    return n;
  }
  int64_t numel() const { return count(0, ndim); }

  // Valid while this BitView exists.
  View view() const {
    View v(data, bits_of(width));
    v.sizes = size;
    v.strides = stride;
    v.ndim = ndim;
    return v;
  }
};

// Returns the mask as a BitView. split: the elements were split in two, so the mask gets a new last dim, too.
inline BitView mask_bits(const View& mask, bool split) {
  STD_TORCH_CHECK(mask.dtype == DType::kBool, "safeops: a mask must be bool");
  BitView m(mask, 1);
  if (split) m.push(2, 0);
  return m;
}

template <class T>
T pattern(uint64_t fill) {
  if constexpr (sizeof(T) == 16)
    return {fill, 0};
  else
    return static_cast<T>(fill);
}

// Fills n elements of `width` bytes, with several threads if there are many.
inline void fill_all(char* dst, int64_t n, int64_t width, uint64_t fill) {
  if (n <= 0) return;
  parallel((n + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
    const int64_t start = begin * kChunk, stop = std::min(end * kChunk, n);
    if (fill == 0)
      std::memset(dst + start * width, 0, (stop - start) * width);
    else
      by_any_width(width, [&](auto t) {
        using T = decltype(t);
        T* to = reinterpret_cast<T*>(dst);
        std::fill(to + start, to + stop, pattern<T>(fill));
      });
  });
}

}  // namespace safeops::cpu
