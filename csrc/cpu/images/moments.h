// The moments of windows, row by row (s, d: images.h; w: the window's weights; E: the sum weighted by w, which is still
// to be divided by weight_sum if pixels are missing):
//   (1) across: a row of s, d gives a row of sums of w s, w d, w s^2, w d^2; a ring keeps the last rows;
//   (2) down: the last rows give a row of E s, E d, E s^2, E d^2;
//   (3) across slices, for volumes: the moments of the last slices give the moments of the volume's windows.
#pragma once

#include "cpu/images/images.h"

namespace safeops::cpu {

// A ring of the last `size` slices (or rows) of a tile. Each has `length` elements.
template <class T>
struct Slices {
  int64_t size, length;  // number of slices in the ring; elements of a slice
  std::unique_ptr<T[]> memory;
  std::unique_ptr<const T*[]> pointers;
  int64_t pushed = 0;

  Slices(int64_t size_, int64_t length_)
      : size(size_), length(length_), memory(new T[size_ * length_]()), pointers(new const T*[size_]) {}

  T* push() { return memory.get() + pushed++ % size * length; }

  // Returns pointers to element `at` of each slice, the oldest slice first.
  const T* const* last(int64_t at) const {
    for (int64_t k = 0; k < size; ++k) pointers[k] = memory.get() + (pushed + k) % size * length + at;
    return pointers.get();
  }
};

template <class C>
struct Moments {
  const Images<C>& images;
  int64_t step;
  Pixels<C> pixels;
  Slices<C> rows, row_weights;      // the last rows of one slice, blurred across
  Slices<uint8_t> row_kept;         // masks of the pixels in the last rows
  Slices<C> slices, slice_weights;  // the last slices of volumes, blurred across and down
  Slices<uint8_t> slice_counted;    // 1 if the pixel in the middle of a window's slice is kept
  std::unique_ptr<C[]> means, weight_sum;  // E s, E d, E s^2, E d^2 times weight_sum; sums of kept weights
  std::unique_ptr<uint8_t[]> counted;

  Moments(const Images<C>& images_, int64_t tile_rows, int64_t tile_columns)
      : images(images_), step(images_.step(tile_columns)), pixels(images_, tile_columns + images_.size),
        rows(images_.size, 4 * step), row_weights(images_.size, images_.incomplete ? step : 0),
        row_kept(images_.size, images_.masked ? pixels.step : 0),
        slices(images_.slices_of_window(), images_.volumes ? 4 * step * tile_rows : 0),
        slice_weights(slices.size, images_.volumes && images_.incomplete ? step * tile_rows : 0),
        slice_counted(slices.size, images_.volumes && images_.masked ? step * tile_rows : 0), means(new C[4 * step]()),
        weight_sum(new C[step]()), counted(new uint8_t[step]()) {}

  // Starts the windows of a tile, which must lie inside the map.
  void begin(const Tile& tile_) {
    tile = tile_;
    slices.pushed = slice_weights.pushed = slice_counted.pushed = 0;
    slice = tile.slice - images.before_slice, row = 0;
    pixels.find_level({tile.plane, slice, tile.slices + slices.size - 1, tile.row - images.before,
                       tile.rows + images.size - 1, tile.column - images.before, tile.columns + images.size - 1});
    if (images.volumes)
      for (int64_t k = 1; k < slices.size; ++k) push_slice();
  }

  // Computes the next row of windows: `means`, `weight_sum` and, with a mask, `counted`. After a slice's last row it
  // continues with the next slice.
  void advance() {
    if (!images.volumes) {
      if (row == 0) begin_slice();
      advance_row(means.get(), weight_sum.get(), counted.get());
    } else {
      if (row == 0) push_slice();
      const C* w = images.weights.get();
      images.blur.down(slices.last(4 * step * row), w, slices.size, tile.columns, step, means.get());
      if (images.incomplete)
        images.blur.single_down(slice_weights.last(step * row), w, slices.size, tile.columns, weight_sum.get());
      if (images.masked) std::copy_n(slice_counted.last(step * row)[slices.size / 2], tile.columns, counted.get());
    }
    row = (row + 1) % tile.rows;
  }

 private:
  Tile tile{};
  int64_t slice = 0, row = 0;      // the slice of pixels to read next; the row of windows to compute next
  int64_t pixel_row = 0;           // the row of pixels to read next

  void push_slice() {
    C *to = slices.push(), *to_weight_sum = slice_weights.push();
    uint8_t* to_counted = slice_counted.push();
    begin_slice();
    for (int64_t r = 0; r < tile.rows; ++r) {
      advance_row(to, to_weight_sum, to_counted);
      to += 4 * step;
      if (images.incomplete) to_weight_sum += step;
      if (images.masked) to_counted += step;
    }
  }

  void begin_slice() {
    rows.pushed = row_weights.pushed = row_kept.pushed = 0;
    pixel_row = tile.row - images.before;
    ++slice;
    for (int64_t k = 1; k < images.size; ++k) push_row();
  }

  void advance_row(C* to, C* to_weight_sum, uint8_t* to_counted) {
    push_row();
    const C* w = images.weights.get();
    images.blur.down(rows.last(0), w, images.size, tile.columns, step, to);
    if (images.incomplete) images.blur.single_down(row_weights.last(0), w, images.size, tile.columns, to_weight_sum);
    if (images.masked) std::copy_n(row_kept.last(images.size / 2)[images.size / 2], tile.columns, to_counted);
  }

  void push_row() {
    const C* w = images.weights.get();
    const int64_t columns = tile.columns + images.size - 1;
    pixels.read(tile.plane, slice - 1, pixel_row++, tile.column - images.before, columns);
    images.blur.moments(pixels.s.get(), pixels.d.get(), w, images.size, tile.columns, step, rows.push());
    if (images.incomplete) {
      const C* kept = pixels.kept.get();
      images.blur.single_across(&kept, w, images.size, tile.columns, row_weights.push());
    }
    if (images.masked) std::copy_n(pixels.keep.get(), columns, row_kept.push());
  }
};

}  // namespace safeops::cpu
