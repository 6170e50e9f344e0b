// ssim, ssim_loss, ms_ssim: 1 - SSIM of each window of volumes, as a map, its sum or mean, or three numbers
// of each plane. A first launch finds the planes' levels, a second goes through the windows (march.cuh).
// I/O: reads x, y, mask, for the level and again, where tiles meet more than once; writes the map, or a few numbers.
#include "sums.cuh"
#include "volumes.cuh"

namespace safeops::cuda {
namespace {

template <class C, int kSize, bool kShared>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    ssim_volume_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ March<C> march,
                       const __grid_constant__ Planes planes, const __grid_constant__ Groups groups,
                       const __grid_constant__ Result result) {
  const Marcher<C, kSize, 4 + kShared> tile(march);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const Field& map = result.map;
  char* const first = map.base + n * map.n + c * map.c + tile.row * map.row + tile.column * map.column;
  C loss = 0, contrast = 0, count = 0;  // of a few windows: fp32 holds its sums
  each_window<C, kSize, kShared>(tile, images, planes, n, c, [&](int z, bool counted, const Similarity<C>& it, C) {
    if (map.base) store(first + z * map.slice, counted ? result.of_map(it.loss()) : C(0));
    else if (counted) loss += it.loss(), contrast += it.contrast, count += 1;
  });
  if (map.base == nullptr) reduce_windows<C>(groups, result, Sums{loss, contrast, count});
}

}  // namespace

void ssim_of_volumes(const Outputs& outputs, const Tensor& input, const Tensor& target,
                     const std::optional<Tensor>& mask, const Options& options, const Checked& is) {
  of_volumes(is, options.size, [&](auto compute, auto known, auto shared) {
    using C = decltype(compute);
    using M = Marcher<C, known(), 4 + shared()>;
    const Launches<C> all(input, target, mask, options, is);
    const auto launch = [&](const Result& to, const Groups& groups) {
      all.template march<M, Voxels<C, shared(), M>>(ssim_volume_kernel<C, known(), shared()>, all.windows, groups, to);
    };
    sum_windows(outputs, input, is, all.windows.blocks(), all.stream, launch);
  });
}

}  // namespace safeops::cuda
