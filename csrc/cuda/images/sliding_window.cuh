// Weighted sums over windows of three dims. A block has 8 x 32 windows, a thread one. From slice to slice it
//   (1) reads the slice's inputs into shared memory;
//   (2) across: sums them over each window's columns, into shared memory;
//   (3) down: sums (2) over the window's rows, in registers;
//   (4) adds (3) to each window that contains this slice: sum[k] is the partial sum of the one ending k slices later.
#pragma once

#include "common/similarity.h"
#include "pixels.cuh"

namespace safeops::cuda {

constexpr int kTileRows = kTileThreads / 32, kTileColumns = 32;  // a window for each thread, a warp for each row
constexpr int kTilePitch = kTileColumns + 1, kColumnRun = 4;

// Output p is the weighted sum of the inputs [p - shift, p - shift + size), along each dim.
template <class C>
struct SlidingWindow {
  int size, shift;
  int in[3], out[3];                // sizes of inputs and outputs: slices, rows, columns
  int chunk;                        // output slices of a block
  uint32_t chunks, down, across;    // blocks of a plane along slices, rows and columns
  C weights[kLargestOfVolumes];

  int64_t blocks() const { return int64_t(chunks) * down * across; }
};

template <class C>
SlidingWindow<C> make_sliding_window(int size, int shift, const int (&in)[3], const int (&out)[3], const C* weights) {
  constexpr int kChunk = 32;
  SlidingWindow<C> window{size, shift, {in[0], in[1], in[2]}, {out[0], out[1], out[2]}, 0, 0, 0, 0, {}};
  const auto parts = [](int n, int size) { return uint32_t((int64_t(n) + size - 1) / size); };
  window.chunks = parts(out[0], kChunk), window.chunk = int(window.chunks ? parts(out[0], int(window.chunks)) : 0);
  window.down = parts(out[1], kTileRows), window.across = parts(out[2], kTileColumns);
  for (int k = 0; k < size; ++k) window.weights[k] = weights[k];
  return window;
}

// Computes a block's outputs from a Source of inputs. source.fetch(slice, raw) issues this thread's reads;
// source.put(raw) writes what was read to shared memory; source.get(at, value) sets value to the kArrays numbers of the
// input at index `at` of shared memory. kSize: the window's size if known at compile time, else 0.
template <class C, int kSize, int kArrays>
struct WindowSlider {
  static constexpr int kMost = kSize ? kSize : kLargestOfVolumes;
  static constexpr int kInputs = (kTileRows + kMost - 1) * (kTileColumns + kMost - 1);
  static constexpr int kReads = (kInputs + kTileThreads - 1) / kTileThreads;  // inputs of a slice that a thread reads

  const SlidingWindow<C>& window;
  const int size, rows, columns, pitch;  // rows x columns inputs of a slice, pitch apart in shared memory
  uint32_t plane;
  int first, last;  // this block's output slices: [first, last)
  int row, column;  // position of this thread's outputs in each slice
  int first_row, first_column;  // position of the block's first input, which may lie outside of the plane
  C* sums;                      // shape (kArrays, rows, kTilePitch)

  __device__ explicit WindowSlider(const SlidingWindow<C>& window_)
      : window(window_), size(kSize ? kSize : window_.size), rows(kTileRows + size - 1),
        columns(kTileColumns + size - 1),
        pitch(columns | 1), sums(reinterpret_cast<C*>(shared_memory())) {
    uint32_t block = blockIdx.x;
    const auto divide = [&block](uint32_t by) {
      const uint32_t rest = block % by;
      block /= by;
      return int(rest);
    };
    const int across = divide(window_.across) * kTileColumns, down = divide(window_.down) * kTileRows;
    first = divide(window_.chunks) * window_.chunk, plane = block;
    last = first + window_.chunk < window_.out[0] ? first + window_.chunk : window_.out[0];
    row = down + int(threadIdx.x / 32), column = across + int(threadIdx.x % 32);
    first_row = down - window_.shift, first_column = across - window_.shift;
  }

  __device__ C* inputs() const { return sums + kArrays * rows * kTilePitch; }  // in shared memory, after the sums
  static int bytes(int size, int bytes_of_input) {
    const int rows = kTileRows + size - 1, pitch = (kTileColumns + size - 1) | 1;
    return kArrays * rows * kTilePitch * int(sizeof(C)) + rows * pitch * bytes_of_input;
  }
  __device__ bool inside() const { return row < window.out[1] && column < window.out[2]; }

  // For each input u < kReads of this thread in a slice: calls body(u, index in shared memory, row, column), or
  // none(u, index) if the input lies outside of the plane.
  template <class Body, class None>
  __device__ void each_input(const Body& body, const None& none) const {
#pragma unroll
    for (int u = 0; u < kReads; ++u) {
      const int i = int(threadIdx.x) + u * kTileThreads, r = i / columns, c = i % columns;
      if (r >= rows) continue;
      const int y = first_row + r, x = first_column + c;
      const bool in_image = y >= 0 && y < window.in[1] && x >= 0 && x < window.in[2];
      in_image ? body(u, r * pitch + c, y, x) : none(u, r * pitch + c);
    }
  }

  // Calls done(slice, sums) for each output slice at this thread's row and column, with its kArrays sums.
  template <class Source, class Done>
  __device__ void run(const Source& source, const Done& done) const {
    C sum[kArrays][kMost] = {};
    const int from = first - window.shift, to = last - window.shift + size - 1;
    const int begin = from < 0 ? 0 : from, end = to < window.in[0] ? to : window.in[0];
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
            sum[q][k] = before + window.weights[k] * value[q];
          }
      const int slice = z + window.shift - (size - 1);
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
          if (j < k || j - k >= size) continue;  // a branch, since 0 * NaN is NaN
#pragma unroll
          for (int q = 0; q < kArrays; ++q) sum[q][k] += window.weights[j - k] * value[q];
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
      for (int q = 0; q < kArrays; ++q) value[q] += window.weights[k] * p[(q * rows + k) * kTilePitch];
  }
};

}  // namespace safeops::cuda
