// Arithmetic whose operands and results all are fp16 or bf16, in fp32 with as few instructions as such results need. A
// function that has something shorter for them says so by an overload for Half; it is right to a twentieth of a step.
// Products and quotients that may leave the range of fp32 on the way are added up as logarithms instead.
#pragma once

#include "floating.cuh"

namespace safeops::cuda {

// The GPU's own logarithm and power, of no subnormal number. Volatile, or they would be put into branches.
#ifdef __CUDACC__  // tests/kernels/emulate has these for the host, as wrong as they may be
__device__ inline float own_log2(float x) {  // to 2^-22 between 1/2 and 2, elsewhere of itself; below 0 it is NaN
  float y;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float own_exp2(float x) {  // to 2^-22 of itself
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// The same of, and to, subnormal numbers too.
__device__ inline float rough_log2(float x) {
  const bool small = fabs(x) < std::numeric_limits<float>::min();
  const float y = own_log2(small ? x * 0x1p24f : x);
  return small ? y - 24 : y;
}
__device__ inline float rough_exp2(float x) {
  const float root = own_exp2(0.5f * x);
  return root * root;
}

constexpr float kLog2 = 0.693147181f;

// log2(x) to 1.5e-6 of itself: near 1 a series, fitted for the least relative error (3e-7).
__device__ inline float log2_of(float x) {
  const float f = x - 1;
  const float series =
      f * (1.44269506f + f * (-0.72132887f + f * (0.48087164f + f * (-0.36542839f + f * 0.29330216f))));
  return fabs(f) < 0.125f ? series : rough_log2(x);
}

// `size` with the product of the signs, which are the highest bits of `signs`.
template <class... Factors>
__device__ inline float with_signs_of(float size, Factors... factor) {
  return __uint_as_float(__float_as_uint(size) ^ ((__float_as_uint(factor) ^ ...) & 0x80000000u));
}

}  // namespace safeops::cuda
