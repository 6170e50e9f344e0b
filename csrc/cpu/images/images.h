// Reads two images and a mask for SSIM, tile by tile and row by row, as s = x + y and d = x - y. x and y are taken
// relative to the level (mean) of the tile, and divided by the data range. Images (N, C, H, W) are read as volumes (N,
// C, 1, H, W) with windows that are one slice deep.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"
#include "cpu/images/blur.h"

namespace safeops::cpu {

// The largest tile of images and of volumes. The rows (for volumes slices) of moments of a tile stay in the cache.
constexpr int64_t kTileRows[] = {128, 32}, kTileColumns[] = {512, 128};
constexpr int64_t kWork = 8;  // a pixel costs as much as this many elements of an elementwise loop

// ---- loops over a row

// Adds the kept finite values to `sum`, and their number to `count`.
template <class C, bool kMask>
void level_loop(const C* x, const uint8_t* keep, int64_t n, double* sum, int64_t* count) {
  double total = 0;
  int64_t kept = 0;
  _Pragma("omp simd reduction(+ : total, kept)")
  for (int64_t i = 0; i < n; ++i) {
    bool finite = x[i] - x[i] == 0;
    if constexpr (kMask) finite = finite & (keep[i] != 0);
    total += static_cast<double>(select_or_zero(finite, x[i]));
    kept += finite;
  }
  *sum += total, *count += kept;
}

template <class C>
struct Levels {
  C x = 0, y = 0;
};

// Computes s and d of n pixels; 0 where a pixel is not kept.
template <class C, bool kMask>
void pixels_loop(const C* x, const C* y, const uint8_t* keep, int64_t n, Levels<C> level, C scale, C* s, C* d) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C a = (x[i] - level.x) * scale, b = (y[i] - level.y) * scale;
    if constexpr (kMask) {
      s[i] = select_or_zero(keep[i] != 0, a + b);
      d[i] = select_or_zero(keep[i] != 0, a - b);
    } else {
      s[i] = a + b, d[i] = a - b;
    }
  }
}

template <class C>
void flags_loop(const uint8_t* keep, int64_t n, C* out) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) out[i] = keep[i] != 0 ? C(1) : C(0);
}

// ---- the images

struct Options {
  double data_range;
  int64_t size;
  double sigma, k1, k2;
  bool same;
};

// A part of a plane (n, c): windows, or pixels, [slice, slice + slices) x [row, row + rows) x [column, column +
// columns).
struct Tile {
  int64_t plane, slice, slices, row, rows, column, columns;
};

template <class C>
struct Images {
  using OptionalTensor = std::optional<Tensor>;

  Shape shape, map;  // map: the shape of one element for each window
  Order order;
  bool volumes, masked, incomplete;  // incomplete: windows may lack pixels (masked, or outside the image)
  int64_t planes, depth, height, width, size;
  int64_t before, before_slice;  // pixels, or slices, from a window's start to its position in the map
  int64_t window_slices, window_rows, window_columns;
  C scale, c1, c2;
  std::unique_ptr<C[]> weights;
  Source<C> x, y;
  Source<uint8_t> mask;
  Blur<C> blur;

  Images(const View& x_, const View& y_, const OptionalTensor& mask_, const Options& o)
      : shape(x_.shape()), map(shape), order(Order::contiguous(shape)), volumes(shape.ndim == 5), masked(mask_),
        incomplete(mask_ || o.same), size(o.size) {
    STD_TORCH_CHECK((shape.ndim == 4 || volumes) && shape.is(y_.ndim, y_.sizes),
                    "_ssim: needs two images (N, C, H, W) or (N, C, D, H, W) of one shape");
    STD_TORCH_CHECK(size > 0 && size % 2, "_ssim: win_size must be odd");
    for (int d = 2; d < map.ndim && !o.same; ++d) map.size[d] = std::max<int64_t>(shape.size[d] - size + 1, 0);
    const int row = volumes ? 3 : 2;
    planes = shape.size[0] * shape.size[1], depth = volumes ? shape.size[2] : 1;
    height = shape.size[row], width = shape.size[row + 1];
    window_slices = volumes ? map.size[2] : 1, window_rows = map.size[row], window_columns = map.size[row + 1];
    before = o.same ? size / 2 : 0, before_slice = volumes ? before : 0;
    scale = static_cast<C>(1 / o.data_range);
    c1 = static_cast<C>(2 * o.k1 * o.k1), c2 = static_cast<C>(2 * o.k2 * o.k2);
    weigh(o.sigma);
    x.bind(x_, shape, order), y.bind(y_, shape, order);
    if (mask_) mask.bind(View(*mask_), shape, order);
  }

