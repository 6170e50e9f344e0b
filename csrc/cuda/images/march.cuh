// Weighted sums over windows of three dims. A block has a tile of windows, and goes from slice to slice:
//   inputs -> (across) sums over a window's columns -> (down) over its rows -> (along) over its slices
// The first two lie in shared memory. Those along the slices are in registers, of all windows that see a slice at once,
// so that no slice is kept: what the window that ends k slices on has so far is sum[k].
#pragma once

#include "common/similarity.h"
#include "pixels.cuh"

namespace safeops::cuda {

constexpr int kTileRows = kTileThreads / 32, kTileColumns = 32;  // a window for each thread, a warp for each row
constexpr int kTilePitch = kTileColumns + 1, kColumnRun = 4;

// An output is made of `size` inputs along each dim, from `shift` before its own place.
template <class C>
struct March {
  int size, shift;
  int in[3], out[3];                // slices, rows, columns
  int chunk;                        // outputs along the slices that a block goes through
  uint32_t chunks, down, across;    // blocks of a plane
  C weights[kLargestOfVolumes];

  int64_t blocks() const { return int64_t(chunks) * down * across; }
};

template <class C>
March<C> make_march(int size, int shift, const int (&in)[3], const int (&out)[3], const C* weights) {
  constexpr int kChunk = 32;
  March<C> march{size, shift, {in[0], in[1], in[2]}, {out[0], out[1], out[2]}, 0, 0, 0, 0, {}};
  const auto parts = [](int n, int of) { return uint32_t((int64_t(n) + of - 1) / of); };
  march.chunks = parts(out[0], kChunk), march.chunk = int(march.chunks ? parts(out[0], int(march.chunks)) : 0);
  march.down = parts(out[1], kTileRows), march.across = parts(out[2], kTileColumns);
  for (int k = 0; k < size; ++k) march.weights[k] = weights[k];
  return march;
}

// Source: fetch(slice, raw) begins to read a thread's inputs, put(raw) leaves them in shared memory, and get(at, value)
// gives the kArrays numbers of one of them. kSize: known when compiled, or 0.
template <class C, int kSize, int kArrays>
struct Marcher {
  static constexpr int kMost = kSize ? kSize : kLargestOfVolumes;
  static constexpr int kInputs = (kTileRows + kMost - 1) * (kTileColumns + kMost - 1);
  static constexpr int kReads = (kInputs + kTileThreads - 1) / kTileThreads;  // of a thread

  const March<C>& march;
  const int size, rows, columns, pitch;  // of the inputs that a tile sees
  uint32_t plane;
  int first, last;  // slices of the outputs
  int row, column;  // of this thread's output
  int first_row, first_column;  // of the tile's inputs, which may lie outside
  C* sums;                      // (kArrays, rows, kTilePitch)

  __device__ explicit Marcher(const March<C>& of)
      : march(of), size(kSize ? kSize : of.size), rows(kTileRows + size - 1), columns(kTileColumns + size - 1),
        pitch(columns | 1), sums(reinterpret_cast<C*>(shared_memory())) {
    uint32_t block = blockIdx.x;
    const auto divide = [&block](uint32_t by) {
      const uint32_t rest = block % by;
      block /= by;
      return int(rest);
    };
    const int across = divide(of.across) * kTileColumns, down = divide(of.down) * kTileRows;
    first = divide(of.chunks) * of.chunk, plane = block;
    last = first + of.chunk < of.out[0] ? first + of.chunk : of.out[0];
    row = down + int(threadIdx.x / 32), column = across + int(threadIdx.x % 32);
    first_row = down - of.shift, first_column = across - of.shift;
  }

  __device__ C* inputs() const { return sums + kArrays * rows * kTilePitch; }  // after the sums
  static int bytes(int size, int bytes_of_input) {
    const int rows = kTileRows + size - 1, pitch = (kTileColumns + size - 1) | 1;
    return kArrays * rows * kTilePitch * int(sizeof(C)) + rows * pitch * bytes_of_input;
  }
  __device__ bool inside() const { return row < march.out[1] && column < march.out[2]; }

  // body(u, place in shared memory, row, column) for each input of a slice that this thread reads and that is there;
  // none(u, place) for one that lies outside.
  template <class Body, class None>
  __device__ void each_input(const Body& body, const None& none) const {
#pragma unroll
    for (int u = 0; u < kReads; ++u) {
      const int i = int(threadIdx.x) + u * kTileThreads, r = i / columns, c = i % columns;
      if (r >= rows) continue;
      const int y = first_row + r, x = first_column + c;
      const bool there = y >= 0 && y < march.in[1] && x >= 0 && x < march.in[2];
      there ? body(u, r * pitch + c, y, x) : none(u, r * pitch + c);
    }
  }

  // done(slice, sums) of each output of this thread's.
  template <class Source, class Done>
  __device__ void run(const Source& source, const Done& done) const {
    C sum[kArrays][kMost] = {};
    const int from = first - march.shift, to = last - march.shift + size - 1;
    const int begin = from < 0 ? 0 : from, end = to < march.in[0] ? to : march.in[0];
    typename Source::Raw raw;
    if (begin < end) source.fetch(begin, raw);
#pragma unroll 1
    for (int z = from; z < to; ++z) {
      C value[kArrays] = {};
      if (z >= begin && z < end) {
        source.put(raw);
        __syncthreads();
        if (z + 1 < end) source.fetch(z + 1, raw);
        across(source);
        __syncthreads();
        down(value);
      }
#pragma unroll
      for (int q = 0; q < kArrays; ++q)
#pragma unroll
        for (int k = 0; k < kMost; ++k)
          if (kSize || k < size) {
            const C before = k + 1 < size ? sum[q][k + 1 < kMost ? k + 1 : k] : C(0);
            sum[q][k] = before + march.weights[k] * value[q];
          }
      const int slice = z + march.shift - (size - 1);
      if (slice < first || !inside()) continue;
      C total[kArrays];
#pragma unroll
      for (int q = 0; q < kArrays; ++q) total[q] = sum[q][0];
      done(slice, total);
    }
  }

 private:
  template <class Source>
  __device__ void across(const Source& source) const {
    constexpr int kUnroll = kSize ? kSize + kColumnRun - 1 : 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (kTileColumns / kColumnRun); i += kTileThreads) {
      const int at = i % rows, run = i / rows * kColumnRun;
      C sum[kArrays][kColumnRun] = {};
#pragma unroll kUnroll
      for (int j = 0; j < size + kColumnRun - 1; ++j) {
        C value[kArrays];
        source.get(at * pitch + run + j, value);
#pragma unroll
        for (int k = 0; k < kColumnRun; ++k) {
          if (j < k || j - k >= size) continue;  // by a branch: a weight of 0 would let a NaN in
#pragma unroll
          for (int q = 0; q < kArrays; ++q) sum[q][k] += march.weights[j - k] * value[q];
        }
      }
#pragma unroll
      for (int q = 0; q < kArrays; ++q)
#pragma unroll
        for (int k = 0; k < kColumnRun; ++k) sums[(q * rows + at) * kTilePitch + run + k] = sum[q][k];
    }
  }

  __device__ void down(C (&value)[kArrays]) const {
    constexpr int kUnroll = kSize ? kSize : 1;
    const C* p = sums + threadIdx.x / 32 * kTilePitch + threadIdx.x % 32;
#pragma unroll kUnroll
    for (int k = 0; k < size; ++k)
#pragma unroll
      for (int q = 0; q < kArrays; ++q) value[q] += march.weights[k] * p[(q * rows + k) * kTilePitch];
  }
};

}  // namespace safeops::cuda
