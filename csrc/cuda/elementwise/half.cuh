// Arithmetic for calls whose operands and results all have one dtype, fp16 or bf16. It is fp32, with few instructions:
// an op's overload for Half is accurate to a twentieth of a step of the result's dtype. Products and quotients whose
// intermediate results may leave the range of fp32 are computed as sums of logarithms.
#pragma once

#include "floating.cuh"

namespace safeops::cuda {

// The GPU's approximate log2(x) and 2^x, which flush subnormal numbers to 0. They are volatile, as the compiler would
// otherwise move them into branches.
__device__ inline float approx_log2(float x) {  // error 2^-22, absolute in [1/2, 2], elsewhere relative; NaN below 0
  float y;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float approx_exp2(float x) {  // relative error 2^-22
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) and 2^x, approximately, for subnormal x and with subnormal results, too.
__device__ inline float rough_log2(float x) {
  const bool small = fabs(x) < std::numeric_limits<float>::min();
  const float y = approx_log2(small ? x * 0x1p24f : x);
  return small ? y - 24 : y;
}
__device__ inline float rough_exp2(float x) {
  const float root = approx_exp2(0.5f * x);
  return root * root;
}

constexpr float kLog2 = 0.693147181f;

// log2(x) with a relative error of 1.5e-6. For |x - 1| < 1/8 it is a polynomial with a relative error of 3e-7.
__device__ inline float log2_of(float x) {
  const float f = x - 1;
  const float series =
      f * (1.44269506f + f * (-0.72132887f + f * (0.48087164f + f * (-0.36542839f + f * 0.29330216f))));
  return fabs(f) < 0.125f ? series : rough_log2(x);
}

// Returns `size` (>= 0) with the sign of the product of the factors.
template <class... Factors>
__device__ inline float with_signs_of(float size, Factors... factor) {
  return __uint_as_float(__float_as_uint(size) ^ ((__float_as_uint(factor) ^ ...) & 0x80000000u));
}

}  // namespace safeops::cuda
