// Shared by sums, means and pointwise losses: the loop that computes the term of each kept element, and the factor of
// the gradients.
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

// True if F has value(x, y, z), a function of three operands.
template <class F, class C, class = void>
constexpr bool has_third = false;
template <class F, class C>
constexpr bool has_third<F, C, std::void_t<decltype(std::declval<const F&>().value(C(), C(), C()))>> = true;

template <class F, class C>
inline C value_of(const F& f, C x, C y, C z) {
  if constexpr (has_third<F, C>)
    return f.value(x, y, z);
  else
    return f.value(x, y);
}

// in: [weight], x, [y, [z]];  out: w f.value(x, y, z), kept weights. [...]: an optional operand. A function of x alone
// ignores y.
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
    C value = value_of(f, x[i], y[i], z[i]);
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

// A StoredSum, for losses with so few instructions that memory bandwidth decides their time.
template <class C, class F, class S, bool kMask>
void stored_sum(const void* op, const Stored& run, double& value, int64_t& count) {
  constexpr int64_t kLanes = 64, kPiece = 16 * kLanes;  // 16 additions to a lane; the lanes are then added to doubles
  const F f = *static_cast<const F*>(op);
  const S *x = run.input<S>(0), *y = run.input<S>(1), *z = run.input<S>(2);
  const uint8_t* mask = run.mask;
  double sums[kLanes] = {};
  for (int64_t at = 0; at < run.n; at += kPiece) {
    alignas(64) C lanes[kLanes] = {};
    alignas(64) uint8_t kept[kLanes] = {};
    const auto add = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C element = value_of<F, C>(f, widen(x[i + k]), widen(y[i + k]), widen(z[i + k]));
        lanes[k] += kMask ? select_or_zero(mask[i + k] != 0, element) : element;
      }
      if constexpr (kMask) {
        SAFEOPS_SIMD
        for (int64_t k = 0; k < n; ++k) kept[k] += mask[i + k] != 0;
      }
    };
    const int64_t stop = run.n - at < kPiece ? run.n : at + kPiece;
    int64_t i = at;
    for (; i + kLanes <= stop; i += kLanes) add(i, kLanes);
    add(i, stop - i);
    SAFEOPS_SIMD
    for (int64_t k = 0; k < kLanes; ++k) sums[k] += lanes[k];
    int sum = 0;
    _Pragma("omp simd reduction(+ : sum)")
    for (int64_t k = 0; k < kLanes; ++k) sum += kept[k];
    count += sum;
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
  value += sums[0];
}

// Returns run(S(), std::bool_constant<mask>()) for the stored type S; null for types that run no faster that way.
template <class C, class Run>
auto with_stored(DType type, bool mask, const Run& run) -> decltype(run(C(), std::true_type())) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (type == DType::kFloat) return mask ? run(C(), std::true_type()) : run(C(), std::false_type());
    if (type == DType::kBFloat16) return mask ? run(BFloat16(), std::true_type()) : run(BFloat16(), std::false_type());
  }
  return nullptr;
}

template <class C>
struct Identity {
  C value(C x, C) const { return x; }
};

// Returns the loop with in: [weight], x;  out: w x, kept weights.
template <class C>
Loop<C> pick_selection(bool mask, bool weight);

// Returns the loop with in: c, [weight];  out: slopes, which it replaces by the gradients c w slope. flat: a slope of 0
// gives gradient 0, whatever c is.
template <class C>
Loop<C> pick_scale(bool flat, bool mask, bool weight);

// True if the loop must run in double: a float64 weight may be too small or too large for fp32.
inline bool in_double(const std::optional<Tensor>& weight) { return weight && dtype_of(*weight) == DType::kDouble; }

// The factor grad / denominator of a gradient. It takes one division if both are single numbers, else one for each
// output of the reduction; outputs are fewer than elements. It owns the memory of `view`.
template <class C>
struct GradientScale {
  C number;
  std::optional<Tensor> quotient;
  View view;

  GradientScale(const Tensor& grad, const std::optional<Tensor>& denominator);
};

// True if grad / denominator is one number, not 0, outside fp32's normal range: its product with a large or small slope
// or weight may lie within the range again.
bool leaves_fp32(const Tensor& grad, const std::optional<Tensor>& denominator);

}  // namespace safeops::cpu
