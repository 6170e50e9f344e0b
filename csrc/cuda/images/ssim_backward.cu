// ssim, ssim_loss, ms_ssim: the gradients of 1 - SSIM.
// (1) Each window has four slopes: the derivatives of the result by its moments E s, E d, E s^2 and E d^2.
// (2) A pixel's gradient is a weighted sum over the windows that contain it (the weights w are symmetric):
//     ds = sum w slope(E s) + 2 s sum w slope(E s^2),  and likewise dd;  dx = ds + dd,  dy = ds - dd
// A block recomputes the moments of a tile of windows, and then the gradients of the pixels that are in no window
// outside of the tile: in fp32 with windows of 11 x 11, 32 x 32 pixels for 42 x 42 windows.
// I/O: reads x, y, mask, the map's gradient (more than once where tiles overlap); writes dx, dy.
#include <tuple>

#include "common/reducer.h"
#include "halves.cuh"
#include "moments.cuh"
#include "ssim.h"
#include "ssim_volumes.h"

namespace safeops::cuda {
namespace {

template <class C, int kSize, bool kIncomplete, bool kHalves>
__global__ void __launch_bounds__(kTileThreads, kMinBlocks<kSize>)
    ssim_backward_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ Gradients to) {
  using T = Tile<C, kSize, kIncomplete>;
  constexpr int kRun = T::kRun;
  T tile(images);
  const int reach = tile.size - 1, pixels = kWindows<C> - reach;  // pixels: side of the square of pixels it computes
  const char* grad = to.grad.base + tile.n * to.grad.n + tile.c * to.grad.c;
  C plane_loss_grad = 0, contrast_grad = 0;
  if (!to.by_window) plane_gradients(to, grad, plane_loss_grad, contrast_grad);
  tile.read(tile.row * pixels - reach, tile.column * pixels - reach);
  tile.across();

  // The windows' slopes replace the sums in shared memory.
  C slopes[4][kRun] = {};
  const int window_column = threadIdx.x % kWindows<C>, window = threadIdx.x / kWindows<C> * kRun;
  if (window < kWindows<C>) {
    C loss_grad[kRun];  // loaded before down(), so that the loads are in flight while it sums
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const int y = tile.map_row(window + k), x = tile.map_column(window_column);
      loss_grad[k] = plane_loss_grad;
      if (to.by_window && tile.in_map(y, x))
        loss_grad[k] = window_gradient<C>(to, grad + y * to.grad.row + x * to.grad.column);
    }
    C sum[T::kArrays][kRun] = {};
    tile.down(window, window_column, sum);
    const auto differentiate = [&](int k, bool counted, const Similarity<C>& it, C inverse) {
      if (!counted) return;
      const MomentSlopes<C> by = it.slopes(loss_grad[k], contrast_grad);
      slopes[0][k] = by.s * inverse, slopes[1][k] = by.d * inverse;  // since E s is the sum times inverse
      slopes[2][k] = by.ss * inverse, slopes[3][k] = by.dd * inverse;
    };
    tile.each_window(sum, window, window_column, differentiate);
  }
  __syncthreads();
  if (window < kWindows<C>) tile.put(slopes, window, window_column, T::kPitch);
  __syncthreads();

  // The slopes are summed across with the weights, in place. The last run of a row may go beyond the block's pixels;
  // these results are not read.
  C across[4][kRun] = {};
  const int at = threadIdx.x % kWindows<C>, first = threadIdx.x / kWindows<C> * kRun;
  if (first < pixels)
    tile.weigh(across, [&](int j, C(&value)[4]) {
#pragma unroll
      for (int q = 0; q < 4; ++q) value[q] = tile.sums[(q * tile.reach + at) * T::kPitch + first + j];
    });
  __syncthreads();
  if (first < pixels) tile.put(across, at, first, 1);
  __syncthreads();

