// Between torch's stable ABI and the kernels: checks for memory safety, outputs, the current stream. Host only.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "plan.h"

// Only a CUDA torch has this symbol, and this library must load beside a CPU-only torch too.
#pragma weak aoti_torch_get_current_cuda_stream

namespace safeops::cuda {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Type float_type(ScalarType type, const char* op, const char* name) {
  switch (type) {
    case ScalarType::Half: return kF16;
    case ScalarType::BFloat16: return kBF16;
    case ScalarType::Float: return kF32;
    case ScalarType::Double: return kF64;
    default: break;
  }
  STD_TORCH_CHECK(false, op, ": ", name, " must be float16, bfloat16, float32 or float64");
  return kF32;
}

inline int32_t shim_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Float: return aoti_torch_dtype_float32();
    default: return aoti_torch_dtype_float64();
  }
}

inline void check_device(const Tensor& x, const Tensor& input, const char* op, const char* name) {
  STD_TORCH_CHECK(x.is_cuda() && input.is_cuda() && x.get_device_index() == input.get_device_index(), op, ": ", name,
                  " and input are on different devices");
}

inline std::vector<int64_t> broadcast(const std::vector<int64_t>& shape, const Tensor& x, const char* op,
                                      const char* name) {
  const auto sizes = x.sizes();
  std::vector<int64_t> result(std::max(shape.size(), sizes.size()), 1);
  std::copy(shape.rbegin(), shape.rend(), result.rbegin());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    int64_t& size = result[result.size() - 1 - dim];
    const int64_t other = sizes[sizes.size() - 1 - dim];
    STD_TORCH_CHECK(size == other || size == 1 || other == 1, op, ": ", name, " does not broadcast: sizes ", size,
                    " and ", other, " at dimension -", dim + 1);
    if (size == 1) size = other;
  }
  return result;
}

inline std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const int64_t* strides, ScalarType dtype,
                            const Tensor& on) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides, shim_dtype(dtype),
                                                  aoti_torch_device_type_cuda(), on.get_device_index(), &handle));
  return Tensor(handle);
}

// torch.empty_like(like, dtype=dtype) where like has the full shape, else a contiguous tensor of that shape.
inline Tensor empty_output(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  if (shape_of(like) == shape) {
    if (like.is_contiguous()) return empty_strided(shape, like.strides().data(), dtype, like);
    using torch::stable::detail::from;
    std::array<StableIValue, 6> stack{from(like),         from(std::optional<ScalarType>(dtype)), from(std::nullopt),
                                      from(std::nullopt), from(std::nullopt),                     from(std::nullopt)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(shape[dim], 1);
  return empty_strided(shape, strides.data(), dtype, like);
}

inline Tensor empty_vector(ScalarType dtype, const Tensor& on) {  // shape (0,): a gradient nobody wants
  const int64_t stride = 1;
  return empty_strided({0}, &stride, dtype, on);
}

inline View view(const Tensor& x, Type type) {
  return {const_cast<void*>(x.const_data_ptr()), type, x.dim(), x.sizes().data(), x.strides().data()};
}
inline View view_output(const Tensor& x, Type type) {
  return {x.mutable_data_ptr(), type, x.dim(), x.sizes().data(), x.strides().data()};
}
inline View no_view(Type type) { return {nullptr, type, 0, nullptr, nullptr}; }

inline cudaStream_t current_stream(const Tensor& x) {
  using Get = decltype(&aoti_torch_get_current_cuda_stream);
  static const Get get = [] {
    if (Get linked = &aoti_torch_get_current_cuda_stream) return linked;
    // Not among the libraries that libtorch.so brought along: ask the one that is loaded, if one is.
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(get != nullptr, "safeops: this torch has no CUDA support (aoti_torch_get_current_cuda_stream)");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": the CUDA launch failed: ", cudaGetErrorString(error));
}

}  // namespace safeops::cuda
