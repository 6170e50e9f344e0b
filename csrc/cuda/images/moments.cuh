// The moments of a tile of windows, with s = x + y, d = x - y and the window's weights w:
//   (1) read: the pixels' s and d, with the tile's level (the mean of its pixels) subtracted
//   (2) across: for each row, the sums of w s, w d, w s^2, w d^2 and w over each window's columns
//   (3) down: the weighted sums of these over each window's rows: E s, E d, E s^2, E d^2 and the sum of the weights
// Pixels and sums (2) are in shared memory. A thread computes a run of neighbouring windows at once: each value that it
// reads serves all windows of the run that contain it.
#pragma once

#include "common/similarity.h"
#include "pixels.cuh"

namespace safeops::cuda {

template <class C>
constexpr int kRunOf = sizeof(C) == 8 ? 4 : 7;
template <int kSize>
constexpr int kMinBlocks = kSize ? 3 : 2;  // blocks per SM: 3 leave a thread 80 registers, 2 leave it 128

// kSize: the window's size if known at compile time, else 0. kIncomplete: windows may have masked or outside pixels.
template <class C, int kSize, bool kIncomplete>
struct Tile {
  static constexpr int kTileWindows = kWindows<C>, kArrays = 4 + kIncomplete, kPitch = kWindows<C> | 1;
  static constexpr int kRun = kRunOf<C>, kRuns = kWindows<C> / kRun;  // windows of a run; runs of a tile along a dim
  static_assert(kRuns * kRun == kWindows<C> && kRuns * kWindows<C> <= kTileThreads, "a thread has one run");

  const Images<C>& images;
  const int size, reach, pitch;  // reach x reach pixels; pitch is odd, so that a column's pixels are in different banks
  int n, c, row, column;         // the tile's plane (n, c), and its position among the plane's tiles
  int first_row, first_column;   // position of the tile's first pixel, which may lie outside of the image
  C *sums, *s, *d;               // shapes: sums (kArrays, reach, kPitch); s and d (reach, pitch)
  uint8_t* kept;
  SimilarityTerms<C> terms;

  __device__ explicit Tile(const Images<C>& images_)
      : images(images_), size(kSize ? kSize : images_.size), reach(kWindows<C> + size - 1), pitch(reach | 1) {
    const uint32_t tiles = images_.down * images_.across, plane = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    n = int(plane / images_.channels), c = int(plane % images_.channels);
    row = int(tile / images_.across), column = int(tile % images_.across);
    sums = reinterpret_cast<C*>(shared_memory());
    s = sums + kArrays * reach * kPitch, d = s + reach * pitch;
    kept = reinterpret_cast<uint8_t*>(d + reach * pitch);
  }

  static int bytes(int size) {
    const int reach = kWindows<C> + size - 1, pixels = reach * (reach | 1);
    return kArrays * reach * kPitch * int(sizeof(C)) + pixels * (2 * int(sizeof(C)) + kIncomplete);
  }

  // Adds to sum[q][k] the weighted sum of array q over elements [k, k + size), the window k of a run. values(j, value)
  // sets value[q] to element j of array q. Elements outside of a window are skipped by a branch, not by a weight of 0,
  // since 0 * NaN is NaN.
  template <int kCount, class Values>
  __device__ void weigh(C (&sum)[kCount][kRun], const Values& values) const {
    constexpr int kUnroll = kSize ? kSize + kRun - 1 : 1;
#pragma unroll kUnroll
    for (int j = 0; j < size + kRun - 1; ++j) {
      C value[kCount];
      values(j, value);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (j < k || j - k >= size) continue;
#pragma unroll
        for (int q = 0; q < kCount; ++q) sum[q][k] += images.weights[j - k] * value[q];
      }
    }
  }

