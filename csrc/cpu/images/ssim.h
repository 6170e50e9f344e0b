// What the forward and the backward of SSIM share: the images as they are read, and the moments of their windows.
//
// With s = x + y and d = x - y, in units of the data range and about the level of a tile:
//   pixels of a row -> s, d -> (across) w s, w d, w s^2, w d^2 -> ring of rows -> (down) E s, E d, E s^2, E d^2
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"
#include "cpu/images/blur.h"

namespace safeops::cpu {

constexpr int64_t kTileRows = 128, kTileColumns = 512;  // at most; the moments of so many columns stay in the L2 cache
constexpr int64_t kWork = 8;  // a pixel is about so many elements of an elementwise loop

// ---- loops over a row

// Adds the finite kept values, and how many they are.
template <class C, bool kMask>
void level_loop(const C* x, const uint8_t* keep, int64_t n, double* sum, int64_t* count) {
  double total = 0;
  int64_t kept = 0;
  _Pragma("omp simd reduction(+ : total, kept)")
  for (int64_t i = 0; i < n; ++i) {
    bool there = x[i] - x[i] == 0;
    if constexpr (kMask) there = there & (keep[i] != 0);
    total += static_cast<double>(select_or_zero(there, x[i]));
    kept += there;
  }
  *sum += total, *count += kept;
}

template <class C>
struct Levels {
  C x = 0, y = 0;
};

// s and d of pixels, 0 where they are not kept.
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

// A part of a plane: windows or pixels [row, row + rows) x [column, column + columns).
struct Tile {
  int64_t plane, row, rows, column, columns;
};

template <class C>
struct Images {
  using OptionalTensor = std::optional<Tensor>;

  Shape shape;
  Order order;
  int64_t planes, height, width, size, before;  // before: how many pixels a window begins before its own place
  int64_t window_rows, window_columns;
  bool masked, shared;  // shared: windows may lack pixels
  C scale, c1, c2;
  std::unique_ptr<C[]> weights;
  Source<C> x, y;
  Source<uint8_t> mask;
  Blur<C> blur;

  Images(const View& x_, const View& y_, const OptionalTensor& mask_, const Options& o)
      : shape(x_.shape()), order(Order::contiguous(shape)), size(o.size), masked(mask_), shared(mask_ || o.same) {
    STD_TORCH_CHECK(shape.ndim == 4 && shape.is(y_.ndim, y_.sizes), "_ssim: needs two images (N, C, H, W) of one shape");
    STD_TORCH_CHECK(size > 0 && size % 2, "_ssim: win_size must be odd");
    planes = shape.size[0] * shape.size[1], height = shape.size[2], width = shape.size[3];
    before = o.same ? size / 2 : 0;
    window_rows = o.same ? height : std::max<int64_t>(height - size + 1, 0);
    window_columns = o.same ? width : std::max<int64_t>(width - size + 1, 0);
    scale = static_cast<C>(1 / o.data_range);
    c1 = static_cast<C>(2 * o.k1 * o.k1), c2 = static_cast<C>(2 * o.k2 * o.k2);
    weigh(o.sigma);
    x.bind(x_, shape, order), y.bind(y_, shape, order);
    if (mask_) mask.bind(View(*mask_), shape, order);
  }

  // Elements of an array of a row, with room for what the loops read and write beyond it.
  int64_t step(int64_t columns) const {
    constexpr int64_t kLine = 64 / sizeof(C);
    return (columns + size + kLine - 1) / kLine * kLine + 2 * kVectors / sizeof(C);
  }

  // Work on rows x columns of each plane is done in tiles: unit / tiles_of_plane is a unit's plane.
  int64_t tiles_of_plane(int64_t rows, int64_t columns) const {
    return (rows + kTileRows - 1) / kTileRows * ((columns + kTileColumns - 1) / kTileColumns);
  }

