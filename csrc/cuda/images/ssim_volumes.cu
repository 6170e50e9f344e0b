// ssim, ssim_loss, ms_ssim: 1 - SSIM of each window of volumes, as a map or as three numbers of each plane. A first
// launch finds the planes' levels, a second goes through the windows (march.cuh), a third adds up its blocks.
// I/O: reads x, y, mask, for the level and again, where tiles meet more than once; writes the map, or three numbers.
#include "volumes.cuh"

namespace safeops::cuda {
namespace {

struct VolumeResult {
  Field map;   // or
  char* sums;  // (3, planes, blocks of each)
};

struct VolumeSums {
  double loss, contrast, count;
};

template <class C, int kSize, bool kShared>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    ssim_volume_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ March<C> march,
                       const __grid_constant__ Planes planes, const __grid_constant__ VolumeResult result) {
  const Marcher<C, kSize, 4 + kShared> tile(march);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const Field& map = result.map;
  char* const first = map.base + n * map.n + c * map.c + tile.row * map.row + tile.column * map.column;
  C loss = 0, contrast = 0, count = 0;  // of a few windows: fp32 holds its sums
  each_window<C, kSize, kShared>(tile, images, planes, n, c, [&](int z, bool counted, const Similarity<C>& it, C) {
    if (map.base) store(first + z * map.slice, counted ? it.loss() : C(0));
    else if (counted) loss += it.loss(), contrast += it.contrast, count += 1;
  });
  if (map.base) return;
  __syncthreads();  // the sums' place is free
  const auto combine = [](VolumeSums a, const VolumeSums& b) {
    a.loss += b.loss, a.contrast += b.contrast, a.count += b.count;
    return a;
  };
  const VolumeSums total = block_reduce<kTileThreads>(VolumeSums{loss, contrast, count},
                                                      reinterpret_cast<VolumeSums*>(shared_memory()), combine);
  if (threadIdx.x) return;
  char* p = result.sums + int64_t(blockIdx.x) * sizeof(double);
  const int64_t step = int64_t(gridDim.x) * sizeof(double);
  store(p, total.loss), store(p + step, total.contrast), store(p + 2 * step, total.count);
}

}  // namespace

void ssim_of_volumes(const Tensor& out, const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                     const Options& options, const Checked& is, bool by_window) {
  of_volumes(is, options.size, [&](auto compute, auto known, auto shared) {
    using C = decltype(compute);
    using M = Marcher<C, known(), 4 + shared()>;
    const Launches<C> all(input, target, mask, options, is);
    const auto launch = [&](const VolumeResult& to) {
      all.template march<M, Voxels<C, shared(), M>>(ssim_volume_kernel<C, known(), shared()>, all.windows, to);
    };
    const int64_t blocks = all.windows.blocks();
    if (by_window) {
      launch({field(out, Type(is.wide ? kF64 : kF32), is.map), nullptr});
    } else if (blocks == 1) {
      launch({Field(), all.data(out)});
    } else if (all.planes) {  // (the sums of no blocks are 0)
      const Tensor parts = all.vector(3 * all.planes * blocks, input);
      launch({Field(), all.data(parts)});
      merge_parts({all.data(parts), all.data(out), blocks}, 3 * all.planes, all.stream);
    }
  });
}

}  // namespace safeops::cuda