  // The sums across are summed down with the weights. A thread has a run of kRun pixels in one column.
  const int pixel_column = threadIdx.x % pixels, pixel = threadIdx.x / pixels * kRun;
  const int x = tile.first_column + reach + pixel_column, row = tile.first_row + reach + pixel;
  if (pixel >= pixels || x >= images.width) return;
  C sum[4][kRun] = {};
  tile.down(pixel, pixel_column, sum);
  const int rest = pixels - pixel, left = images.height - row, count = rest < left ? rest : left;
  C dx[kRun], dy[kRun];
#pragma unroll
  for (int k = 0; k < kRun; ++k) {
    const int index = (pixel + k + reach) * tile.pitch + pixel_column + reach;
    const C ds = (sum[0][k] + 2 * tile.s[index] * sum[2][k]) * images.scale;
    const C dd = (sum[1][k] + 2 * tile.d[index] * sum[3][k]) * images.scale;
    // All sums of a pixel that is in no counted window are 0. Its gradient is 0, even if the pixel is NaN.
    const bool unseen = sum[0][k] == 0 && sum[1][k] == 0 && sum[2][k] == 0 && sum[3][k] == 0;
    const bool alive = !kIncomplete || (tile.kept[index] && !unseen);
    dx[k] = alive ? ds + dd : C(0), dy[k] = alive ? ds - dd : C(0);
    if constexpr (kHalves)
      if (k < count && (!kIncomplete || tile.kept[index]))
        add_of_half<kIncomplete>(images, to, tile.n, tile.c, row + k, x, dx[k], dy[k]);
  }
  const auto write = [&](const Field& out, const C(&value)[kRun]) {
    if (out.base == nullptr) return;
    char* p = out.base + tile.n * out.n + tile.c * out.c + row * out.row + x * out.column;
    by_type<C>(out.type, [&](auto codec) {
      using Codec = decltype(codec);
#pragma unroll
      for (int k = 0; k < kRun; ++k, p += out.row)
        if (k < count) store(p, Codec::encode(typename Codec::Value(value[k])));
    });
  };
  write(to.dx, dx), write(to.dy, dy);
}

// result_slope: the second result of _ssim for a sum or mean of all windows, else empty.
std::tuple<Tensor, Tensor> ssim_backward(const Tensor& grad, const Tensor& result_slope, const Tensor& input,
                                         const Tensor& target, const std::optional<Tensor>& mask, int64_t reduction,
                                         double data_range, int64_t win_size, double win_sigma, double k1, double k2,
                                         bool same, bool need_input, bool need_target, bool similarity) {
  constexpr const char* kOp = "safeops::_ssim_backward";
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const ImageInfo info(input, target, mask, options, kOp);
  check_device(grad, input, kOp, "grad"), check_device(result_slope, input, kOp, "result_slope");
  const safeops::View view(grad), slope(result_slope);
  const int64_t sums[] = {3, info.shape.size[0], info.shape.size[1]};
  const DType wide = info.wide ? DType::kDouble : DType::kFloat;
  const bool by_window = reduction == Reducer::kNone, planes = reduction == Reducer::kPlanes;
  const Shape shape = by_window ? info.map : planes ? Shape(3, sums) : Shape();
  STD_TORCH_CHECK(shape.is(view.ndim, view.sizes) && view.dtype == (planes ? DType::kDouble : wide) &&
                      slope.ndim == (by_window || planes) && slope.dtype == DType::kDouble,
                  kOp, ": grad and result_slope must be of the results of _ssim");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor dx = need_input ? output_like(input, info.shape, info.x) : empty_vector(DType(info.x), input);
  const Tensor dy = need_target ? output_like(target, info.shape, info.y) : empty_vector(DType(info.y), target);
  Gradients to{{view.data, Type(wide)}, by_window, similarity, slope.ndim ? nullptr : slope.data, {}, {}};
  if (by_window) to.grad = field(grad, Type(wide), info.map);
  const int64_t bytes = sizeof(double);
  if (planes) to.grad = {view.data, kF64, view.strides[1] * bytes, view.strides[2] * bytes, view.strides[0] * bytes, 0};
  if (need_input) to.dx = field(dx, info.x, info.shape);
  if (need_target) to.dy = field(dy, info.y, info.shape);
  if (need_input || need_target) write_gradients(to, input, target, mask, options, info);
  check_launch(kOp);
  return {dx, dy};
}

}  // namespace

void write_gradients(const Gradients& to, const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                     const Options& options, const ImageInfo& info) {
  if (info.shape.ndim == 5) return ssim_of_volumes_backward(to, input, target, mask, options, info);
  const cudaStream_t stream = current_stream(input);
  const auto run = [&](auto compute, auto static_size, auto incomplete) {
    using C = decltype(compute);
    const int64_t pixels = kWindows<C> - (options.size - 1);
    const auto images = make_images<C>(input, target, mask, options, info, info.shape.size + 2, pixels);
    const unsigned blocks = blocks_of(images, info);
    if (blocks == 0) return;
    const auto kernel = has_halves(to) ? ssim_backward_kernel<C, static_size(), incomplete(), true>
                                       : ssim_backward_kernel<C, static_size(), incomplete(), false>;
    start_blocks(kernel, blocks, kTileThreads,
                 Tile<C, static_size(), incomplete()>::bytes(int(options.size)), stream, images, to);
  };
  by_kind(info.wide, info.incomplete, options.size, run);
}

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_ssim_backward", TORCH_BOX(&ssim_backward)); }

}  // namespace safeops::cuda
