// safe_gather: out[..., i, ...] = input[..., index[..., i, ...], ...] along dim, fill_value where the index is out of
// range.
#include "indexed.cuh"

namespace safeops::cuda {
namespace {

// The index must have as many dims as the indexed tensor, and be larger in none but `dim`.
void check_fits(const Bits& index, const Shape& shape, int dim, const char* op) {
  STD_TORCH_CHECK(index.shape.ndim == shape.ndim, op, ": index must have as many dims as input");
  for (int d = 0; d < shape.ndim; ++d)
    STD_TORCH_CHECK(d == dim || index.shape.size[d] <= shape.size[d], op, ": index is larger than input beside dim");
}

Tensor safe_gather(const Tensor& input, const Tensor& index, int64_t dim, double fill_value) {
  constexpr const char* kOp = "safeops::_safe_gather";
  const Bits indices = index_of(index, input, kOp);
  Bits x(input);
  const int d = resolve_dim(dim, x.shape.ndim);
  x.make_vector();
  check_fits(indices, x.shape, d, kOp);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor out = new_like(View(index).shape(), input);
  look_up(indices.shape, x, d, indices, safeops::fill_bits(fill_value, input), static_cast<char*>(out.data_ptr()),
          current_stream(input));
  check_launch(kOp);
  return out;
}

Tensor safe_gather_backward(const Tensor& grad, const Tensor& index, int64_t dim, const std::vector<int64_t>& size,
                            std::optional<ScalarType> dtype) {
  constexpr const char* kOp = "safeops::_safe_gather_backward";
  const Bits indices = index_of(index, grad, kOp);
  Bits g(grad);
  const Type type = float_type(grad, kOp, "grad");
  const DType dx_dtype = floating(dtype, dtype_of(grad));
  Shape shape(static_cast<int>(size.size()), size.data());
  const int d = resolve_dim(dim, shape.ndim);
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const Tensor dx = safeops::empty(shape, dx_dtype, grad);
  if (shape.ndim == 0) shape.size[shape.ndim++] = 1;
  g.make_vector();
  STD_TORCH_CHECK(indices.shape.is(g.shape.ndim, g.shape.size), kOp, ": index and grad differ in shape");
  check_fits(indices, shape, d, kOp);
  add_up(g, type, d, indices, shape, Type(dx_dtype), dx, current_stream(grad));
  check_launch(kOp);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_safe_gather", TORCH_BOX(&safe_gather));
  m.impl("_safe_gather_backward", TORCH_BOX(&safe_gather_backward));
}

}  // namespace safeops::cuda
