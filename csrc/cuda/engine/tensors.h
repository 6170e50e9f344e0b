// The link between torch's stable ABI and the kernels: checks for memory safety, outputs, the current stream. Host
// only.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/Exception.h>

#include "common/tensor.h"
#include "plan.h"

// Only a CUDA torch has this symbol, and this library must load beside a CPU-only torch, too.
#pragma weak aoti_torch_get_current_cuda_stream

namespace safeops::cuda {

static_assert(int(DType::kHalf) == kF16 && int(DType::kBFloat16) == kBF16 && int(DType::kFloat) == kF32 &&
              int(DType::kDouble) == kF64 && int(DType::kBool) == kBool);

inline Type float_type(const Tensor& x, const char* op, const char* name) {
  const DType dtype = dtype_of(x);
  STD_TORCH_CHECK(dtype <= DType::kDouble, op, ": ", name, " must be float16, bfloat16, float32 or float64");
  return Type(dtype);
}
inline Type float_type(ScalarType type) { return Type(floating(type)); }

inline void check_device(const Tensor& x, const Tensor& input, const char* op, const char* name) {
  STD_TORCH_CHECK(x.is_cuda() && input.is_cuda() && x.get_device_index() == input.get_device_index(), op, ": ", name,
                  " and input are on different devices");
}

inline Tensor output_like(const Tensor& like, const Shape& shape, Type type) {
  return safeops::empty_like(shape, DType(type), like, safeops::View(like));
}

inline Operand operand(const Tensor& x, Type type) {
  return {x.data_ptr(), type, x.dim(), x.sizes().data(), x.strides().data()};
}
inline Operand no_operand(Type type) { return {nullptr, type, 0, nullptr, nullptr}; }

inline cudaStream_t current_stream(const Tensor& x) {
  using Get = decltype(&aoti_torch_get_current_cuda_stream);
  static const Get get = [] {
    if (Get linked = &aoti_torch_get_current_cuda_stream) return linked;
    // The libraries that libtorch.so loaded do not have it: look in libtorch_cuda.so, if that is loaded.
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
