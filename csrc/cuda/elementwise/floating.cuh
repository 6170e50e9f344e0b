// For functions of floating operands of any dtypes: the parameters that they read, and the choice of the kernel.
#pragma once

#include <cmath>
#include <limits>

#include "common/limits.h"
#include "loop.cuh"

namespace safeops::cuda {

template <class C>
__device__ inline bool finite(C x) {
  return fabs(x) <= std::numeric_limits<C>::max();
}

// The parameters of a call that an op's functions read, in the compute type C. A value y saturates to +-largest, the
// largest finite number of the output dtype, exactly where it would round to inf in that dtype: where |y| >= limit.
// stand_in: the result where the op has no value.
template <class C>
struct Range {
  using Value = C;
  static constexpr bool kHalf = false;
  C eps, limit, largest, stand_in;
  bool need_input, need_other;  // the gradients that are wanted; a function may compute both all the same

  __device__ bool overflows(C y) const { return fabs(y) >= limit; }
  __device__ C saturated(C y, bool over) const { return over ? copysign(largest, y) : y; }
};

// The Range of calls whose operands and results all have one dtype, fp16 or bf16 (half.cuh).
struct Half : Range<float> {
  static constexpr bool kHalf = true;
  float log2_limit;
  explicit Half(const Range<float>& range) : Range<float>(range), log2_limit(std::log2(range.limit)) {}
};

// Traits of a function. kRolled: it is long, so its code is not unrolled over a packet's elements (loop.cuh); functions
// for Half always are. kFixedRows: its operands are often broadcast along rows, so kernels are compiled for each dtype.
struct Plain {
  static constexpr bool kRolled = false, kFixedRows = false;
};

// The base of all functors: the traits of Function, the number of operands, and a range of type R (Half or Range<C>).
template <class Function, class R, int kOuts, int kIns>
struct Functor {
  using Value = typename R::Value;
  static constexpr int kOut = kOuts, kIn = kIns;
  static constexpr bool kMask = false, kRolled = Function::kRolled && !R::kHalf;
  static constexpr bool kFixedRows = Function::kFixedRows;
  R range;

  __device__ void prepare() {}
};

// For a product of three factors g a b: true if product = g a over- or underflows, so that g (a b) is more accurate.
template <class C>
__device__ inline bool lost(C product, C g) {
  const C size = fabs(product);
  return size > std::numeric_limits<C>::max() || (size < std::numeric_limits<C>::min() && g != C(0));
}

template <class C>
Range<C> make_range(double eps, Type out, double stand_in = 0, bool need_input = true, bool need_other = true) {
  const DType dtype = DType(out);
  double limit = overflow_from(dtype);
  // An fp64 value is rounded to fp16 or bf16 through fp32. From half a step of fp32 below the limit on, fp32 rounds it
  // up to the limit.
  if (sizeof(C) == 8 && size_of(out) == 2) limit = (limit + std::nextafter(float(limit), 0.0f)) / 2;
  return {C(eps), C(limit), C(largest(dtype)), C(saturate(stand_in, dtype)), need_input, need_other};
}

// Dense operands of one dtype: launch_flat, by 16-byte packets. Else, if no operand is fp64 and the arithmetic is not
// `wide` (fp64): launch_rows, by packets of eight elements along rows; or, with kFixedRows and one dtype, of 16 bytes.
// Else, or if rows are not whole packets: launch_general, one element at a time.
// make(range) returns the functor, for a Half, a Range<float> or a Range<double>.
template <class Make, int N, class... Parameters>
void launch_floating(Plan<N>& plan, bool wide, const Make& make, cudaStream_t stream, const Parameters&... parameters) {
  const Range<float> range = make_range<float>(parameters...);
  const auto op16 = make(Half(range));
  const auto op32 = make(range);
  const auto op64 = make(make_range<double>(parameters...));
  constexpr bool kFixedRows = decltype(op32)::kFixedRows;
  Type type = kBool;
  bool same = true, narrow = !wide;
  for (int i = 0; i < N; ++i) {
    if (plan.base[i] == nullptr) continue;
    if (type == kBool) type = plan.type[i];
    same = same && plan.type[i] == type;
    narrow = narrow && plan.type[i] != kF64;
  }
  bool done = false;
  if (same && type == kF16) done = launch_flat<F16>(plan, op16, stream);
  if (same && type == kBF16) done = launch_flat<BF16>(plan, op16, stream);
  if (same && type == kF32 && narrow) done = launch_flat<F32>(plan, op32, stream);
  if (same && type == kF64) done = launch_flat<F64>(plan, op64, stream);
  if constexpr (kFixedRows) {
    if (!done && same && type == kF16) done = launch_rows<Fixed<F16>>(plan, op16, stream);
    if (!done && same && type == kBF16) done = launch_rows<Fixed<BF16>>(plan, op16, stream);
    if (!done && same && type == kF32 && narrow) done = launch_rows<Fixed<F32>>(plan, op32, stream);
  }
  if (!done && narrow && !(kFixedRows && same)) done = launch_rows<Mixed>(plan, op32, stream);
  if (done) return;
  if (wide) launch_general(plan, op64, stream);
  else launch_general(plan, op32, stream);
}

}  // namespace safeops::cuda
