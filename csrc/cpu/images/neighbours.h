// Walks the pixels of images row by row, with their neighbours along each spatial dim.
#pragma once

#include <memory>
#include <optional>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

constexpr int64_t kTaskPixels = 65536;  // pixels of a task, approximately

// Words of a mask, one for each element: all bits are set if the element is kept, else none.
template <class C>
using Keep = const BitsOf<C>*;

template <class C>
C kept(C x, BitsOf<C> keep) { return bit_cast<C>(static_cast<BitsOf<C>>(bit_cast<BitsOf<C>>(x) & keep)); }

// Expands mask bytes to words, once for all neighbours: with bytes, gcc would use half of each register. Returns the
// number of kept elements.
template <class C>
int64_t widen_mask_loop(const uint8_t* mask, int64_t n, BitsOf<C>* keep) {
  int32_t count = 0;
  _Pragma("omp simd reduction(+ : count)")
  for (int64_t i = 0; i < n; ++i) {
    keep[i] = mask[i] != 0 ? ~BitsOf<C>(0) : BitsOf<C>(0);
    count += mask[i] != 0;
  }
  return count;
}

// A run of n pixels and their mask (null: all are kept).
template <class C>
struct PixelPiece {
  int64_t image, at, n;  // at: the first pixel's index in the walk
  const C* x;
  Keep<C> keep;
  int64_t kept;  // number of kept pixels
};

// The neighbours of a piece's pixels along a dim. Pixels [first, n) have one before them, pixels [0, last) one after
// them.
template <class C>
struct Neighbours {
  int64_t first, last;
  const C *before = nullptr, *after = nullptr;
  Keep<C> keep_before = nullptr, keep_after = nullptr;
};

// Images in the order of their memory. A row is the innermost spatial dim, with all dims inside it (the channels, if
// they come last). Along that dim, a pixel's neighbour is `step` elements further in the row; along the other dims it
// is in another row.
template <class C>
struct PixelRows {
  struct Dim { int64_t size, step; };

  Shape shape;
  Order order;
  int64_t images, pixels;  // pixels: elements of an image
  int64_t row, rows, block, blocks;  // elements of a row; rows of an image, of a task; tasks of an image
  Dim dims[kMaxDims];  // spatial dims, first the dim along the row
  int ndims = 0;
  bool masked, in_place;  // in_place: rows are read in place; otherwise they are walked in strips of kChunk columns
  Source<C> x;
  Source<uint8_t> mask;

  PixelRows(const View& x_, const std::optional<Tensor>& mask_) : shape(x_.shape()), masked(mask_) {
    STD_TORCH_CHECK(shape.ndim == 4 || shape.ndim == 5, "_total_variation: needs (N, C, H, W) or (N, C, D, H, W)");
    bool of_image[kMaxDims];
    for (int d = 0; d < shape.ndim; ++d) of_image[d] = d > 0;
    order = Order::by_strides(shape, x_.strides, of_image, true);
    images = shape.size[0], pixels = order.numel(), row = pixels;
    for (int64_t i = 0, step = 1; i < order.ndim; step *= order.size[i++]) {
      if (order.dim[i] < 2) continue;
      if (ndims == 0) row = step * order.size[i];
      dims[ndims++] = {order.size[i], step};
    }
    order.push(0, images);
    rows = row ? pixels / row : 0;
    block = std::max<int64_t>(1, kTaskPixels / std::max<int64_t>(row, 1));
    blocks = (rows + block - 1) / block;
    x.bind(x_, shape, order);
    if (mask_) mask.bind(View(*mask_), shape, order);
    in_place = x.direct() && !masked;
  }

  // Each row is a neighbour of two other rows. The buffers keep pieces of four rows, so that each piece is read once.
  struct Buffers {
    struct Read {
      alignas(64) C x[kBuffer];
      alignas(64) BitsOf<C> keep[kBuffer];
      alignas(64) uint8_t mask[kBuffer];
      PixelPiece<C> piece{0, -1, 0, nullptr, nullptr, 0};
    };
    Read rows[4], before, after;
    alignas(64) C to[kBuffer];
  };

