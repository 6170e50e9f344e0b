// What sums, means and pointwise losses share: the loop that says what a kept element adds to its sum, and the factor
// of their gradients.
#pragma once

#include "cpu/engine/reduction.h"

namespace safeops::cpu {

template <class C, bool kMask, bool kWeight>
inline bool is_kept(const uint8_t* mask, const C* weight, int64_t i) {
  bool keep = true;
  if constexpr (kMask) keep = mask[i] != 0;
  if constexpr (kWeight) keep = keep & (weight[i] != 0);  // a NaN weight is kept
  return keep;
}

// Whether F is a function of three operands, value(x, y, z).
template <class F, class C, class = void>
constexpr bool has_third = false;
template <class F, class C>
constexpr bool has_third<F, C, std::void_t<decltype(std::declval<const F&>().value(C(), C(), C()))>> = true;

// in: [weight], x, [y, [z]];  out: w f.value(x, y, z), kept weights. A function of x alone ignores y.
template <class C, class F, bool kMask, bool kWeight>
void value_loop(const void* op, const Chunk<C>& chunk) {
  const F f = *static_cast<const F*>(op);
  const C *w = chunk.in[0], *x = chunk.in[kWeight], *y = chunk.in[kWeight + 1], *z = chunk.in[kWeight + 2];
  const uint8_t* mask = chunk.mask;
  C *values = chunk.out[0], *weights = chunk.out[1];
  uint8_t* keeps = chunk.keep;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = is_kept<C, kMask, kWeight>(mask, w, i);
    C value;
    if constexpr (has_third<F, C>)
      value = f.value(x[i], y[i], z[i]);
    else
      value = f.value(x[i], y[i]);
    if constexpr (kWeight) value *= w[i];
    values[i] = select_or_zero(keep, value);
    if constexpr (kWeight) weights[i] = select_or_zero(keep, w[i]);
    if constexpr (kMask || kWeight) keeps[i] = keep;
  }
}

template <class C, class F>
Loop<C> pick_value(bool mask, bool weight) {
  if (mask) return weight ? pick<&value_loop<C, F, true, true>>() : pick<&value_loop<C, F, true, false>>();
  return weight ? pick<&value_loop<C, F, false, true>>() : pick<&value_loop<C, F, false, false>>();
}

template <class C>
struct Identity {
  C value(C x, C) const { return x; }
};

// in: [weight], x;  out: w x, kept weights
template <class C>
Loop<C> pick_selection(bool mask, bool weight);

// in: c, [weight];  out: slopes, of which it makes the gradients c w slope. flat: 0 of a slope of 0, whatever c is.
template <class C>
Loop<C> pick_scale(bool flat, bool mask, bool weight);

// A weight too small or too large for fp32 is read as it is: it makes the loop run in double.
inline bool in_double(const std::optional<Tensor>& weight) { return weight && dtype_of(*weight) == DType::kDouble; }

// The factor of a gradient, grad / denominator, in the fewest divisions: one where both are one number, else one for
// each element of `grad`, which is the smaller side of a reduction. Owns what the view points to.
template <class C>
struct GradientScale {
  C number;
  std::optional<Tensor> quotient;
  View view;

  GradientScale(const Tensor& grad, const std::optional<Tensor>& denominator);
};

}  // namespace safeops::cpu