  // For each thread work = start(columns of a tile, at most); then work->run(tile, unit) for its tiles.
  template <class Start>
  void for_tiles(int64_t rows, int64_t columns, const Start& start) const {
    if (rows == 0 || columns == 0) return;
    const int64_t down = (rows + kTileRows - 1) / kTileRows, across = (columns + kTileColumns - 1) / kTileColumns;
    const int64_t tall = (rows + down - 1) / down, wide = (columns + across - 1) / across;
    parallel(planes * down * across, tall * wide * kWork, [&](int64_t begin, int64_t end) {
      const auto work = start(wide);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t i = unit / across % down * tall, j = unit % across * wide;
        const Tile tile{unit / across / down, i, std::min(tall, rows - i), j, std::min(wide, columns - j)};
        if (tile.rows > 0 && tile.columns > 0) work->run(tile, unit);
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

// ---- one thread's reading of them

// Rows of a plane, columns [column, column + columns) of it, which may lie outside of the image.
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

  // The tile's level: the mean of each image's finite pixels that its windows may see.
  void find_level(int64_t plane, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    double sums[2] = {};
    int64_t counts[2] = {};
    for (int64_t r = std::max<int64_t>(row, 0); r < std::min(row + rows, images.height); ++r)
      for_pieces(plane, r, column, columns, [&](int64_t n, int64_t, const C* a, const C* b, const uint8_t* m) {
        (m ? level_kept : level_all)(a, m, n, &sums[0], &counts[0]);
        (m ? level_kept : level_all)(b, m, n, &sums[1], &counts[1]);
      });
    const auto mean = [](double sum, int64_t count) {
      const C level = static_cast<C>(count ? sum / static_cast<double>(count) : 0.0);
      return level - level == 0 ? level : C(0);
    };
    level = {mean(sums[0], counts[0]), mean(sums[1], counts[1])};
  }

  // Reads s, d and which are kept; zeros outside of the image.
  void read(int64_t plane, int64_t row, int64_t column, int64_t columns) {
    const int64_t first = std::max<int64_t>(column, 0), last = std::min(column + columns, images.width);
    const bool outside = row < 0 || row >= images.height || last <= first;
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
    for_pieces(plane, row, column, columns, [&](int64_t n, int64_t at, const C* a, const C* b, const uint8_t* m) {
      (m ? pixels_kept : pixels_all)(a, b, m, n, level, images.scale, s.get() + at, d.get() + at);
      if (m) {
        normalize(m, n, keep.get() + at);
        flags(m, n, kept.get() + at);
      } else if (images.shared) {
        std::fill_n(kept.get() + at, n, C(1));
      }
    });
  }

 private:
  // body(n, where they are in the row, x, y, mask or null) for pieces of the part inside the image
  template <class Body>
  void for_pieces(int64_t plane, int64_t row, int64_t column, int64_t columns, const Body& body) {
    const int64_t last = std::min(column + columns, images.width), base = (plane * images.height + row) * images.width;
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

// The moments of a row of windows after the other.
template <class C>
struct Moments {
  const Images<C>& images;
  int64_t step;
  Pixels<C> pixels;
  Ring<C> ring, shares;
  std::unique_ptr<C[]> means, share;  // four arrays: E s, E d, E s^2, E d^2; not divided by the share of kept weights
  std::unique_ptr<uint8_t[]> counted;
  std::unique_ptr<uint8_t[]> centres;  // which pixels of the last `size` rows are kept

  Moments(const Images<C>& images_, int64_t columns)
      : images(images_), step(images_.step(columns)), pixels(images_, columns + images_.size),
        ring(images_.size, 4 * step), shares(images_.size, images_.shared ? step : 0), means(new C[4 * step]()),
        share(new C[step]()), counted(new uint8_t[step]()),
        centres(images_.masked ? new uint8_t[images_.size * pixels.step]() : nullptr) {}

  Tile tile{};
  int64_t next = 0;  // the row of pixels that is read next

  // Windows of these rows and columns; some may lie outside of the plane.
  void begin(const Tile& tile_) {
    tile = tile_;
    ring.pushed = shares.pushed = 0;
    next = tile.row - images.before;
    pixels.find_level(tile.plane, next, tile.rows + images.size - 1, tile.column - images.before,
                      tile.columns + images.size - 1);
    for (int64_t k = 1; k < images.size; ++k) push();
  }

  // The next row of windows, in `means`, `share` and, with a mask, `counted`.
  void advance() {
    push();
    const C* w = images.weights.get();
    images.blur.down(ring.last(), w, images.size, tile.columns, step, means.get());
    if (images.shared) images.blur.share_down(shares.last(), w, images.size, tile.columns, share.get());
    if (images.masked) {
      const int64_t half = images.size / 2;
      const uint8_t* row = centres.get() + (ring.pushed + half) % images.size * pixels.step;
      std::copy_n(row + half, tile.columns, counted.get());
    }
  }

 private:
  void push() {
    const C* w = images.weights.get();
    const int64_t columns = tile.columns + images.size - 1;
    pixels.read(tile.plane, next++, tile.column - images.before, columns);
    if (images.masked) std::copy_n(pixels.keep.get(), columns, centres.get() + ring.pushed % images.size * pixels.step);
    images.blur.moments(pixels.s.get(), pixels.d.get(), w, images.size, tile.columns, step, ring.push());
    if (images.shared) {
      const C* kept = pixels.kept.get();
      images.blur.share_across(&kept, w, images.size, tile.columns, shares.push());
    }
  }
};

}  // namespace safeops::cpu
