// The launches of a unary or binary function, which its .cu file defines for unary.cpp and binary.cpp. Host only.
// These .cpp files have the tensors and the registration, because nvcc takes longer over torch's headers than over a
// kernel.
#pragma once

#include <cuda_runtime.h>

#include "common/limits.h"
#include "cuda/engine/plan.h"

namespace safeops::cuda {

// The floor in the compute type.
inline double floor_of(const std::optional<double>& eps, bool wide) {
  const double floor = safeops::floor_of(eps, wide);
  return wide ? floor : double(float(floor));
}

// wide: computed in fp64. eps: the floor in the compute type. out: the dtype of the result, where values saturate.
struct UnaryLaunch {
  void (*forward)(Plan<2>& plan, bool wide, double eps, double fill_value, Type out, cudaStream_t stream);
  void (*backward)(Plan<3>& plan, bool wide, double eps, Type out, cudaStream_t stream);
};
// number: a second operand that is one number for all elements, a parameter of the kernel.
struct BinaryLaunch {
  void (*forward)(Plan<3>& plan, bool wide, double eps, double fill_value, Type out, cudaStream_t stream);
  void (*backward)(Plan<5>& plan, bool wide, double eps, Type out, bool need_input, bool need_other,
                   cudaStream_t stream);
  void (*forward_number)(Plan<2>& plan, bool wide, double number, double eps, double fill_value, Type out,
                         cudaStream_t stream);
  void (*backward_number)(Plan<3>& plan, bool wide, double number, double eps, Type out, cudaStream_t stream);
};

}  // namespace safeops::cuda
