// The moments of a tile of windows:
//   pixels -> s, d about the tile's level -> (across) w s, w d, w s^2, w d^2, w -> (down) E s, E d, E s^2, E d^2, share
// All of it lies in shared memory, and a thread makes a run of windows at once: each number that it reads there
// serves as many windows as see it.
#pragma once

#include "common/similarity.h"
#include "cuda/engine/launch.cuh"
#include "cuda/engine/types.cuh"
#include "images.h"

namespace safeops::cuda {

constexpr int kTileThreads = 256;
template <class C>
constexpr int kRunOf = sizeof(C) == 8 ? 4 : 7;
template <class C>
constexpr int kMinBlocks = sizeof(C) == 8 ? 2 : 3;  // of an SM: in fp32 at most 80 registers a thread

// Along a dim. kSize: known when compiled, or 0. kShared: windows may lack pixels.
template <class C, int kSize, bool kShared>
struct Tile {
  static constexpr int kArrays = 4 + kShared, kPitch = kWindows<C> | 1;
  static constexpr int kRun = kRunOf<C>, kRuns = kWindows<C> / kRun;  // of windows, along a dim
  static_assert(kRuns * kRun == kWindows<C> && kRuns * kWindows<C> <= kTileThreads, "a thread has one run");

  const Images<C>& images;
  const int size, reach, pitch;  // reach: pixels that the windows see; odd pitches: columns lie in different banks
  int n, c, row, column;         // its plane, and which tile of it
  int first_row, first_column;  // its first pixel, which may lie outside of the image
  C *sums, *s, *d;  // (kArrays, reach, kPitch), (reach, pitch) each
  uint8_t* kept;
  SimilarityTerms<C> terms;

  __device__ explicit Tile(const Images<C>& of)
      : images(of), size(kSize ? kSize : of.size), reach(kWindows<C> + size - 1), pitch(reach | 1) {
    const uint32_t tiles = of.down * of.across, plane = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    n = int(plane / of.channels), c = int(plane % of.channels);
    row = int(tile / of.across), column = int(tile % of.across);
    sums = reinterpret_cast<C*>(shared_memory());
    s = sums + kArrays * reach * kPitch, d = s + reach * pitch;
    kept = reinterpret_cast<uint8_t*>(d + reach * pitch);
  }

  static int bytes(int size) {
    const int reach = kWindows<C> + size - 1, pixels = reach * (reach | 1);
    return kArrays * reach * kPitch * int(sizeof(C)) + pixels * (2 * int(sizeof(C)) + kShared);
  }

  // Adds to sum[q][k] the weighted sum over the elements that window k of a run sees: element j of array q is
  // values(j, ...)[q]. By a branch: a weight of 0 would let a NaN in that lies beyond the window.
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

