// The moments of one row of windows after the other:
//   a row of s, d -> (across) w s, w d, w s^2, w d^2 -> the last rows -> (down) E s, E d, E s^2, E d^2
// and of volumes those of a slice -> the last slices -> (deep) the same.
#pragma once

#include "cpu/images/images.h"

namespace safeops::cpu {

// The last slices of a tile, each so many rows of `length` elements.
template <class T>
struct Slices {
  int64_t size, length;  // of slices, of a slice
  std::unique_ptr<T[]> memory;
  std::unique_ptr<const T*[]> found;
  int64_t pushed = 0;

  Slices(int64_t size_, int64_t length_)
      : size(size_), length(length_), memory(new T[size_ * length_]()), found(new const T*[size_]) {}

  T* push() { return memory.get() + pushed++ % size * length; }

  // The same place in each of them, in their order.
  const T* const* last(int64_t at) const {
    for (int64_t k = 0; k < size; ++k) found[k] = memory.get() + (pushed + k) % size * length + at;
    return found.get();
  }
};

template <class C>
struct Moments {
  const Images<C>& images;
  int64_t step;
  Pixels<C> pixels;
  Slices<C> rows, row_shares;      // of one slice: the last rows, blurred across
  Slices<uint8_t> row_kept;        // their pixels
  Slices<C> slices, slice_shares;  // of volumes: the last slices, blurred across and down
  Slices<uint8_t> slice_counted;   // whether the pixel at the middle of a window's slice is kept
  std::unique_ptr<C[]> means, share;  // E s, E d, E s^2, E d^2, not divided by the share of kept weights
  std::unique_ptr<uint8_t[]> counted;

  Moments(const Images<C>& images_, int64_t tall, int64_t wide)
      : images(images_), step(images_.step(wide)), pixels(images_, wide + images_.size), rows(images_.size, 4 * step),
        row_shares(images_.size, images_.shared ? step : 0), row_kept(images_.size, images_.masked ? pixels.step : 0),
        slices(images_.slices_of_window(), images_.volumes ? 4 * step * tall : 0),
        slice_shares(slices.size, images_.volumes && images_.shared ? step * tall : 0),
        slice_counted(slices.size, images_.volumes && images_.masked ? step * tall : 0), means(new C[4 * step]()),
        share(new C[step]()), counted(new uint8_t[step]()) {}

  // Windows of this tile, inside of the map.
  void begin(const Tile& tile_) {
    tile = tile_;
    slices.pushed = slice_shares.pushed = slice_counted.pushed = 0;
    slice = tile.slice - images.before_slice, row = 0;
    pixels.find_level({tile.plane, slice, tile.slices + slices.size - 1, tile.row - images.before,
                       tile.rows + images.size - 1, tile.column - images.before, tile.columns + images.size - 1});
    if (images.volumes)
      for (int64_t k = 1; k < slices.size; ++k) push_slice();
  }

  // The next row of windows, in `means`, `share` and, with a mask, `counted`; then the next slice's.
  void advance() {
    if (!images.volumes) {
      if (row == 0) begin_slice();
      advance_row(means.get(), share.get(), counted.get());
    } else {
      if (row == 0) push_slice();
      const C* w = images.weights.get();
      images.blur.down(slices.last(4 * step * row), w, slices.size, tile.columns, step, means.get());
      if (images.shared)
        images.blur.share_down(slice_shares.last(step * row), w, slices.size, tile.columns, share.get());
      if (images.masked) std::copy_n(slice_counted.last(step * row)[slices.size / 2], tile.columns, counted.get());
    }
    row = (row + 1) % tile.rows;
  }

 private:
  Tile tile{};
  int64_t slice = 0, row = 0;      // of the next windows; the slice of pixels that is read next
  int64_t pixel_row = 0;           // that is read next

  void push_slice() {
    C *to = slices.push(), *to_share = slice_shares.push();
    uint8_t* to_counted = slice_counted.push();
    begin_slice();
    for (int64_t r = 0; r < tile.rows; ++r) {
      advance_row(to, to_share, to_counted);
      to += 4 * step;
      if (images.shared) to_share += step;
      if (images.masked) to_counted += step;
    }
  }

  void begin_slice() {
    rows.pushed = row_shares.pushed = row_kept.pushed = 0;
    pixel_row = tile.row - images.before;
    ++slice;
    for (int64_t k = 1; k < images.size; ++k) push_row();
  }

  void advance_row(C* to, C* to_share, uint8_t* to_counted) {
    push_row();
    const C* w = images.weights.get();
    images.blur.down(rows.last(0), w, images.size, tile.columns, step, to);
    if (images.shared) images.blur.share_down(row_shares.last(0), w, images.size, tile.columns, to_share);
    if (images.masked) std::copy_n(row_kept.last(images.size / 2)[images.size / 2], tile.columns, to_counted);
  }

  void push_row() {
    const C* w = images.weights.get();
    const int64_t columns = tile.columns + images.size - 1;
    pixels.read(tile.plane, slice - 1, pixel_row++, tile.column - images.before, columns);
    images.blur.moments(pixels.s.get(), pixels.d.get(), w, images.size, tile.columns, step, rows.push());
    if (images.shared) {
      const C* kept = pixels.kept.get();
      images.blur.share_across(&kept, w, images.size, tile.columns, row_shares.push());
    }
    if (images.masked) std::copy_n(pixels.keep.get(), columns, row_kept.push());
  }
};

}  // namespace safeops::cpu
