// Reads and writes tensors (N, C, d1, ...) in tiles. A tile is a run of pixels of one image. For each class it has one
// row, the values of its pixels, which is read piece by piece. If the classes are innermost in memory (channels last),
// a tile is one piece, which is transposed in the cache.
#pragma once

#include <memory>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/transpose.h"

namespace safeops::cpu {

constexpr int64_t kTile = 8192;  // elements: at most so many of a transposed tile; so many of a row of another tile

// Pixels [at, at + m) of image n: a tile, or a piece of a tile.
struct Tile {
  int64_t n, at, m;
};

// The walk over the tiles of all tensors, with pixels in the order of the input's memory.
struct Grid {
  int64_t classes, pixels;     // of one image
  int64_t tile, piece;         // in pixels; tiles that are not transposed are long, since the runs in memory are
  int64_t row = 0;             // elements from row to row of a transposed tile; a power of two would alias
  bool channels_last = false;  // the input's classes are innermost in memory
  Order by_pixel;              // walks pixels, then images
  Order by_row, by_class;      // walk pixels, classes, images; and classes, pixels, images

  Grid(const Shape& shape, const View& x) {
    STD_TORCH_CHECK(shape.ndim >= 2, "safeops: input must be (N, C, d1, ...)");
    bool spatial[kMaxDims];
    for (int d = 0; d < shape.ndim; ++d) spatial[d] = d >= 2;
    by_pixel = Order::by_strides(shape, x.strides, spatial, true);
    classes = shape.size[1], pixels = by_pixel.numel();
    by_row = by_pixel;
    by_row.push(1, classes);
    by_class.push(1, classes);
    for (int i = 0; i < by_pixel.ndim; ++i) by_class.push(by_pixel.dim[i], by_pixel.size[i]);
    for (Order* order : {&by_pixel, &by_row, &by_class}) order->push(0, shape.size[0]);
    tile = kTile, piece = kChunk / 2;
    if (classes < 2 || classes > 128 || x.strides[1] != 1) return;
    channels_last = true, tile = piece = std::min(piece, kTile / classes / 16 * 16);
    row = tile + 16;
  }

  // Returns the offset of the tile's first pixel. With c: in the order `by_row`, for class c. Without c: in the order
  // `by_class`.
  int64_t start(const Tile& t, int64_t c) const { return (t.n * classes + c) * pixels + t.at; }
  int64_t start(const Tile& t) const { return (t.n * pixels + t.at) * classes; }

  // Calls body(first pixel, number of pixels) for pieces of the tile that fit a buffer.
  template <class Body>
  void for_pieces(const Tile& t, const Body& body) const {
    const int64_t most = std::max<int64_t>(2 * kFine / classes / 4, 1) * 4;
    for (int64_t at = 0; at < t.m; at += most) body(at, std::min(most, t.m - at));
  }
};

template <class C>
struct TileBuffer {
  std::unique_ptr<C[]> rows;
  alignas(64) C piece[kBuffer] = {};

  explicit TileBuffer(const Grid& grid) : rows(grid.channels_last ? new C[grid.classes * grid.row]() : nullptr) {}
};

template <class Operand>
struct Tiles {
  Operand operand;
  const Grid* grid = nullptr;
  bool channels_last = false;

  void bind(const View& view, const Shape& shape, const Grid& grid_) {
    grid = &grid_;
    if (grid->channels_last) operand.bind(view, shape, grid->by_class);
    channels_last = grid->channels_last && operand.kind != Kind::kStrided;
    if (!channels_last) operand.bind(view, shape, grid->by_row);
  }

  bool in_place() const { return operand.kind == Kind::kDirect && !channels_last; }
};

template <class C>
struct TileSource : Tiles<Source<C>> {
  using Tiles<Source<C>>::operand, Tiles<Source<C>>::grid, Tiles<Source<C>>::channels_last;

  void prime(TileBuffer<C>& buffer) const {
    if (grid) operand.prime(buffer.piece);
  }

  void load(const Tile& t, TileBuffer<C>& buffer) const {
    if (!channels_last) return;
    grid->for_pieces(t, [&](int64_t at, int64_t m) {
      const int64_t start = grid->start(t) + at * grid->classes;
      const C* from = operand.fetch(start, m * grid->classes, start + kAhead, buffer.piece);
      transpose_(from, m, grid->classes, grid->classes, buffer.rows.get() + at, grid->row);
    });
  }

  const C* row(const Tile& t, int64_t c, TileBuffer<C>& buffer) const {
    if (channels_last) return buffer.rows.get() + c * grid->row;
    const int64_t start = grid->start(t, c);
    return operand.fetch(start, t.m, start + kAhead, buffer.piece);
  }

 private:
  decltype(pick<&transpose_rows<C>>()) transpose_ = pick<&transpose_rows<C>>();
};

// Outputs. A loop writes the values of a row at row(). commit() is called for each row, and then for the tile.
template <class C>
struct TileSink : Tiles<Sink<C>> {
  using Tiles<Sink<C>>::operand, Tiles<Sink<C>>::grid, Tiles<Sink<C>>::channels_last;

  C* row(const Tile& t, int64_t c, TileBuffer<C>& buffer) const {
    return channels_last ? buffer.rows.get() + c * grid->row : operand.target(grid->start(t, c), buffer.piece);
  }

  // Rows that are written in place are not prefetched: the hardware follows runs as long as these.
  void commit(const Tile& t, int64_t c, TileBuffer<C>& buffer) const {
    if (!channels_last && operand.kind != Kind::kDirect) operand.commit(grid->start(t, c), t.m, buffer.piece);
  }

  void commit(const Tile& t, TileBuffer<C>& buffer) const {
    if (!channels_last) return;
    grid->for_pieces(t, [&](int64_t at, int64_t m) {
      const int64_t start = grid->start(t) + at * grid->classes;
      C* to = operand.target(start, buffer.piece);
      transpose_(buffer.rows.get() + at, grid->classes, m, grid->row, to, grid->classes);
      operand.commit(start, m * grid->classes, buffer.piece);
    });
  }

 private:
  decltype(pick<&transpose_rows<C>>()) transpose_ = pick<&transpose_rows<C>>();
};

}  // namespace safeops::cpu
