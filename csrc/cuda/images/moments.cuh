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
template <int kSize>
constexpr int kMinBlocks = kSize ? 3 : 2;  // of an SM: at most 80 registers a thread, or 128

// f(codec) of a floating type that C is wide enough for.
template <class C, class F>
__device__ inline void by_type(Type type, const F& f) {
  if (type == kF16) f(F16());
  else if (type == kBF16) f(BF16());
  else if (sizeof(C) == 4 || type == kF32) f(F32());
  else if constexpr (sizeof(C) == 8) f(F64());
}

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
    // The reads [from, to) are of rows inside of the image; of none where the column is not.
    const auto reads_before = [i](int row) { return row <= i ? 0 : (row - i + kStep - 1) / kStep; };
    const bool across = j < reach && first_column + j >= 0 && first_column + j < images.width;
    const int left = images.height - first_row;
    const int from = reads_before(-first_row), to = across ? reads_before(left < reach ? left : reach) : 0;
    const auto inside = [from, to](int u) { return from <= u && u < to; };
    const auto fetch = [&](const Field& of, auto element, auto& raw) {
      const char* p = of.base + n * of.n + c * of.c;
      p += int64_t(first_row + i) * of.row + int64_t(first_column + j) * of.column;
#pragma unroll
      for (int u = 0; u < kReads; ++u, p += kStep * of.row)
        raw[u] = inside(u) ? load<decltype(element)>(p) : decltype(element)(0);
    };
    using Word = typename Dynamic<C>::Word;
    Word raw_x[kReads], raw_y[kReads];
    by_type<C>(images.x.type, [&](auto codec) { fetch(images.x, typename decltype(codec)::Raw(), raw_x); });
    by_type<C>(images.y.type, [&](auto codec) { fetch(images.y, typename decltype(codec)::Raw(), raw_y); });
    const bool masked = kShared && images.mask.base;
    unsigned keep = 0;
    if (masked) {
      uint8_t flag[kReads];
      fetch(images.mask, uint8_t(), flag);  // 0 outside
#pragma unroll
      for (int u = 0; u < kReads; ++u) keep |= unsigned(flag[u] != 0) << u;
    }
    const auto there = [&](int u) { return masked ? (keep >> u & 1) != 0 : inside(u); };
    C x[kReads], y[kReads];
    const auto decode = [&](Type type, const Word(&raw)[kReads], C(&value)[kReads]) {
      by_type<C>(type, [&](auto codec) {
        using Codec = decltype(codec);
#pragma unroll
        for (int u = 0; u < kReads; ++u) value[u] = C(Codec::decode(typename Codec::Raw(raw[u])));
      });
    };
    decode(images.x.type, raw_x, x), decode(images.y.type, raw_y, y);

    struct Level {
      C x, y;
      int count_x, count_y;
    } level{};
    constexpr C kDown = C(0x1p-12);  // no sum of a tile's finite values overflows
    static_assert(kReach * kReach <= 1 << 12);
#pragma unroll
    for (int u = 0; u < kReads; ++u) {
      if (there(u) && x[u] - x[u] == 0) level.x += x[u] * kDown, ++level.count_x;
      if (there(u) && y[u] - y[u] == 0) level.y += y[u] * kDown, ++level.count_y;
    }
    level = block_reduce<kTileThreads>(level, reinterpret_cast<Level*>(sums), [](Level l, const Level& other) {
      l.x += other.x, l.count_x += other.count_x, l.y += other.y, l.count_y += other.count_y;
      return l;
    });
    const auto mean = [](C sum, int count) {
      const C m = count ? sum * (1 / (kDown * C(count))) : C(0);
      return m - m == 0 ? m : C(0);
    };
    const C level_x = mean(level.x, level.count_x), level_y = mean(level.y, level.count_y);
    // in units of the range before they are added: twice a level may be too much
    const C scaled_x = level_x * images.scale, scaled_y = level_y * images.scale;
    terms = {scaled_x + scaled_y, scaled_x - scaled_y, images.c1, images.c2};

#pragma unroll
    for (int u = 0; u < kReads; ++u) {
      if (j >= reach || i + u * kStep >= reach) continue;
      const C a = (x[u] - level_x) * images.scale, b = (y[u] - level_y) * images.scale;
      const int at = (i + u * kStep) * pitch + j;
      s[at] = there(u) ? a + b : C(0), d[at] = there(u) ? a - b : C(0);
      if constexpr (kShared) kept[at] = there(u);
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
