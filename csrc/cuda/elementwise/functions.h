// The launches of a unary or binary function, which its .cu file defines for unary.cpp and binary.cpp. Host only.
// These .cpp files have the tensors and the registration, because nvcc takes longer over torch's headers than over a
// kernel.
#pragma once

#include <cuda_runtime.h>

#include "common/limits.h"
#include "cuda/engine/plan.h"

namespace safeops::cuda {

// The floor that `eps` stands for (common/limits.h), rounded to the compute type.
inline double floor_of(const std::optional<double>& eps, bool wide) {
  const double floor = safeops::floor_of(eps, wide);
  return wide ? floor : double(float(floor));
}

// wide: the compute type is fp64, else fp32. eps: the floor in the compute type. out: the dtype of the forward's
// result, in which values saturate.
struct UnaryLaunch {
  void (*forward)(Plan<2>& plan, bool wide, double eps, double fill_value, Type out, cudaStream_t stream);
  void (*backward)(Plan<3>& plan, bool wide, double eps, Type out, cudaStream_t stream);
};
// forward_number, backward_number: the second operand is `number`, a parameter of the kernel, instead of a tensor.
struct BinaryLaunch {
  void (*forward)(Plan<3>& plan, bool wide, double eps, double fill_value, Type out, cudaStream_t stream);
  void (*backward)(Plan<5>& plan, bool wide, double eps, Type out, bool need_input, bool need_other,
                   cudaStream_t stream);
  void (*forward_number)(Plan<2>& plan, bool wide, double number, double eps, double fill_value, Type out,
                         cudaStream_t stream);
  void (*backward_number)(Plan<3>& plan, bool wide, double number, double eps, Type out, cudaStream_t stream);
};

}  // namespace safeops::cuda
