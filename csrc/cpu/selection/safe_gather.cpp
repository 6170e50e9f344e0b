// out[..., i, ...] = input[..., index[..., i, ...], ...] along dim, or fill_value if the index is out of range.
// I/O: read index and the elements that it names, write out. Backward: read grad and index, write dx.
#include "cpu/selection/indexed.h"

namespace safeops::cpu {

namespace {

Tensor safe_gather(const Tensor& input, const Tensor& index, int64_t dim, double fill_value) {
  BitView x(input);
  Index at(index);
  const int d = resolve_dim(dim, x.ndim);
  const Shape shape = at.bits.shape();
  x.make_vector();
  at.bits.make_vector();
  STD_TORCH_CHECK(at.bits.ndim == x.ndim, "_safe_gather: index must have as many dims as input");
  for (int i = 0; i < x.ndim; ++i)
    STD_TORCH_CHECK(i == d || at.bits.size[i] <= x.size[i], "_safe_gather: index is larger than input beside dim");
  const Tensor out = on_huge_pages(new_like(shape, input), shape.numel() * x.width);
  gather_elements(x, d, at.bits, at.narrow, View(out).data, fill_bits(fill_value, input));
  return out;
}

Tensor safe_gather_backward(const Tensor& grad, const Tensor& index, int64_t dim, const std::vector<int64_t>& size,
                            std::optional<ScalarType> dtype) {
  BitView g(grad);
  const DType grad_dtype = View(grad).dtype;
  STD_TORCH_CHECK(View(grad).is_floating(), "_safe_gather_backward: grad must be floating point");
  Index at(index);
  Shape shape(static_cast<int>(size.size()), size.data());
  const int d = resolve_dim(dim, shape.ndim);
  const Tensor dx = new_output(shape, floating(dtype, grad_dtype), grad);
  STD_TORCH_CHECK(at.bits.shape().is(g.ndim, g.size), "_safe_gather_backward: index and grad differ in shape");
  if (shape.ndim == 0) shape.size[shape.ndim++] = 1;
  at.bits.make_vector();
  g.make_vector();
  STD_TORCH_CHECK(at.bits.ndim == shape.ndim, "_safe_gather_backward: index must have as many dims as size");
  View v = g.view();
  v.dtype = grad_dtype;
  scatter_add(v, d, at.bits, at.narrow, shape, View(dx));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_safe_gather", TORCH_BOX(&safe_gather));
  m.impl("_safe_gather_backward", TORCH_BOX(&safe_gather_backward));
}

}  // namespace safeops::cpu
