// Images of half the size, for ms_ssim. A half-size pixel is the mean of its kept source pixels, at most 2 x 2. In
// backward, each of its n kept source pixels gets 1 / n of the half-size pixel's gradient.
#pragma once

#include "pixels.cuh"

namespace safeops::cuda {
namespace {

__device__ inline int64_t offset(const Field& f, int n, int c, int y, int x) {
  return n * f.n + c * f.c + y * f.row + x * f.column;
}

// Calls body(row, column) for each kept source pixel of the half-size pixel (y, x). kMasked: there may be a mask.
template <bool kMasked, class C, class Body>
__device__ inline void each_of_half(const Images<C>& images, int n, int c, int y, int x, const Body& body) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at_y = 2 * y + i / 2, at_x = 2 * x + i % 2;
    if (at_y >= images.height || at_x >= images.width) continue;
    if (kMasked && images.mask.base && !load<uint8_t>(images.mask.base + offset(images.mask, n, c, at_y, at_x)))
      continue;
    body(at_y, at_x);
  }
}

template <bool kMasked, class C>
__device__ inline void halve(const Images<C>& images, const Halves& to, int n, int c, int y, int x) {
  using D = Dynamic<C>;
  C of_x = 0, of_y = 0, count = 0;
  each_of_half<kMasked>(images, n, c, y, x, [&](int at_y, int at_x) {
    const auto value = [&](const Field& f) {
      const char* p = f.base + offset(f, n, c, at_y, at_x);
      return D::decode(load_raw<typename D::Word>(p, f.type), f.type) * C(0.25);  // no sum of four overflows
    };
    of_x += value(images.x), of_y += value(images.y), count += 1;
  });
  const C by = count > 0 ? 4 / count : C(0);
  store(to.x.base + offset(to.x, n, c, y, x), of_x * by);
  store(to.y.base + offset(to.y, n, c, y, x), of_y * by);
  if (to.mask.base) store(to.mask.base + offset(to.mask, n, c, y, x), uint8_t(count > 0));
}

// Computes the half-size pixels that belong to a tile: kHalf x kHalf of them. The last tile of a row or column also
// takes those after its windows, up to the edge of the half-size image.
template <class T>
__device__ inline void halve_tile(const T& tile, const Halves& to) {
  constexpr int kHalf = T::kTileWindows / 2;
  const int first_row = tile.row * kHalf, first_column = tile.column * kHalf;
  const int rows = tile.row + 1 == int(tile.images.down) ? to.height - first_row : kHalf;
  const int columns = tile.column + 1 == int(tile.images.across) ? to.width - first_column : kHalf;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * columns; i += kTileThreads)
    halve<T::kArrays == 5>(tile.images, to, tile.n, tile.c, first_row + i / columns, first_column + i % columns);
}

inline bool has_halves(const Gradients& to) { return to.half_dx.base || to.half_dy.base; }

// Adds to the gradients dx and dy of a kept pixel (y, x) its part of the half-size images' gradients.
template <bool kMasked, class C>
__device__ inline void add_of_half(const Images<C>& images, const Gradients& to, int n, int c, int y, int x, C& dx,
                                   C& dy) {
  y /= 2, x /= 2;
  const auto half = [](int i, int size) { return 2 * i + 1 < size ? C(0.5) : C(1); };
  C share = half(y, images.height) * half(x, images.width);
  if (kMasked && images.mask.base) {
    C count = 0;
    each_of_half<kMasked>(images, n, c, y, x, [&](int, int) { count += 1; });
    share = 1 / count;
  }
  if (to.half_dx.base) dx += load<C>(to.half_dx.base + offset(to.half_dx, n, c, y, x)) * share;
  if (to.half_dy.base) dy += load<C>(to.half_dy.base + offset(to.half_dy, n, c, y, x)) * share;
}

}  // namespace
}  // namespace safeops::cuda
