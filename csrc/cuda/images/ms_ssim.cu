// ms_ssim: the sums of each plane at several scales, (scales, 3, N, C), and their gradient. The launch of a scale also
// writes the images of the next scale, of half the size, in the compute dtype. One tensor holds the half-size images of
// all scales, and backward reads it. Backward begins at the smallest scale. The launch of a larger scale adds to its
// own gradient the one that the launch before it wrote for the half-size images. So dx is rounded to its dtype once.
// I/O: each scale as ssim; in addition it writes (in backward reads) half-size images, a quarter of its pixels.
#include <algorithm>
#include <tuple>
#include <vector>

#include "ssim.h"
#include "sums.cuh"

namespace safeops::cuda {
namespace {

constexpr const char* kForward = "safeops::_ms_ssim";
constexpr const char* kBackward = "safeops::_ms_ssim_backward";

// A contiguous view of `shape` of a tensor's storage, from element `offset` on.
Tensor part(const Tensor& of, const Shape& shape, int64_t offset) {
  int64_t strides[kMaxDims];
  contiguous_strides(shape, strides);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(of.get(), shape.ndim, shape.size, strides, offset, &handle));
  return Tensor(handle);
}

// shapes[k] is the shape of an image at scale k. Scales 1, 2, ... of an image lie one after another in one tensor:
// scale k begins at element starts[k].
struct Scales {
  std::vector<Shape> shapes;
  std::vector<int64_t> starts{0, 0};

  Scales(const Shape& shape, int64_t count, const char* op) : shapes(1, shape) {
    STD_TORCH_CHECK(count > 0 && shape.ndim == 4, op, ": needs a scale at least, and images");
    for (int64_t scale = 1; scale < count; ++scale) {
      Shape next = shapes.back();
      for (int d = 2; d < next.ndim; ++d) next.size[d] = (next.size[d] + 1) / 2;
      shapes.push_back(next);
      starts.push_back(starts.back() + next.numel());
    }
  }
  int count() const { return int(shapes.size()); }
  int64_t pixels() const { return starts.back(); }
  Tensor made(int64_t images, DType dtype, const Tensor& like) const {
    const int64_t n = images * pixels();
    return safeops::empty(Shape(1, &n), dtype, like);
  }
  // A view of one scale in `all`, which holds scales 1, 2, ... of image 0 (x), then those of image 1 (y).
  Tensor at(int scale, const Tensor& all, int image = 0) const {
    return part(all, shapes[scale], image * pixels() + starts[scale]);
  }
};

std::tuple<Tensor, Tensor, Tensor> ms_ssim(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                                           int64_t count, double data_range, int64_t win_size, double win_sigma,
                                           double k1, double k2, bool same) {
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const ImageInfo first(input, target, mask, options, kForward);
  const Scales scales(first.shape, count, kForward);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const int64_t sizes[] = {count, 3, first.shape.size[0], first.shape.size[1]};
  const Shape of_scale(3, sizes + 1);
  const Tensor sums = safeops::empty(Shape(4, sizes), DType::kDouble, input);
  const Type wide = first.wide ? kF64 : kF32;
  const Tensor images = scales.made(2, DType(wide), input), masks = scales.made(bool(mask), DType::kBool, input);
  Tensor x = input, y = target;
  std::optional<Tensor> keep = mask;
  for (int scale = 0; scale < scales.count(); ++scale) {
    const ImageInfo info(x, y, keep, options, kForward);
    const Outputs outputs(part(sums, of_scale, scale * of_scale.numel()), info);
    if (scale + 1 == scales.count()) {
      sum_similarities(outputs, x, y, keep, options, info, {});
      break;
    }
    const Shape& half = scales.shapes[scale + 1];
    const Tensor half_x = scales.at(scale + 1, images), half_y = scales.at(scale + 1, images, 1);
    std::optional<Tensor> half_keep;
    Halves halves{field(half_x, wide, half), field(half_y, wide, half), {}, int(half.size[2]), int(half.size[3])};
    if (mask) halves.mask = field(*(half_keep = scales.at(scale + 1, masks)), kBool, half);
    sum_similarities(outputs, x, y, keep, options, info, halves);
    x = half_x, y = half_y, keep = half_keep;
  }
  check_launch(kForward);
  return {sums, images, masks};
}

std::tuple<Tensor, Tensor> ms_ssim_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                            const std::optional<Tensor>& mask, const Tensor& images,
                                            const Tensor& masks, int64_t count, double data_range, int64_t win_size,
                                            double win_sigma, double k1, double k2, bool same, bool need_input,
                                            bool need_target) {
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const ImageInfo first(input, target, mask, options, kBackward);
  const Scales scales(first.shape, count, kBackward);
  const Type wide = first.wide ? kF64 : kF32;
  check_device(grad, input, kBackward, "grad"), check_device(images, input, kBackward, "images");
  check_device(masks, input, kBackward, "masks");
  const safeops::View view(grad), coarse(images), kept(masks);
  const int64_t sizes[] = {count, 3, first.shape.size[0], first.shape.size[1]};
  STD_TORCH_CHECK(Shape(4, sizes).is(view.ndim, view.sizes) && view.dtype == DType::kDouble && coarse.ndim == 1 &&
                      coarse.sizes[0] == 2 * scales.pixels() && coarse.dtype == DType(wide) && coarse.contiguous() &&
                      kept.ndim == 1 && kept.sizes[0] == (mask ? scales.pixels() : 0) && kept.dtype == DType::kBool &&
                      kept.contiguous(), kBackward, ": grad, images and masks must be of the results of _ms_ssim");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor dx = need_input ? output_like(input, first.shape, first.x) : empty_vector(DType(first.x), input);
  const Tensor dy = need_target ? output_like(target, first.shape, first.y) : empty_vector(DType(first.y), target);
  if (!need_input && !need_target) return {dx, dy};
  const Tensor slopes = scales.made(2, DType(wide), input);
  const int64_t bytes = sizeof(double);
  for (int scale = scales.count() - 1; scale >= 0; --scale) {
    const Shape& shape = scales.shapes[scale];
    const Tensor x = scale ? scales.at(scale, images) : input, y = scale ? scales.at(scale, images, 1) : target;
    std::optional<Tensor> keep = mask;
    if (scale && mask) keep = scales.at(scale, masks);
    const ImageInfo info(x, y, keep, options, kBackward);
    const Field of_sums{view.data + scale * view.strides[0] * bytes, kF64, view.strides[2] * bytes,
                        view.strides[3] * bytes, view.strides[1] * bytes, 0};
    Gradients to{of_sums, false, false, nullptr, {}, {}};
    const auto out = [&](bool needed, const Tensor& result, int image, Type type, Field& slope, Field& half) {
      if (!needed) return;
      slope = scale ? field(scales.at(scale, slopes, image), wide, shape) : field(result, type, shape);
      if (scale + 1 < scales.count())
        half = field(scales.at(scale + 1, slopes, image), wide, scales.shapes[scale + 1]);
    };
    out(need_input, dx, 0, first.x, to.dx, to.half_dx), out(need_target, dy, 1, first.y, to.dy, to.half_dy);
    write_gradients(to, x, y, keep, options, info);
  }
  check_launch(kBackward);
  return {dx, dy};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_ms_ssim", TORCH_BOX(&ms_ssim));
  m.impl("_ms_ssim_backward", TORCH_BOX(&ms_ssim_backward));
}

}  // namespace safeops::cuda