  int64_t slices_of_window() const { return volumes ? size : 1; }

  // Elements of one array of a row, with the room for reads and writes beyond its end.
  int64_t step(int64_t columns) const {
    constexpr int64_t kLine = 64 / sizeof(C);
    return (columns + size + kLine - 1) / kLine * kLine + 2 * kVectors / sizeof(C);
  }

  // Returns the number of tiles into which rows x columns of a plane are cut. Tile i is in plane i / tiles_of_plane.
  int64_t tiles_of_plane(int64_t rows, int64_t columns) const {
    return (rows + kTileRows[volumes] - 1) / kTileRows[volumes] *
           ((columns + kTileColumns[volumes] - 1) / kTileColumns[volumes]);
  }

  // Each thread makes work = start(most rows of a tile, most columns of a tile), and calls work->run(tile, tile's
  // number) for each of its tiles.
  template <class Start>
  void for_tiles(int64_t slices, int64_t rows, int64_t columns, const Start& start) const {
    if (slices * rows * columns == 0) return;
    const int64_t across = (columns + kTileColumns[volumes] - 1) / kTileColumns[volumes];
    const int64_t down = tiles_of_plane(rows, columns) / across;
    const int64_t tile_rows = (rows + down - 1) / down, tile_columns = (columns + across - 1) / across;
    parallel(planes * down * across, slices * tile_rows * tile_columns * kWork, [&](int64_t begin, int64_t end) {
      const auto work = start(tile_rows, tile_columns);
      for (int64_t tile_index = begin; tile_index < end; ++tile_index) {
        const int64_t i = tile_index / across % down * tile_rows, j = tile_index % across * tile_columns;
        const Tile tile{tile_index / across / down, 0, slices, i, std::min(tile_rows, rows - i), j,
                        std::min(tile_columns, columns - j)};
        if (tile.rows > 0 && tile.columns > 0) work->run(tile, tile_index);
      }
    });
  }

 private:
  void weigh(double sigma) {
    weights.reset(new C[size]);
    double total = 0;
    const auto weight = [&](int64_t k) {
      const double t = static_cast<double>(k - size / 2) / sigma;
      return std::exp(-0.5 * t * t);
    };
    for (int64_t k = 0; k < size; ++k) total += weight(k);
    for (int64_t k = 0; k < size; ++k) weights[k] = static_cast<C>(weight(k) / total);
  }
};

// ---- One thread's reader of the images.

// Reads columns [column, column + columns) of rows of a plane. They may lie outside the image.
template <class C>
struct Pixels {
  const Images<C>& images;
  int64_t step;
  std::unique_ptr<C[]> s, d, kept;
  std::unique_ptr<uint8_t[]> keep;
  Levels<C> level;
  alignas(64) C x[kBuffer], y[kBuffer];
  alignas(64) uint8_t mask[kBuffer];

  Pixels(const Images<C>& images_, int64_t columns)
      : images(images_), step(images_.step(columns)), s(new C[step]()), d(new C[step]()), kept(new C[step]()),
        keep(new uint8_t[step]()) {
    images.x.prime(x), images.y.prime(y);
    if (images.masked) images.mask.prime(mask);
  }