  // Calls body(task, piece of the task, buffers) for each piece.
  template <class Body>
  void run(const Body& body) const {
    parallel(images * blocks, block * row * 4, [&](int64_t begin, int64_t end) {
      const auto buffers = std::make_unique<Buffers>();
      for (typename Buffers::Read* read : {&buffers->rows[0], &buffers->rows[1], &buffers->rows[2], &buffers->rows[3],
                                           &buffers->before, &buffers->after}) {
        x.prime(read->x);
        if (masked) mask.prime(read->mask);
      }
      for (int64_t task = begin; task < end; ++task) {
        const int64_t image = task / blocks, first = task % blocks * block;
        const int64_t last = std::min(first + block, rows), part = in_place ? row : kChunk;
        for (int64_t strip = 0; strip < row; strip += part)
          for (int64_t r = first; r < last; ++r)
            for (int64_t at = strip; at < std::min(strip + part, row); at += kChunk)
              body(task, read_row(image, r * row + at, std::min(kChunk, row - at), *buffers), *buffers);
      }
    });
  }

  Neighbours<C> neighbours(const PixelPiece<C>& p, int k, Buffers& buffers) const {
    const int64_t step = dims[k].step, at = p.at - p.image * pixels;
    if (k == 0) {  // neighbours along the row: its first pixels have none before, its last none after
      const int64_t from = at % row;
      Neighbours<C> y{std::clamp<int64_t>(step - from, 0, p.n), std::clamp<int64_t>(row - step - from, 0, p.n)};
      if (p.n == row) {
        y.before = p.x - step, y.after = p.x + step;
        if (masked) y.keep_before = p.keep - step, y.keep_after = p.keep + step;
        return y;
      }
      return fetch(p, step, y, buffers.before, buffers.after);
    }
    const int64_t place = at / step % dims[k].size;
    Neighbours<C> y{place == 0 ? p.n : 0, place == dims[k].size - 1 ? 0 : p.n};
    if (step != row) return fetch(p, step, y, buffers.before, buffers.after);  // neighbours are not in adjacent rows
    if (y.first == 0) {
      const PixelPiece<C> other = read_row(p.image, at - step, p.n, buffers);
      y.before = other.x, y.keep_before = other.keep;
    }
    if (y.last == p.n) {
      const PixelPiece<C> other = read_row(p.image, at + step, p.n, buffers);
      y.after = other.x, y.keep_after = other.keep;
    }
    return y;
  }

 private:
  using Read = typename Buffers::Read;

  PixelPiece<C> read_row(int64_t image, int64_t at, int64_t n, Buffers& buffers) const {
    Read& read = buffers.rows[at / row % 4];
    if (read.piece.at != image * pixels + at) fetch(image, image * pixels + at, n, read);
    return read.piece;
  }

  Neighbours<C> fetch(const PixelPiece<C>& p, int64_t step, Neighbours<C> y, Read& before, Read& after) const {
    if (y.first < p.n) {
      fetch(p.image, p.at + y.first - step, p.n - y.first, before);
      y.before = before.piece.x - y.first;
      if (masked) y.keep_before = before.piece.keep - y.first;
    }
    if (y.last > 0) {
      fetch(p.image, p.at + step, y.last, after);
      y.after = after.piece.x, y.keep_after = after.piece.keep;
    }
    return y;
  }

  // If rows are read in parts, prefetches the next row's part. Complete rows are left to the hardware, which prefetches
  // them better.
  void fetch(int64_t image, int64_t at, int64_t n, Read& to) const {
    const int64_t ahead = row > kChunk && !in_place ? at + row : INT64_MAX;
    to.piece = {image, at, n, x.fetch(at, n, ahead, to.x), nullptr, n};
    if (!masked) return;
    to.piece.kept = keep(mask.fetch(at, n, ahead, to.mask), n, to.keep);
    to.piece.keep = to.keep;
  }

  decltype(pick<&widen_mask_loop<C>>()) keep = pick<&widen_mask_loop<C>>();
};

}  // namespace safeops::cpu
