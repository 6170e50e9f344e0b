// How a failed allocation reaches the user. libtorch's C shim drops the text of the allocator's exception, so the C++
// code throws `NoMemory`. Python (safeops/core/library.py) recognises the text of NoMemory and asks torch for as many
// bytes again, so that torch raises its own error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

extern "C" {
__attribute__((weak)) extern int FLAGS_caffe2_log_level;  // defined in libc10
__attribute__((weak)) const char* torch_exception_get_what();
}

namespace safeops {

// Before torch 2.13 the C shim logs each exception that it catches, with all C++ frames. While a Quiet exists in any
// thread, torch logs only fatal messages. From 2.13 on torch exports torch_exception_get_what, and Quiet does nothing.
class Quiet {
 public:
  Quiet() {
    if (logs() && inside_++ == 0) FLAGS_caffe2_log_level = kFatal;
  }
  ~Quiet() {
    if (logs() && --inside_ == 0) FLAGS_caffe2_log_level = level_;
  }
  Quiet(const Quiet&) = delete;

 private:
  static constexpr int kFatal = 3;
  static bool logs() { return &FLAGS_caffe2_log_level != nullptr && &torch_exception_get_what == nullptr; }

  static inline std::atomic<int> inside_ = 0;
  static inline const int level_ = logs() ? FLAGS_caffe2_log_level : kFatal;
};

struct NoMemory : std::runtime_error {
  NoMemory(int64_t bytes, int32_t device_type, int32_t device)
      : std::runtime_error("safeops: no memory for " + std::to_string(bytes) + " bytes on " +
                           (device_type == aoti_torch_device_type_cpu() ? "cpu" : "cuda:" + std::to_string(device))) {}
};

// The number of bytes of a tensor of these sizes, or the largest int64 if the product overflows.
inline int64_t bytes_of(const int64_t* sizes, int64_t dims, int32_t dtype) {
  int64_t bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  for (int64_t d = 0; d < dims; ++d)
    if (__builtin_mul_overflow(bytes, sizes[d], &bytes)) return std::numeric_limits<int64_t>::max();
  return bytes;
}

}  // namespace safeops