  // The pixels, and the tile's level: the mean of each image's finite kept ones. A thread has every fourth pixel of a
  // column, and holds them all: one round trip to memory.
  __device__ void read(int first_row_, int first_column_) {
    first_row = first_row_, first_column = first_column_;
    constexpr int kReach = kWindows<C> + (kSize ? kSize : kLargest) - 1, kColumns = 64;
    constexpr int kStep = kTileThreads / kColumns, kReads = (kReach + kStep - 1) / kStep;
    static_assert(kReach <= kColumns && kReads <= 32);  // a bit for each read
    const int i = threadIdx.x / kColumns, j = threadIdx.x % kColumns;
    // rows of the tile that lie inside of the image
    const int begin = first_row < 0 ? -first_row : 0, left = images.height - first_row, end = left < reach ? left : reach;
    const bool across = j < reach && first_column + j >= 0 && first_column + j < images.width;
    unsigned inside = 0;
#pragma unroll
    for (int u = 0; u < kReads; ++u) inside |= unsigned(across && i + u * kStep >= begin && i + u * kStep < end) << u;
    const auto fetch = [&](const Field& from, auto element, auto& raw) {
      const char* p = from.base + n * from.n + c * from.c;
      p += int64_t(first_row + i) * from.row + int64_t(first_column + j) * from.column;
#pragma unroll
      for (int u = 0; u < kReads; ++u, p += kStep * from.row)
        raw[u] = inside >> u & 1 ? load<decltype(element)>(p) : decltype(element)(0);
    };
    using Word = typename Dynamic<C>::Word;
    const auto fetch_any = [&](const Field& from, Word(&raw)[kReads]) {
      if (size_of(from.type) == 2) fetch(from, uint16_t(), raw);
      else if (size_of(from.type) == 4) fetch(from, uint32_t(), raw);
      else if constexpr (sizeof(Word) == 8) fetch(from, uint64(), raw);
    };
    Word x[kReads], y[kReads];
    fetch_any(images.x, x);
    fetch_any(images.y, y);
    unsigned keep = inside;
    if (kShared && images.mask.base) {
      uint8_t flag[kReads];
      fetch(images.mask, uint8_t(), flag);  // 0 outside
      keep = 0;
#pragma unroll
      for (int u = 0; u < kReads; ++u) keep |= unsigned(flag[u] != 0) << u;
    }

    struct Level {
      C x, count_x, y, count_y;
    } level{};
    constexpr C kDown = C(0x1p-12);  // no sum of a tile's finite values overflows
    static_assert(kReach * kReach <= 1 << 12);
    const auto add = [&](C value, bool there, C& sum, C& count) {
      there = there && value - value == 0;
      sum += there ? value * kDown : C(0), count += there ? C(1) : C(0);
    };
#pragma unroll
    for (int u = 0; u < kReads; ++u) {
      add(Dynamic<C>::decode(x[u], images.x.type), keep >> u & 1, level.x, level.count_x);
      add(Dynamic<C>::decode(y[u], images.y.type), keep >> u & 1, level.y, level.count_y);
    }
    level = block_reduce<kTileThreads>(level, reinterpret_cast<Level*>(sums), [](Level l, const Level& other) {
      l.x += other.x, l.count_x += other.count_x, l.y += other.y, l.count_y += other.count_y;
      return l;
    });
    const auto mean = [](C sum, C count) {
      const C m = count > 0 ? sum * (1 / (kDown * count)) : C(0);
      return m - m == 0 ? m : C(0);
    };
    const C level_x = mean(level.x, level.count_x), level_y = mean(level.y, level.count_y);
    terms = {(level_x + level_y) * images.scale, (level_x - level_y) * images.scale, images.c1, images.c2};

#pragma unroll
    for (int u = 0; u < kReads; ++u) {
      const int row = i + u * kStep, at = row * pitch + j;
      if (j >= reach || row >= reach) continue;
      const bool there = keep >> u & 1;
      const C a = (Dynamic<C>::decode(x[u], images.x.type) - level_x) * images.scale;
      const C b = (Dynamic<C>::decode(y[u], images.y.type) - level_y) * images.scale;
      s[at] = there ? a + b : C(0), d[at] = there ? a - b : C(0);
      if constexpr (kShared) kept[at] = there;
    }
    __syncthreads();
  }

  // Rows of pixels: the sums over each window's columns, with which `sums` begins.
  __device__ void across() {
#pragma unroll 1
    for (int i = threadIdx.x; i < reach * kRuns; i += kTileThreads) {
      const int at = i % reach, first = i / reach * kRun;
      C sum[kArrays][kRun] = {};
      weigh(sum, [&](int j, C(&value)[kArrays]) {
        const int pixel = at * pitch + first + j;
        value[0] = s[pixel], value[1] = d[pixel], value[2] = value[0] * value[0], value[3] = value[1] * value[1];
        if constexpr (kShared) value[4] = kept[pixel] ? C(1) : C(0);
      });
      put(sum, at, first, 1);
    }
    __syncthreads();
  }

  // Sums over rows, of a run that begins at (at, column) of `sums`.
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

  // For each window (row, column) of the map that is window k of the run at (at, column), and counts:
  // body(k, row, column, its similarity, the inverse of its share).
  template <class Body>
  __device__ void each_window(const C (&sum)[kArrays][kRun], int at, int column, const Body& body) const {
    const int map_row = first_row + images.before + at, map_column = first_column + images.before + column;
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const int y = map_row + k;
      if (y < 0 || y >= images.window_rows || map_column < 0 || map_column >= images.window_columns) continue;
      const bool counted = !kShared || kept[(at + k + size / 2) * pitch + column + size / 2];
      C inverse = C(1);
      if constexpr (kShared) inverse = 1 / (counted ? sum[4][k] : C(1));
      body(k, y, map_column, counted,
           Similarity<C>::of(terms, sum[0][k] * inverse, sum[1][k] * inverse, sum[2][k] * inverse,
                             sum[3][k] * inverse), inverse);
    }
  }
};

// kernel(a C, its size known or 0, whether windows may lack pixels) of those that are compiled.
template <class Run>
void by_kind(bool wide, bool shared, int64_t size, const Run& run) {
  const auto with = [&](auto compute, auto known) {
    if (shared) run(compute, known, std::true_type());
    else run(compute, known, std::false_type());
  };
  if (wide) with(double(), std::integral_constant<int, 0>());
  else if (size == 11) with(float(), std::integral_constant<int, 11>());
  else with(float(), std::integral_constant<int, 0>());
}

}  // namespace safeops::cuda
