// Reads the pixels of a tile, for any dtypes and strides, and computes the tile's level: the mean of its pixels.
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/engine/types.cuh"
#include "images.h"

namespace safeops::cuda {

constexpr int kTileThreads = 256;

// Calls f(codec) with the codec of `type`, which is fp64 only if C is double.
template <class C, class F>
__device__ inline void by_type(Type type, const F& f) {
  if (type == kF16) f(F16());
  else if (type == kBF16) f(BF16());
  else if (sizeof(C) == 4 || type == kF32) f(F32());
  else if constexpr (sizeof(C) == 8) f(F64());
}

// The upstream gradient of a window's 1 - SSIM. grad: the gradient of the map at that window, which may be of SSIM.
template <class C>
__device__ inline C window_gradient(const Gradients& to, const char* grad) {
  const C map_grad = load<C>(grad);
  return to.similarity ? -map_grad : map_grad;
}

// Sets the upstream gradients of 1 - SSIM and of contrast' (common/similarity.h) where all windows of a plane share
// them. For a mean or sum of all windows: grad times result_slope, and 0. Else: the gradients of the plane's two sums.
template <class C>
__device__ inline void plane_gradients(const Gradients& to, const char* grad, C& loss_grad, C& contrast_grad) {
  loss_grad = to.result_slope ? C(load<C>(grad) * load<double>(to.result_slope)) : C(load<double>(grad));
  contrast_grad = to.result_slope ? C(0) : C(load<double>(grad + to.grad.row));
}

// The levels of x and y: the mean of the finite kept pixels. The counts are only used while pixels are summed.
template <class C>
struct Levels {
  C x, y;
  int count_x, count_y;
};

// A thread's pixels of x and y: every fourth pixel of one column of the tile. All are read before the first is used, so
// that they cost one round trip to memory.
template <class C, int kSize, bool kIncomplete>
struct Pixels {
  static constexpr int kReach = kWindows<C> + (kSize ? kSize : kLargest) - 1, kColumns = 64;
  static constexpr int kStep = kTileThreads / kColumns, kReads = (kReach + kStep - 1) / kStep;
  static_assert(kReach <= kColumns && kReads <= 32, "a column for each thread, a bit for each pixel");
  using Word = typename Dynamic<C>::Word;

  int row, column;         // position of the thread's first pixel in the tile
  unsigned keep;           // bit u: pixel u lies inside of the image and is kept
  C x[kReads], y[kReads];  // 0 for pixels that are not kept

  // Reads from plane (n, c) the reach x reach pixels that begin at (first_row, first_column), which may lie outside of
  // the image.
  __device__ Pixels(const Images<C>& images, int n, int c, int first_row, int first_column, int reach)
      : row(threadIdx.x / kColumns), column(threadIdx.x % kColumns) {
    const auto before = [this](int end) { return end <= row ? 0 : (end - row + kStep - 1) / kStep; };
    const bool across = column < reach && first_column + column >= 0 && first_column + column < images.width;
    const int left = images.height - first_row;
    const int from = before(-first_row), to = across ? before(left < reach ? left : reach) : 0;  // inside: [from, to)
    keep = to > from ? (1u << to) - (1u << from) : 0;
    const auto fetch = [&](const Field& field, auto element, auto& raw) {
      const char* p = field.base + n * field.n + c * field.c;
      p += int64_t(first_row + row) * field.row + int64_t(first_column + column) * field.column;
#pragma unroll
      for (int u = 0; u < kReads; ++u, p += kStep * field.row)
        raw[u] = from <= u && u < to ? load<decltype(element)>(p) : decltype(element)(0);
    };
    Word raw_x[kReads], raw_y[kReads];  // all loads are issued before one is decoded
    by_type<C>(images.x.type, [&](auto codec) { fetch(images.x, typename decltype(codec)::Raw(), raw_x); });
    by_type<C>(images.y.type, [&](auto codec) { fetch(images.y, typename decltype(codec)::Raw(), raw_y); });
    if (kIncomplete && images.mask.base) {
      uint8_t flag[kReads];
      fetch(images.mask, uint8_t(), flag);
#pragma unroll
      for (int u = 0; u < kReads; ++u) {
        if (flag[u]) continue;
        keep &= ~(1u << u);
        raw_x[u] = raw_y[u] = 0;
      }
    }
    decode(images.x.type, raw_x, x), decode(images.y.type, raw_y, y);
  }

  // Returns the levels of the tile. scratch: shared memory for one value of each warp.
  __device__ Levels<C> levels(Levels<C>* scratch) const {
    constexpr C kDown = C(0x1p-12);  // no sum of a tile's finite values overflows
    static_assert(kReach * kReach <= 1 << 12);
    Levels<C> level{0, 0, __popc(keep), __popc(keep)};
    const auto add = [](C value, C& sum, int& count) {
      if (value - value == 0) sum += value * kDown;
      else --count;
    };
#pragma unroll
    for (int u = 0; u < kReads; ++u) add(x[u], level.x, level.count_x), add(y[u], level.y, level.count_y);
    level = block_reduce<kTileThreads>(level, scratch, [](Levels<C> a, const Levels<C>& b) {
      a.x += b.x, a.y += b.y, a.count_x += b.count_x, a.count_y += b.count_y;
      return a;
    });
    const auto mean = [](C sum, int count) {
      const C m = count ? sum * (1 / (kDown * C(count))) : C(0);
      return m - m == 0 ? m : C(0);
    };
    return {mean(level.x, level.count_x), mean(level.y, level.count_y), level.count_x, level.count_y};
  }

 private:
  static __device__ void decode(Type type, const Word (&raw)[kReads], C (&value)[kReads]) {
    by_type<C>(type, [&](auto codec) {
      using Codec = decltype(codec);
#pragma unroll
      for (int u = 0; u < kReads; ++u) value[u] = C(Codec::decode(typename Codec::Raw(raw[u])));
    });
  }
};

}  // namespace safeops::cuda
