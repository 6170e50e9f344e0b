// ssim, ssim_loss, ms_ssim: computes 1 - SSIM of each window (common/similarity.h). The result is a map; or the sum or
// mean over all windows; or three sums of each plane (n, c): of 1 - SSIM, of contrast', and the number of counted
// windows, those whose central pixel is kept. A block computes a tile of windows.
// I/O: reads x, y, mask (more than once where tiles overlap); writes the map, or a few numbers.
#include <tuple>

#include "halves.cuh"
#include "moments.cuh"
#include "ssim.h"
#include "ssim_volumes.h"
#include "sums.cuh"

namespace safeops::cuda {
namespace {

template <class C, int kSize, bool kIncomplete, bool kHalves>
__global__ void __launch_bounds__(kTileThreads, kMinBlocks<kSize>)
    ssim_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ Groups groups,
                const __grid_constant__ Result result, const __grid_constant__ Halves halves) {
  using T = Tile<C, kSize, kIncomplete>;
  constexpr int kRun = T::kRun;
  T tile(images);
  tile.read(tile.row * kWindows<C> - images.before, tile.column * kWindows<C> - images.before);
  tile.across();
  const int column = threadIdx.x % kWindows<C>, at = threadIdx.x / kWindows<C> * kRun;
  C loss = 0, contrast = 0, count = 0;  // sums over this thread's run: few numbers, so fp32 is enough
  if (at < kWindows<C>) {
    C sum[T::kArrays][kRun] = {};
    tile.down(at, column, sum);
    const Field& map = result.map;
    char* first = map.base + tile.n * map.n + tile.c * map.c;
    first += tile.map_row(at) * map.row + tile.map_column(column) * map.column;
    tile.each_window(sum, at, column, [&](int k, bool counted, const Similarity<C>& it, C) {
      if (map.base) store(first + k * map.row, counted ? result.map_value(it.loss()) : C(0));
      else if (counted) loss += it.loss(), contrast += it.contrast, count += 1;
    });
  }
  if constexpr (kHalves) halve_tile(tile, halves);
  if (result.map.base == nullptr) reduce_windows<C>(groups, result, Sums{loss, contrast, count});
}

std::tuple<Tensor, Tensor> ssim(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                                int64_t reduction, bool similarity, bool empty_nan, double data_range,
                                int64_t win_size, double win_sigma, double k1, double k2, bool same) {
  constexpr const char* kOp = "safeops::_ssim";
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const ImageInfo info(input, target, mask, options, kOp);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Outputs outputs(input, info, {reduction, empty_nan}, similarity);
  sum_similarities(outputs, input, target, mask, options, info, {});
  check_launch(kOp);
  return {outputs.value, outputs.result_slope};
}

}  // namespace

void sum_similarities(const Outputs& outputs, const Tensor& input, const Tensor& target,
                      const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info,
                      const Halves& halves) {
  const auto run = [&](auto compute, auto static_size, auto incomplete) {
    using C = decltype(compute);
    const auto images = make_images<C>(input, target, mask, options, info, info.map.size + 2, kWindows<C>);
    const unsigned blocks = blocks_of(images, info);
    const int64_t tiles = int64_t(images.down) * images.across;
    sum_windows(outputs, input, info, tiles, current_stream(input), [&](const Result& to, const Groups& groups) {
      const auto kernel = halves.x.base ? ssim_kernel<C, static_size(), incomplete(), true>
                                        : ssim_kernel<C, static_size(), incomplete(), false>;
      start_blocks(kernel, blocks, kTileThreads,
                   Tile<C, static_size(), incomplete()>::bytes(int(options.size)), current_stream(input), images,
                   groups, to, halves);
    });
  };
  if (info.shape.ndim == 5) ssim_of_volumes(outputs, input, target, mask, options, info);
  else by_kind(info.wide, info.incomplete, options.size, run);
}

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_ssim", TORCH_BOX(&ssim)); }

}  // namespace safeops::cuda
