// Loops of the weighted families (sums, means, pointwise losses): what a kept element contributes, and its gradient.
//
// A functor F says f(x, y) in value() and df/dx in slope(), and how many operands value() reads.
#pragma once

#include "cpu/engine/reduction.h"

namespace safeops::cpu {

template <class C, bool kMask, bool kWeight>
inline bool kept(const uint8_t* mask, const C* weight, int64_t i) {
  bool keep = true;
  if constexpr (kMask) keep = mask[i] != 0;
  if constexpr (kWeight) keep = keep & (weight[i] != 0);  // a NaN weight is kept
  return keep;
}

// in: [weight], x, [y];  out: terms, kept weights
template <class C, class F, bool kMask, bool kWeight>
void term_loop(const void* op, const Chunk<C>& chunk) {
  const F f = *static_cast<const F*>(op);
  const C *w = chunk.in[0], *x = chunk.in[kWeight], *y = chunk.in[kWeight + F::operands - 1];
  const uint8_t* mask = chunk.mask;
  C *terms = chunk.out[0], *weights = chunk.out[1];
  uint8_t* keeps = chunk.keep;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = kept<C, kMask, kWeight>(mask, w, i);
    C term = f.value(x[i], y[i]);
    if constexpr (kWeight) term *= w[i];
    terms[i] = kept_or_zero(keep, term);
    if constexpr (kWeight) weights[i] = kept_or_zero(keep, w[i]);
    if constexpr (kMask || kWeight) keeps[i] = keep;
  }
}

// A weight too small or too large for fp32 is read as it is: it makes the loop run in double.
inline bool in_double(const std::optional<Tensor>& weight) { return weight && dtype_of(*weight) == DType::kDouble; }

template <class F, class C>
struct Slope {
  F f;
  C sign;  // -1 where the first output is dy = -dx
};

// in: c, [weight], x, y;  out: dx = c w f'(x, y), and -dx if it is wanted as well
template <class C, class F, bool kMask, bool kWeight>
void slope_loop(const void* op, const Chunk<C>& chunk) {
  const Slope<F, C> s = *static_cast<const Slope<F, C>*>(op);
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight], *y = chunk.in[2 + kWeight];
  const uint8_t* mask = chunk.mask;
  C *dx = chunk.out[0], *dy = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C scale = s.sign * c[i];
    if constexpr (kWeight) scale *= w[i];
    const C slope = scale * s.f.slope(x[i], y[i]);
    dx[i] = kept_or_zero(kept<C, kMask, kWeight>(mask, w, i), slope);
  }
  if (!dy) return;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) dy[i] = 0 - dx[i];  // +0 stays +0
}

template <class C, class F>
Loop<C> pick_terms(bool mask, bool weight) {
  if (mask) return weight ? pick<&term_loop<C, F, true, true>>() : pick<&term_loop<C, F, true, false>>();
  return weight ? pick<&term_loop<C, F, false, true>>() : pick<&term_loop<C, F, false, false>>();
}

template <class C, class F>
Loop<C> pick_slope(bool mask, bool weight) {
  if (mask) return weight ? pick<&slope_loop<C, F, true, true>>() : pick<&slope_loop<C, F, true, false>>();
  return weight ? pick<&slope_loop<C, F, false, true>>() : pick<&slope_loop<C, F, false, false>>();
}

// c = g / denominator, in the fewest divisions: one where both are one number, else one for each element of `grad`,
// which is the smaller side of a reduction. Owns what the view points to.
template <class C>
struct Scale {
  C number;
  std::optional<Tensor> quotient;
  View view;

  Scale(const Tensor& grad, const std::optional<Tensor>& denominator);
};

}  // namespace safeops::cpu
