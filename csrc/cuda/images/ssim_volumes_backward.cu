// ssim, ssim_loss, ms_ssim: the gradients for volumes, in three launches.
// (1) level_kernel computes the level of each plane, the mean that is subtracted from its pixels.
// (2) slope_kernel recomputes the windows' moments, and stores the four slopes of each window: the derivatives of the
//     result by E s, E d, E s^2 and E d^2.
// (3) blur_kernel sums the slopes of the windows that contain a pixel, with the windows' weights w:
//     ds = sum w slope(E s) + 2 s sum w slope(E s^2),  and likewise dd;  dx = ds + dd,  dy = ds - dd
// I/O: reads x, y, mask and the map's gradient; writes and reads four slopes of each window; writes dx, dy.
#include "volumes.cuh"

namespace safeops::cuda {
namespace {

// Offset, in elements, of element (plane, z, y, x) of an array (planes, slices, rows, columns). sizes: the last three.
__device__ inline int64_t slope_offset(const int (&sizes)[3], int64_t plane, int z, int y, int x) {
  return ((plane * sizes[0] + z) * sizes[1] + y) * sizes[2] + x;
}

// The Source (sliding_window.cuh) of blur_kernel. It reads the slopes, an array (4, planes, slices, rows, columns).
template <class C, class M>
struct Slopes {
  struct Raw {
    C value[4][M::kReads];
  };
  const M& tile;
  const char* slopes;
  const int64_t planes;
  C* inputs;

  __device__ Slopes(const M& at, const char* from, int64_t planes_)
      : tile(at), slopes(from), planes(planes_), inputs(at.inputs()) {}
  static constexpr int kBytes = 4 * int(sizeof(C));

  __device__ void fetch(int z, Raw& raw) const {
    const int(&sizes)[3] = tile.window.in;
    const int64_t step = slope_offset(sizes, planes, 0, 0, 0) * int64_t(sizeof(C));
    const auto read = [&](int u, int, int y, int x) {
      const char* p = slopes + slope_offset(sizes, tile.plane, z, y, x) * int64_t(sizeof(C));
#pragma unroll
      for (int q = 0; q < 4; ++q, p += step) raw.value[q][u] = load<C>(p);
    };
    tile.each_input(read, [&](int u, int) {
#pragma unroll
      for (int q = 0; q < 4; ++q) raw.value[q][u] = 0;
    });
  }
  __device__ void put(const Raw& raw) const {
    const auto write = [&](int u, int at) {
#pragma unroll
      for (int q = 0; q < 4; ++q) inputs[q * tile.rows * tile.pitch + at] = raw.value[q][u];
    };
    tile.each_input([&](int u, int at, int, int) { write(u, at); }, write);
  }
  __device__ void get(int at, C (&value)[4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) value[q] = inputs[q * tile.rows * tile.pitch + at];
  }
};

template <class C, int kSize, bool kIncomplete>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    slope_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ SlidingWindow<C> window,
                 const __grid_constant__ Planes planes, const __grid_constant__ Gradients to,
                 char* const __grid_constant__ slopes) {
  const WindowSlider<C, kSize, 4 + kIncomplete> tile(window);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const char* grad = to.grad.base + n * to.grad.n + c * to.grad.c;
  if (to.by_window) grad += tile.row * to.grad.row + tile.column * to.grad.column;
  const auto differentiate = [&](int z, bool counted, const Similarity<C>& it, C inverse) {
    MomentSlopes<C> by{0, 0, 0, 0};
    C loss_grad = 0, contrast_grad = 0;
    if (to.by_window && counted) loss_grad = window_gradient<C>(to, grad + z * to.grad.slice);
    else if (counted) plane_gradients(to, grad, loss_grad, contrast_grad);
    if (counted) by = it.slopes(loss_grad, contrast_grad);
    const C slope[4] = {by.s * inverse, by.d * inverse, by.ss * inverse, by.dd * inverse};
    char* p = slopes + slope_offset(window.out, tile.plane, z, tile.row, tile.column) * int64_t(sizeof(C));
    const int64_t step = slope_offset(window.out, planes.count, 0, 0, 0) * int64_t(sizeof(C));
#pragma unroll
    for (int q = 0; q < 4; ++q, p += step) store(p, slope[q]);
  };
  each_window<C, kSize, kIncomplete>(tile, images, planes, n, c, differentiate);
}

template <class C, int kSize>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    blur_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ SlidingWindow<C> window,
                const __grid_constant__ Planes planes, const __grid_constant__ Gradients to,
                const char* const __grid_constant__ slopes, const __grid_constant__ bool incomplete) {
  using M = WindowSlider<C, kSize, 4>;
  const M tile(window);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const Levels<C> level = level_of<C>(planes, tile.plane);
  const auto at = [&](const Field& field, int z) {
    return field.base + n * field.n + c * field.c + z * field.slice + tile.row * field.row + tile.column * field.column;
  };
  const Slopes<C, M> source(tile, slopes, planes.count);
  tile.run(source, [&](int z, const C(&sum)[4]) {
    const auto value = [&](const Field& field, C level_value) {
      using D = Dynamic<C>;
      return (D::decode(load_raw<typename D::Word>(at(field, z), field.type), field.type) - level_value) * images.scale;
    };
    const C x = value(images.x, level.x), y = value(images.y, level.y);
    const C ds = (sum[0] + 2 * (x + y) * sum[2]) * images.scale, dd = (sum[1] + 2 * (x - y) * sum[3]) * images.scale;
    // All sums of a pixel that is in no counted window are 0. Its gradient is 0, even if the pixel is NaN.
    const bool unseen = sum[0] == 0 && sum[1] == 0 && sum[2] == 0 && sum[3] == 0;
    const bool kept = images.mask.base == nullptr || load<uint8_t>(at(images.mask, z));
    const bool alive = kept && !(incomplete && unseen);
    const auto write = [&](const Field& out, C gradient) {
      if (out.base) store_raw(at(out, z), out.type, Dynamic<C>::encode(alive ? gradient : C(0), out.type));
    };
    write(to.dx, ds + dd), write(to.dy, ds - dd);
  });
}

}  // namespace

void ssim_of_volumes_backward(const Gradients& to, const Tensor& input, const Tensor& target,
                              const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info) {
  by_volume_kind(info, options.size, [&](auto compute, auto static_size, auto incomplete) {
    using C = decltype(compute);
    using M = WindowSlider<C, static_size(), 4 + incomplete()>;
    using Back = WindowSlider<C, static_size(), 4>;
    const Launches<C> launches(input, target, mask, options, info);
    const int64_t slopes = 4 * info.map.numel();
    const Tensor workspace = safeops::empty(Shape(1, &slopes), info.wide ? DType::kDouble : DType::kFloat, input);
    launches.template slide<M, Voxels<C, incomplete(), M>>(slope_kernel<C, static_size(), incomplete()>,
                                                           launches.windows, to, launches.data(workspace));
    launches.template slide<Back, Slopes<C, Back>>(blur_kernel<C, static_size()>, launches.pixels, to,
                                                   static_cast<const char*>(launches.data(workspace)), info.incomplete);
  });
}

}  // namespace safeops::cuda
