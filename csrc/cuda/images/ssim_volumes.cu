// ssim, ssim_loss, ms_ssim: 1 - SSIM of each window of volumes, as a map, its sum or mean, or three sums of each plane.
// A first launch computes the level of each plane, which is the mean that is subtracted from its pixels. A second
// launch slides over the windows (sliding_window.cuh).
// I/O: reads x, y, mask for the level and again for the windows (more than once where tiles overlap); writes the map,
// or a few numbers.
#include "sums.cuh"
#include "volumes.cuh"

namespace safeops::cuda {
namespace {

template <class C, int kSize, bool kIncomplete>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    ssim_volume_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ SlidingWindow<C> window,
                       const __grid_constant__ Planes planes, const __grid_constant__ Groups groups,
                       const __grid_constant__ Result result) {
  const WindowSlider<C, kSize, 4 + kIncomplete> tile(window);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const Field& map = result.map;
  char* const first = map.base + n * map.n + c * map.c + tile.row * map.row + tile.column * map.column;
  C loss = 0, contrast = 0, count = 0;  // sums over this thread's windows: at most 32, so fp32 is enough
  each_window<C, kSize, kIncomplete>(tile, images, planes, n, c, [&](int z, bool counted, const Similarity<C>& it, C) {
    if (map.base) store(first + z * map.slice, counted ? result.map_value(it.loss()) : C(0));
    else if (counted) loss += it.loss(), contrast += it.contrast, count += 1;
  });
  if (map.base == nullptr) reduce_windows<C>(groups, result, Sums{loss, contrast, count});
}

}  // namespace

void ssim_of_volumes(const Outputs& outputs, const Tensor& input, const Tensor& target,
                     const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info) {
  by_volume_kind(info, options.size, [&](auto compute, auto static_size, auto incomplete) {
    using C = decltype(compute);
    using M = WindowSlider<C, static_size(), 4 + incomplete()>;
    const Launches<C> launches(input, target, mask, options, info);
    const auto launch = [&](const Result& to, const Groups& groups) {
      launches.template slide<M, Voxels<C, incomplete(), M>>(ssim_volume_kernel<C, static_size(), incomplete()>,
                                                             launches.windows, groups, to);
    };
    sum_windows(outputs, input, info, launches.windows.blocks(), launches.stream, launch);
  });
}

}  // namespace safeops::cuda
