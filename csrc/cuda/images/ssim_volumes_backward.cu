// ssim, ssim_loss, ms_ssim: the gradients of those of volumes. A first launch finds the planes' levels, a second makes
// the windows' moments anew and leaves the slopes of each in memory, a third blurs them to the pixels in the same way:
//     ds = sum w by_mean_s + 2 s sum w by_squares_s,  the same of d;  dx = ds + dd,  dy = ds - dd
// I/O: reads x, y, mask and the map's gradient; writes and reads four numbers of each window; writes dx, dy.
#include "volumes.cuh"

namespace safeops::cuda {
namespace {

// Where (planes, slices, rows, columns) has an element.
__device__ inline int64_t slope_place(const int (&sizes)[3], int64_t plane, int z, int y, int x) {
  return ((plane * sizes[0] + z) * sizes[1] + y) * sizes[2] + x;
}

// Four of those.
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
    const int(&sizes)[3] = tile.march.in;
    const int64_t step = slope_place(sizes, planes, 0, 0, 0) * int64_t(sizeof(C));
    const auto read = [&](int u, int, int y, int x) {
      const char* p = slopes + slope_place(sizes, tile.plane, z, y, x) * int64_t(sizeof(C));
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

template <class C, int kSize, bool kShared>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    slope_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ March<C> march,
                 const __grid_constant__ Planes planes, const __grid_constant__ Gradients to,
                 char* const __grid_constant__ slopes) {
  const Marcher<C, kSize, 4 + kShared> tile(march);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const char* grad = to.grad.base + n * to.grad.n + c * to.grad.c;
  if (to.by_window) grad += tile.row * to.grad.row + tile.column * to.grad.column;
  const auto differentiate = [&](int z, bool counted, const Similarity<C>& it, C inverse) {
    MomentSlopes<C> by{0, 0, 0, 0};
    C of_loss = 0, of_contrast = 0;
    if (to.by_window && counted) of_loss = of_window<C>(to, grad + z * to.grad.slice);
    else if (counted) of_plane(to, grad, of_loss, of_contrast);
    if (counted) by = it.slopes(of_loss, of_contrast);
    const C slope[4] = {by.s * inverse, by.d * inverse, by.ss * inverse, by.dd * inverse};
    char* p = slopes + slope_place(march.out, tile.plane, z, tile.row, tile.column) * int64_t(sizeof(C));
    const int64_t step = slope_place(march.out, planes.count, 0, 0, 0) * int64_t(sizeof(C));
#pragma unroll
    for (int q = 0; q < 4; ++q, p += step) store(p, slope[q]);
  };
  each_window<C, kSize, kShared>(tile, images, planes, n, c, differentiate);
}

template <class C, int kSize>
__global__ void __launch_bounds__(kTileThreads, kVolumeBlocks<C>)
    blur_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ March<C> march,
                const __grid_constant__ Planes planes, const __grid_constant__ Gradients to,
                const char* const __grid_constant__ slopes, const __grid_constant__ bool shared) {
  using M = Marcher<C, kSize, 4>;
  const M tile(march);
  const int n = int(tile.plane / images.channels), c = int(tile.plane % images.channels);
  const Levels<C> level = level_of<C>(planes, tile.plane);
  const auto at = [&](const Field& of, int z) {
    return of.base + n * of.n + c * of.c + z * of.slice + tile.row * of.row + tile.column * of.column;
  };
  const Slopes<C, M> source(tile, slopes, planes.count);
  tile.run(source, [&](int z, const C(&sum)[4]) {
    const auto value = [&](const Field& of, C about) {
      using D = Dynamic<C>;
      return (D::decode(load_raw<typename D::Word>(at(of, z), of.type), of.type) - about) * images.scale;
    };
    const C x = value(images.x, level.x), y = value(images.y, level.y);
    const C ds = (sum[0] + 2 * (x + y) * sum[2]) * images.scale, dd = (sum[1] + 2 * (x - y) * sum[3]) * images.scale;
    // A pixel that no window sees has gradient 0, also where it is NaN: all its sums are 0.
    const bool unseen = sum[0] == 0 && sum[1] == 0 && sum[2] == 0 && sum[3] == 0;
    const bool kept = images.mask.base == nullptr || load<uint8_t>(at(images.mask, z));
    const bool alive = kept && !(shared && unseen);
    const auto write = [&](const Field& out, C gradient) {
      if (out.base) store_raw(at(out, z), out.type, Dynamic<C>::encode(alive ? gradient : C(0), out.type));
    };
    write(to.dx, ds + dd), write(to.dy, ds - dd);
  });
}

}  // namespace

void ssim_of_volumes_backward(const Gradients& to, const Tensor& input, const Tensor& target,
                              const std::optional<Tensor>& mask, const Options& options, const Checked& is) {
  of_volumes(is, options.size, [&](auto compute, auto known, auto shared) {
    using C = decltype(compute);
    using M = Marcher<C, known(), 4 + shared()>;
    using Back = Marcher<C, known(), 4>;
    const Launches<C> all(input, target, mask, options, is);
    const int64_t slopes = 4 * is.map.numel();
    const Tensor workspace = safeops::empty(Shape(1, &slopes), is.wide ? DType::kDouble : DType::kFloat, input);
    all.template march<M, Voxels<C, shared(), M>>(slope_kernel<C, known(), shared()>, all.windows, to,
                                                  all.data(workspace));
    all.template march<Back, Slopes<C, Back>>(blur_kernel<C, known()>, all.pixels, to,
                                              static_cast<const char*>(all.data(workspace)), is.shared);
  });
}

}  // namespace safeops::cuda
