#include "cpu/reductions/segments.h"

namespace safeops::cpu {

namespace {

// True if places[i] == i for all i. The loop has no early exit, so that it vectorises.
bool is_identity(const int64_t* places, int64_t n) {
  int64_t differences = 0;
  for (int64_t i = 0; i < n; ++i) differences |= places[i] ^ i;
  return differences == 0;
}

template <class T>
void copy(const View& view, std::vector<int64_t>& to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = reinterpret_cast<const T*>(view.data)[i * view.strides[0]];
}

}  // namespace

std::vector<int64_t> read_integers(const char* op, const char* name, const Tensor& t) {
  const View view(t);
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(view.ndim == 1, op, ": ", name, " must have one dim");
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, op, ": ", name, " must be int64 or int32");
  std::vector<int64_t> values(view.sizes[0]);
  type == ScalarType::Long ? copy<int64_t>(view, values) : copy<int32_t>(view, values);
  return values;
}

std::vector<int64_t> read_bounds(const char* op, const Tensor& cu_seqlens, int64_t rows) {
  std::vector<int64_t> bounds = read_integers(op, "cu_seqlens", cu_seqlens);
  STD_TORCH_CHECK(!bounds.empty(), op, ": cu_seqlens must have num_segments + 1 bounds");
  STD_TORCH_CHECK(bounds.front() == 0 && bounds.back() == rows && std::is_sorted(bounds.begin(), bounds.end()), op,
                  ": cu_seqlens must start at 0, not decrease, and end at the ", rows,
                  " rows of input; segment ids must be from 0 to num_segments - 1");
  return bounds;
}

const int64_t* read_order(const char* op, const OptionalTensor& order, int64_t rows) {
  if (!order) return nullptr;
  const View view(*order);
  STD_TORCH_CHECK(view.ndim == 1 && view.sizes[0] == rows && view.dtype == DType::kLong && view.contiguous(), op,
                  ": order must have a contiguous int64 for each row");
  const auto* places = reinterpret_cast<const int64_t*>(view.data);
  return pick<&is_identity>()(places, rows) ? nullptr : places;  // index_select checks the range of `places`
}

std::optional<Tensor> in_order(const OptionalTensor& t, const Shape& input, const int64_t* order,
                               const OptionalTensor& indices) {
  if (!t || !order) return t;
  const View view(*t);
  if (view.ndim < input.ndim || view.sizes[0] != input.size[0]) return t;
  using torch::stable::detail::from;
  StableIValue stack[3] = {from(*t), from(int64_t{0}), from(*indices)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::index_select", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Segments::Segments(const char* op, const Tensor& input_, const OptionalTensor& mask_, const OptionalTensor& weight_,
                   const Tensor& cu_seqlens, const OptionalTensor& order)
    : x(input_),
      shape(x.shape()),
      bounds(read_bounds(op, cu_seqlens, shape.ndim ? shape.size[0] : 0)),
      input(input_) {
  STD_TORCH_CHECK(shape.ndim && x.is_floating(), op, ": input must be floating point, with a first dim of rows");
  out = shape_of_results(shape, bounds);
  const int64_t* places = read_order(op, order, shape.size[0]);
  // Checked before any copy, so that operands that do not broadcast raise broadcast()'s clear error.
  if (mask_) broadcast(shape, View(*mask_).shape());
  if (weight_) broadcast(shape, View(*weight_).shape());
  input = *in_order(input_, shape, places, order);
  mask = in_order(mask_, shape, places, order);
  weight = in_order(weight_, shape, places, order);
  value = empty(out, wide(x.dtype, x.dtype), input);
  denominator = empty(out, DType::kDouble, input);
}

}  // namespace safeops::cpu
