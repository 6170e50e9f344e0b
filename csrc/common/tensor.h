// Access to tensors through libtorch's C shim. View reads a tensor's metadata once; empty() allocates without looking
// up an op by name. Device independent.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "allocation.h"
#include "dtype.h"
#include "shape.h"

namespace safeops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// libtorch's dtype numbers are not part of its ABI, so no constant can hold them: they are queried at the first use.
struct DTypeCodes {
  int32_t code[6] = {aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float32(),
                     aoti_torch_dtype_float64(), aoti_torch_dtype_bool(),     aoti_torch_dtype_int64()};
};

inline const DTypeCodes& dtype_codes() {
  static const DTypeCodes codes;
  return codes;
}

inline DType dtype_of(const Tensor& t) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  const DTypeCodes& codes = dtype_codes();
  for (int i = 0; i < 6; ++i)
    if (codes.code[i] == code) return static_cast<DType>(i);
  return DType::kOther;
}

inline DType floating(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DType::kHalf;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float: return DType::kFloat;
    case ScalarType::Double: return DType::kDouble;
    default: STD_TORCH_CHECK(false, "safeops: dtype must be float16, bfloat16, float32 or float64");
  }
}

// Returns the floating dtype of a dtype argument, or `fallback` if it is None.
inline DType floating(const std::optional<ScalarType>& type, DType fallback) {
  return type ? floating(*type) : fallback;
}

// Returns the result dtype of losses and reductions: fp64 if x or y is fp64, else fp32.
inline DType wide(DType x, DType y) {
  return x == DType::kDouble || y == DType::kDouble ? DType::kDouble : DType::kFloat;
}

// Points to a tensor's data and metadata; valid while the tensor lives.
struct View {
  char* data;
  const int64_t* sizes;
  const int64_t* strides;
  int ndim;
  DType dtype;

  explicit View(const Tensor& t) : dtype(dtype_of(t)) {
    int64_t dims;
    int64_t *sizes_ptr, *strides_ptr;
    void* ptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t.get(), &dims));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes_ptr));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides_ptr));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t.get(), &ptr));
    data = static_cast<char*>(ptr);
    sizes = sizes_ptr;
    strides = strides_ptr;
    ndim = static_cast<int>(dims);
  }

  // A 0-dim view of a C++ variable.
  View(void* value, DType type)
      : data(static_cast<char*>(value)), sizes(nullptr), strides(nullptr), ndim(0), dtype(type) {}

  Shape shape() const { return Shape(ndim, sizes); }

  bool contiguous() const {
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      if (sizes[d] == 0) return true;
      if (sizes[d] != 1 && strides[d] != step) return false;
      step *= sizes[d];
    }
    return true;
  }

  // True if all elements share one address.
  bool single() const {
    for (int d = 0; d < ndim; ++d)
      if (sizes[d] == 0 || (sizes[d] != 1 && strides[d] != 0)) return false;
    return true;
  }

  bool is_floating() const { return dtype <= DType::kDouble; }
};

// A view of a reduction's output that has the reduced dims as size 1, so that it broadcasts to the input.
struct Unreduced {
  int64_t sizes[kMaxDims], strides[kMaxDims];
  View view;  // valid while this object exists

  Unreduced(const View& output, const ReducedDims& dims, int ndim, bool keepdim, const char* op) : view(output) {
    if (keepdim || output.ndim == 0) return;  // a 0-dim tensor broadcasts as it is
    int from = 0;
    for (int d = 0; d < ndim; ++d) {
      const bool present = !dims.reduced[d] && from < output.ndim;
      sizes[d] = present ? output.sizes[from] : 1;
      strides[d] = present ? output.strides[from] : 0;
      from += present;
    }
    STD_TORCH_CHECK(from == output.ndim, op, ": a tensor has too many dims for the outputs of a reduction");
    view.ndim = ndim;
    view.sizes = sizes;
    view.strides = strides;
  }
  Unreduced(const Unreduced&) = delete;  // `view` points into this object
};

inline int32_t device_type_of(const Tensor& t) {
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type;
}

// Returns a new contiguous tensor on the device of `like`. dtype: libtorch's number of the dtype.
inline Tensor empty_of_code(const Shape& shape, int32_t dtype, const Tensor& like) {
  int64_t strides[kMaxDims];
  contiguous_strides(shape, strides);
  int32_t index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle handle;
  const Quiet quiet;
  if (aoti_torch_empty_strided(shape.ndim, shape.size, strides, dtype, device_type_of(like), index, &handle))
    throw NoMemory(bytes_of(shape.size, shape.ndim, dtype), device_type_of(like), index);
  return Tensor(handle);
}

inline Tensor empty(const Shape& shape, DType dtype, const Tensor& like) {
  return empty_of_code(shape, dtype_codes().code[static_cast<int>(dtype)], like);
}

inline ScalarType scalar_type(DType dtype) {
  constexpr ScalarType types[] = {ScalarType::Half,   ScalarType::BFloat16, ScalarType::Float,
                                  ScalarType::Double, ScalarType::Bool,     ScalarType::Long};
  return types[static_cast<int>(dtype)];
}

// True if torch.empty_like(tensor of `view`) has this shape but not contiguous strides. torch itself must then allocate
// the result: its rule keeps even the strides of size-1 dims.
inline bool keeps_strides(const Shape& shape, const View& view) {
  if (!shape.is(view.ndim, view.sizes)) return false;
  int64_t contiguous[kMaxDims];
  contiguous_strides(shape, contiguous);
  bool same = true;
  for (int d = 0; d < shape.ndim; ++d) same = same && view.strides[d] == contiguous[d];
  return !same;
}

// code: libtorch's number of the result's dtype, which the error text needs.
inline Tensor torch_empty_like(const Tensor& t, const std::optional<ScalarType>& dtype, int32_t code) {
  using torch::stable::detail::from;
  StableIValue stack[6] = {from(t),           from(dtype),        from(std::nullopt),
                           from(std::nullopt), from(std::nullopt), from(std::nullopt)};
  const Quiet quiet;
  if (torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION))
    throw NoMemory(bytes_of(t.sizes().data(), t.dim(), code), device_type_of(t), t.get_device_index());
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Returns a new tensor of this shape and dtype. If t has this shape, it is torch.empty_like(t), which keeps t's
// strides; else it is contiguous, on t's device.
inline Tensor empty_like(const Shape& shape, DType dtype, const Tensor& t, const View& view) {
  const int32_t code = dtype_codes().code[static_cast<int>(dtype)];
  return keeps_strides(shape, view) ? torch_empty_like(t, scalar_type(dtype), code) : empty_of_code(shape, code, t);
}

// Returns an empty vector, which stands for a gradient that is not needed.
inline Tensor empty_vector(DType dtype, const Tensor& like) {
  const int64_t zero = 0;
  return empty(Shape(1, &zero), dtype, like);
}

}  // namespace safeops