  // Sets the level of each image: the mean of its kept finite pixels in t. t has the pixels that a tile's windows may
  // see.
  void find_level(const Tile& t) {
    double sums[2] = {};
    int64_t counts[2] = {};
    const auto add = [&](int64_t n, int64_t, const C* a, const C* b, const uint8_t* m) {
      (m ? level_kept : level_all)(a, m, n, &sums[0], &counts[0]);
      (m ? level_kept : level_all)(b, m, n, &sums[1], &counts[1]);
    };
    for (int64_t z = std::max<int64_t>(t.slice, 0); z < std::min(t.slice + t.slices, images.depth); ++z)
      for (int64_t r = std::max<int64_t>(t.row, 0); r < std::min(t.row + t.rows, images.height); ++r)
        for_pieces(t.plane, z, r, t.column, t.columns, add);
    const auto mean = [](double sum, int64_t count) {
      const C level = static_cast<C>(count ? sum / static_cast<double>(count) : 0.0);
      return level - level == 0 ? level : C(0);
    };
    level = {mean(sums[0], counts[0]), mean(sums[1], counts[1])};
  }

  // Reads s, d and their mask for columns [column, column + columns) of a row; all three are 0 outside the image.
  void read(int64_t plane, int64_t slice, int64_t row, int64_t column, int64_t columns) {
    const int64_t first = std::max<int64_t>(column, 0), last = std::min(column + columns, images.width);
    const bool beyond = slice < 0 || slice >= images.depth || row < 0 || row >= images.height;
    const bool outside = beyond || last <= first;
    const int64_t left = outside ? columns : first - column, right = outside ? columns : last - column;
    const auto clear = [&](int64_t from, int64_t to) {
      std::fill(s.get() + from, s.get() + to, C(0));
      std::fill(d.get() + from, d.get() + to, C(0));
      std::fill(kept.get() + from, kept.get() + to, C(0));
      std::fill(keep.get() + from, keep.get() + to, uint8_t(0));
    };
    if (left > 0) clear(0, left);
    if (right < columns) clear(right, columns);
    if (outside) return;
    const auto take = [&](int64_t n, int64_t at, const C* a, const C* b, const uint8_t* m) {
      (m ? pixels_kept : pixels_all)(a, b, m, n, level, images.scale, s.get() + at, d.get() + at);
      if (m) {
        normalize(m, n, keep.get() + at);
        flags(m, n, kept.get() + at);
      } else if (images.incomplete) {
        std::fill_n(kept.get() + at, n, C(1));
      }
    };
    for_pieces(plane, slice, row, column, columns, take);
  }

 private:
  // Calls body(n, offset in the row, x, y, mask or null) for pieces of the row's part that lies inside the image.
  template <class Body>
  void for_pieces(int64_t plane, int64_t slice, int64_t row, int64_t column, int64_t columns, const Body& body) {
    const int64_t last = std::min(column + columns, images.width);
    const int64_t base = ((plane * images.depth + slice) * images.height + row) * images.width;
    for (int64_t at = std::max<int64_t>(column, 0); at < last; at += kChunk) {
      const int64_t n = std::min(kChunk, last - at), ahead = base + at + images.width;
      const C* a = images.x.fetch(base + at, n, ahead, x);
      const C* b = images.y.fetch(base + at, n, ahead, y);
      body(n, at - column, a, b, images.masked ? images.mask.fetch(base + at, n, ahead, mask) : nullptr);
    }
  }

  decltype(pick<&level_loop<C, false>>()) level_all = pick<&level_loop<C, false>>(),
                                          level_kept = pick<&level_loop<C, true>>();
  decltype(pick<&pixels_loop<C, false>>()) pixels_all = pick<&pixels_loop<C, false>>(),
                                           pixels_kept = pick<&pixels_loop<C, true>>();
  decltype(pick<&flags_loop<C>>()) flags = pick<&flags_loop<C>>();
  decltype(pick<&normalize_mask_loop>()) normalize = pick<&normalize_mask_loop>();
};

}  // namespace safeops::cpu