  // Step (1): stores s and d of the reach x reach pixels from (first_row, first_column) on, or 0 for pixels not kept.
  __device__ void read(int first_row_, int first_column_) {
    first_row = first_row_, first_column = first_column_;
    using Read = Pixels<C, kSize, kIncomplete>;
    const Read pixels(images, n, c, first_row, first_column, reach);
    const Levels<C> level = pixels.levels(reinterpret_cast<Levels<C>*>(sums));
    // The levels are divided by data_range before they are added, since the sum of two large levels may overflow.
    const C x = level.x * images.scale, y = level.y * images.scale;
    terms = {x + y, x - y, images.c1, images.c2};
#pragma unroll
    for (int u = 0; u < Read::kReads; ++u) {
      const int i = pixels.row + u * Read::kStep, at = i * pitch + pixels.column;
      if (i >= reach || pixels.column >= reach) continue;
      const C a = (pixels.x[u] - level.x) * images.scale, b = (pixels.y[u] - level.y) * images.scale;
      // (Without kIncomplete, pixels outside of the image are in no window of the map, so any value does.)
      const bool is_kept = !kIncomplete || (pixels.keep >> u & 1);
      s[at] = is_kept ? a + b : C(0), d[at] = is_kept ? a - b : C(0);
      if constexpr (kIncomplete) kept[at] = is_kept;
    }
    __syncthreads();
  }

  // Step (2): sums[q][i][j] is the weighted sum of array q in row i of pixels over the columns of window j.
  __device__ void across() {
#pragma unroll 1
    for (int i = threadIdx.x; i < reach * kRuns; i += kTileThreads) {
      const int at = i % reach, first = i / reach * kRun;
      C sum[kArrays][kRun] = {};
      weigh(sum, [&](int j, C(&value)[kArrays]) {
        const int pixel = at * pitch + first + j;
        value[0] = s[pixel], value[1] = d[pixel], value[2] = value[0] * value[0], value[3] = value[1] * value[1];
        if constexpr (kIncomplete) value[4] = kept[pixel] ? C(1) : C(0);
      });
      put(sum, at, first, 1);
    }
    __syncthreads();
  }

  // Step (3): adds to sum[q][k] the weighted sum of sums[q][i][column] over i in [at + k, at + k + size), for the run
  // of windows at rows at, at + 1, ... of one column.
  template <int kCount>
  __device__ void down(int at, int column, C (&sum)[kCount][kRun]) const {
    weigh(sum, [&](int j, C(&value)[kCount]) {
#pragma unroll
      for (int q = 0; q < kCount; ++q) value[q] = sums[(q * reach + at + j) * kPitch + column];
    });
  }

  template <int kCount>
  __device__ void put(const C (&sum)[kCount][kRun], int at, int column, int step) const {
#pragma unroll
    for (int q = 0; q < kCount; ++q)
#pragma unroll
      for (int k = 0; k < kRun; ++k) sums[(q * reach + at) * kPitch + column + k * step] = sum[q][k];
  }

  // Row (column) in the map of the windows in row (column) `at` of this tile. in_map: true if the map has (y, x).
  __device__ int map_row(int at) const { return first_row + images.before + at; }
  __device__ int map_column(int at) const { return first_column + images.before + at; }
  __device__ bool in_map(int y, int x) const {
    return y >= 0 && y < images.window_rows && x >= 0 && x < images.window_columns;
  }

  // Calls body(k, counted, similarity, inverse) for each window k of the run at (at, column), if the map has it. sum:
  // the run's sums from down(). counted: the window's central pixel is kept. inverse: 1 / the sum of its weights.
  template <class Body>
  __device__ void each_window(const C (&sum)[kArrays][kRun], int at, int column, const Body& body) const {
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (!in_map(map_row(at + k), map_column(column))) continue;
      const bool counted = !kIncomplete || kept[(at + k + size / 2) * pitch + column + size / 2];
      C inverse = C(1);
      if constexpr (kIncomplete) inverse = 1 / (counted ? sum[4][k] : C(1));
      const auto mean = [&](int q) { return sum[q][k] * inverse; };
      body(k, counted, Similarity<C>::of(terms, mean(0), mean(1), mean(2), mean(3)), inverse);
    }
  }
};

// Calls run(C(), kSize, kIncomplete) for the kernel that is compiled for this call: double; float with windows of size
// 11; or float with any size. The last two arguments are std::integral_constant.
template <class Run>
void by_kind(bool wide, bool incomplete, int64_t size, const Run& run) {
  const auto with = [&](auto compute, auto static_size) {
    if (incomplete) run(compute, static_size, std::true_type());
    else run(compute, static_size, std::false_type());
  };
  if (wide) with(double(), std::integral_constant<int, 0>());
  else if (size == 11) with(float(), std::integral_constant<int, 11>());
  else with(float(), std::integral_constant<int, 0>());
}

}  // namespace safeops::cuda
