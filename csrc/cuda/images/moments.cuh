// The moments of a tile of windows:
//   pixels -> s, d relative to the tile's level
//     -> (across) w s, w d, w s^2, w d^2, w -> (down) E s, E d, E s^2, E d^2, sum w
// Pixels and sums are in shared memory. A thread computes a run of windows at once: each value that it reads there
// serves all windows of the run that see it.
#pragma once

#include "common/similarity.h"
#include "pixels.cuh"

namespace safeops::cuda {

template <class C>
constexpr int kRunOf = sizeof(C) == 8 ? 4 : 7;
template <int kSize>
constexpr int kMinBlocks = kSize ? 3 : 2;  // per SM: at most 80 registers a thread, or 128

// kSize: the window's size if known at compile time, else 0. kIncomplete: windows may lack pixels.
template <class C, int kSize, bool kIncomplete>
struct Tile {
  static constexpr int kTileWindows = kWindows<C>, kArrays = 4 + kIncomplete, kPitch = kWindows<C> | 1;
  static constexpr int kRun = kRunOf<C>, kRuns = kWindows<C> / kRun;  // of windows, along a dim
  static_assert(kRuns * kRun == kWindows<C> && kRuns * kWindows<C> <= kTileThreads, "a thread has one run");

  const Images<C>& images;
  const int size, reach, pitch;  // reach: pixels that the windows see; odd pitches put a column into different banks
  int n, c, row, column;         // its plane, and its position among the plane's tiles
  int first_row, first_column;   // its first pixel, which may lie outside of the image
  C *sums, *s, *d;               // (kArrays, reach, kPitch), (reach, pitch) each
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

  // Adds to sum[q][k] the weighted sum over the elements that window k of a run sees. values(j, value) sets value[q] to
  // element j of array q. Elements outside of a window are skipped by a branch: a weight of 0 would let a NaN in.
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

  // Reads s and d of the pixels from (first_row, first_column) on, 0 where they are not kept.
  __device__ void read(int first_row_, int first_column_) {
    first_row = first_row_, first_column = first_column_;
    using Read = Pixels<C, kSize, kIncomplete>;
    const Read pixels(images, n, c, first_row, first_column, reach);
    const Levels<C> level = pixels.levels(reinterpret_cast<Levels<C>*>(sums));
    // scaled by the range before they are added, as twice the level may overflow
    const C x = level.x * images.scale, y = level.y * images.scale;
    terms = {x + y, x - y, images.c1, images.c2};
#pragma unroll
    for (int u = 0; u < Read::kReads; ++u) {
      const int i = pixels.row + u * Read::kStep, at = i * pitch + pixels.column;
      if (i >= reach || pixels.column >= reach) continue;
      const C a = (pixels.x[u] - level.x) * images.scale, b = (pixels.y[u] - level.y) * images.scale;
      // (where no window lacks a pixel, no window of the map sees one outside of the image)
      const bool is_kept = !kIncomplete || (pixels.keep >> u & 1);
      s[at] = is_kept ? a + b : C(0), d[at] = is_kept ? a - b : C(0);
      if constexpr (kIncomplete) kept[at] = is_kept;
    }
    __syncthreads();
  }

  // Sums over each window's columns, for all rows of pixels, into `sums`.
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

  // Sums over rows, for a run that begins at (at, column) of `sums`.
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

  // Position in the map of a window of this tile. in_map: true if the map has that position.
  __device__ int map_row(int at) const { return first_row + images.before + at; }
  __device__ int map_column(int at) const { return first_column + images.before + at; }
  __device__ bool in_map(int y, int x) const {
    return y >= 0 && y < images.window_rows && x >= 0 && x < images.window_columns;
  }

  // Calls body(k, counted, similarity, 1 / the sum of its weights) for each window k that the map has, of the run at
  // (at, column). sum: the run's sums.
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

// Calls run(a value of C, the window's size or 0, true if windows may lack pixels), both constants, for a combination
// that is compiled.
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
