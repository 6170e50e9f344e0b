// safe_index_select: out[..., k, ...] = input[..., index[k], ...] along dim, fill_value where the index is out of
// range.
#include "indexed.cuh"

namespace safeops::cuda {
namespace {

Tensor safe_index_select(const Tensor& input, const Tensor& index, int64_t dim, double fill_value) {
  constexpr const char* kOp = "safeops::_safe_index_select";
  const Bits picked = index_of(index, input, kOp);
  STD_TORCH_CHECK(picked.shape.ndim == 1, kOp, ": index must have one dimension");
  Bits x(input);
  const int d = resolve_dim(dim, x.shape.ndim);
  Shape shape = x.shape;
  STD_TORCH_CHECK(shape.ndim > 0 || picked.shape.size[0] == 1, kOp, ": one index, the input has no dims");
  if (shape.ndim) shape.size[d] = picked.shape.size[0];
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = new_like(shape, input);
  x.make_vector();
  if (shape.ndim == 0) shape.size[shape.ndim++] = 1;
  look_up(shape, x, d, picked, safeops::fill_bits(fill_value, input), static_cast<char*>(out.data_ptr()),
          current_stream(input));
  check_launch(kOp);
  return out;
}

Tensor safe_index_select_backward(const Tensor& grad, const Tensor& index, int64_t dim,
                                  const std::vector<int64_t>& size) {
  constexpr const char* kOp = "safeops::_safe_index_select_backward";
  const Bits picked = index_of(index, grad, kOp);
  STD_TORCH_CHECK(picked.shape.ndim == 1, kOp, ": index must have one dimension");
  Bits g(grad);
  const Type type = float_type(grad, kOp, "grad");
  Shape shape(static_cast<int>(size.size()), size.data());
  const int d = resolve_dim(dim, shape.ndim);
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const Tensor dx = new_like(shape, grad);
  if (shape.ndim == 0) shape.size[shape.ndim++] = 1;
  g.make_vector();
  STD_TORCH_CHECK(g.shape.ndim == shape.ndim, kOp, ": grad and size differ");
  for (int i = 0; i < shape.ndim; ++i)
    STD_TORCH_CHECK(g.shape.size[i] == (i == d ? picked.shape.size[0] : shape.size[i]), kOp, ": grad and size differ");
  add_up(g, type, d, picked, shape, type, dx, current_stream(grad));
  check_launch(kOp);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_safe_index_select", TORCH_BOX(&safe_index_select));
  m.impl("_safe_index_select_backward", TORCH_BOX(&safe_index_select_backward));
}

}  // namespace safeops::cuda
