// Arguments of SSIM's kernels: two images and a mask of any dtypes and strides, cut into tiles of windows. All
// functions run on the host.
#pragma once

#include <cmath>

#include "cuda/engine/tensors.h"

namespace safeops::cuda {

// A tile has kWindows x kWindows windows. Its pixels and sums fit into the shared memory that any GPU gives a block; in
// fp32 with windows of 11 x 11, three blocks fit on an SM of an H200 (csrc/cuda/images/README.md).
template <class C>
constexpr int kWindows = sizeof(C) == 8 ? 28 : 42;
// Largest side of a window, in pixels. safeops/ops/images/_ssim.py computes larger windows in plain torch.
constexpr int kLargest = 21, kLargestOfVolumes = 11;

// The address and dtype of a tensor (N, C, H, W) or (N, C, D, H, W), and its strides in bytes along each dim.
struct Field {
  char* base = nullptr;  // null: the tensor does not exist
  Type type = kF32;
  int64_t n = 0, c = 0, row = 0, column = 0, slice = 0;
};

template <class C>
struct Images {
  Field x, y, mask;
  int depth, height, width, window_slices, window_rows, window_columns;  // sizes of image and map; images: 1 slice
  uint32_t channels, down, across;  // down x across tiles in each plane (n, c)
  int size, before;                 // side of a window; window p of the map begins at pixel p - before
  C scale, c1, c2;
  C weights[kLargest];
};

struct Options {
  double data_range;
  int64_t size;
  double sigma, k1, k2;
  bool same;
};

// Returns the Field of t, which broadcasts to `shape`.
inline Field field(const Tensor& t, Type type, const Shape& shape) {
  const safeops::View view(t);
  int64_t stride[safeops::kMaxDims];
  expand_strides(view.ndim, view.sizes, view.strides, shape, stride);
  const int64_t bytes = size_of(type);
  const int row = shape.ndim - 2;
  return {view.data,           type, stride[0] * bytes, stride[1] * bytes, stride[row] * bytes, stride[row + 1] * bytes,
          row > 2 ? stride[2] * bytes : 0};
}

// Checks ssim's operands, and holds their shapes and dtypes.
struct ImageInfo {
  Shape shape, map;  // shape of the images; of the map, which has one number for each window
  Type x, y;
  bool wide, incomplete;  // wide: computed in fp64; incomplete: windows may have pixels that are masked or outside

  ImageInfo(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask, const Options& o,
          const char* op)
      : shape(View(input).shape()), map(shape), x(float_type(input, op, "input")), y(float_type(target, op, "target")),
        wide(x == kF64 || y == kF64), incomplete(mask || o.same) {
    check_device(target, input, op, "target");
    STD_TORCH_CHECK((shape.ndim == 4 || shape.ndim == 5) && View(target).shape().is(shape.ndim, shape.size), op,
                    ": needs two images (N, C, H, W), or volumes (N, C, D, H, W), of one shape");
    constexpr int64_t kMost = (int64_t(1) << 31) - 64;  // so that 32 bits hold the indices of pixels outside, too
    for (int d = 2; d < shape.ndim; ++d)
      STD_TORCH_CHECK(shape.size[d] < kMost, op, ": images of more than 2^31 rows or columns");
    const int largest = shape.ndim == 5 ? kLargestOfVolumes : kLargest;
    STD_TORCH_CHECK(o.size % 2 && o.size > 0 && o.size <= largest, op, ": win_size must be odd and at most ", largest);
    if (mask) {
      check_device(*mask, input, op, "mask");
      STD_TORCH_CHECK(dtype_of(*mask) == DType::kBool, op, ": mask must be bool");
    }
    for (int d = 2; d < shape.ndim && !o.same; ++d)
      map.size[d] = shape.size[d] < o.size ? 0 : shape.size[d] - o.size + 1;
  }
};

// The half-size images (in the compute dtype) and their mask (bool) that ssim's kernel also writes for ms_ssim.
struct Halves {
  Field x, y, mask;
  int height = 0, width = 0;
};

// grad is the upstream gradient of the map if by_window; else of the mean or sum over all windows if result_slope is
// not null; else of the sums of each plane (3, N, C), with the stride of the first dim in grad.row.
struct Gradients {
  Field grad;
  bool by_window, similarity;  // similarity: the map is of SSIM, not of 1 - SSIM
  const char* result_slope;  // d(mean or sum)/d(one window), or null
  Field dx, dy;              // base null: not wanted
  Field half_dx = {}, half_dy = {};  // the half-size images' gradients (ms_ssim), in the compute dtype
};

// Makes the arguments of a launch. Tiles begin every `step` windows (forward) or pixels (backward) along each dim, and
// cover `sizes` (rows, columns).
template <class C>
Images<C> make_images(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask, const Options& o,
                      const ImageInfo& info, const int64_t* sizes, int64_t step) {
  Images<C> images;
  images.x = field(input, info.x, info.shape), images.y = field(target, info.y, info.shape);
  if (mask) images.mask = field(*mask, kBool, info.shape);
  images.channels = uint32_t(info.shape.size[1]);
  const int row = info.shape.ndim - 2;
  images.depth = row > 2 ? int(info.shape.size[2]) : 1, images.window_slices = row > 2 ? int(info.map.size[2]) : 1;
  images.height = int(info.shape.size[row]), images.width = int(info.shape.size[row + 1]);
  images.window_rows = int(info.map.size[row]), images.window_columns = int(info.map.size[row + 1]);
  images.down = uint32_t((sizes[0] + step - 1) / step), images.across = uint32_t((sizes[1] + step - 1) / step);
  images.size = int(o.size), images.before = o.same ? int(o.size / 2) : 0;
  images.scale = C(1 / o.data_range);
  images.c1 = C(2 * o.k1 * o.k1), images.c2 = C(2 * o.k2 * o.k2);
  double weight[kLargest], total = 0;
  for (int k = 0; k < images.size; ++k) {
    const double t = (k - images.size / 2) / o.sigma;
    total += weight[k] = std::exp(-0.5 * t * t);
  }
  for (int k = 0; k < images.size; ++k) images.weights[k] = C(weight[k] / total);
  return images;
}

// The number of tiles in all planes. A block computes one tile.
template <class C>
unsigned blocks_of(const Images<C>& images, const ImageInfo& info) {
  const int64_t blocks = info.shape.size[0] * info.shape.size[1] * images.down * images.across;
  STD_TORCH_CHECK(blocks < (int64_t(1) << 31), "safeops: images of more than 2^31 tiles");
  return unsigned(blocks);
}

}  // namespace safeops::cuda
