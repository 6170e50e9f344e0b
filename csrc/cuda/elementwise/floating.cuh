// Arithmetic on floating operands of any dtypes: the choice of the kernel, and the limits of the output dtype.
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

// The parameters of a call that an op's functions read. A value saturates exactly where it would round to inf in the
// output dtype, which is |y| >= limit, so functors need not know that dtype. C is the compute type.
template <class C>
struct Range {
  using Value = C;
  static constexpr bool kHalf = false;
  C eps, limit, largest, stand_in;
  bool need_input, need_other;  // the gradients that are wanted (a hint: a function may leave out the other)

  __device__ bool overflows(C y) const { return fabs(y) >= limit; }
  __device__ C saturated(C y, bool over) const { return over ? copysign(largest, y) : y; }
};

// For calls whose operands and results are all fp16 or bf16 (half.cuh).
struct Half : Range<float> {
  static constexpr bool kHalf = true;
  float log2_limit;
  explicit Half(const Range<float>& range) : Range<float>(range), log2_limit(std::log2(range.limit)) {}
};

// Traits of a function: kRolled if it is long (loop.cuh; no function of halves is), kFixedRows if its operands are
// often rows.
struct Plain {
  static constexpr bool kRolled = false, kFixedRows = false;
};

// The functor of any function, for a range of type R.
template <class Function, class R, int kOuts, int kIns>
struct Functor {
  using Value = typename R::Value;
  static constexpr int kOut = kOuts, kIn = kIns;
  static constexpr bool kMask = false, kRolled = Function::kRolled && !R::kHalf;
  static constexpr bool kFixedRows = Function::kFixedRows;
  R range;

  __device__ void prepare() {}
};

// For g a b: true if product = g a is not a normal number, so that g (a b) is the better order of the factors.
template <class C>
__device__ inline bool lost(C product, C g) {
  const C size = fabs(product);
  return size > std::numeric_limits<C>::max() || (size < std::numeric_limits<C>::min() && g != C(0));
}

template <class C>
Range<C> make_range(double eps, Type out, double stand_in = 0, bool need_input = true, bool need_other = true) {
  const DType dtype = DType(out);
  double limit = overflow_from(dtype);
  // From fp64 the halves are rounded through fp32, which already rounds up to the limit from half an fp32 step below
  // it.
  if (sizeof(C) == 8 && size_of(out) == 2) limit = (limit + std::nextafter(float(limit), 0.0f)) / 2;
  return {C(eps), C(limit), C(largest(dtype)), C(saturate(stand_in, dtype)), need_input, need_other};
}

// Dense operands of one dtype take 16-byte packets of that dtype. Broadcast ones, or a mix up to fp32, take packets of
// eight elements with types known at run time (kFixedRows: at compile time if there is one type). All others go element
// by element. make(range) returns the functor, for a Half, a Range<float> or a Range<double>.
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
