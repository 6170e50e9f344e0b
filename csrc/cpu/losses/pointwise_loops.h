// The loops of the pointwise losses (pointwise_loss.h): values and gradients over chunks, and gradients over elements
// in their stored dtypes.
#pragma once

#include "cpu/engine/weighted_sum.h"

namespace safeops::cpu {

template <class F, class = void>
constexpr bool has_slopes = false;
template <class F>
constexpr bool has_slopes<F, std::void_t<decltype(&F::slopes)>> = true;

// A loss with flat parts declares `static constexpr bool kFlat = true`: where its slope is 0, its gradients are 0 even
// if the upstream gradient is inf or NaN.
template <class F, class = void>
constexpr bool is_flat = false;
template <class F>
constexpr bool is_flat<F, std::void_t<decltype(F::kFlat)>> = true;

// True for losses with so few instructions that memory bandwidth decides their time.
template <class F>
constexpr bool is_light = !has_slopes<F> || is_flat<F>;

// The argument of a loop. If a loss has slopes(), its loops ignore mask and weight, since more versions of such loops
// would cost much code and compile time. `select` then applies mask and weight to the loops' outputs, which are in the
// L1 cache.
template <class F, class C>
struct LossLoop {
  F loss;  // must be first: value_loop (engine/weighted_sum.h) reads a loss at this address
  C sign;  // -1 if the first output is dy = -dx, else 1
  C scale;  // sign times c, if c is a single number (for stored_gradient)
  bool weighted;
  Loop<C> select;
};

// ---- Loops of the values.  in: [weight], x, y, [z];  out: values, weights

template <class C, class F>
void values_loop(const void* op, const Chunk<C>& chunk) {
  const LossLoop<F, C>& loop = *static_cast<const LossLoop<F, C>*>(op);
  const F f = loop.loss;
  const C *const *in = chunk.in + loop.weighted, *x = in[0], *y = in[1], *z = in[2];
  C* values = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) values[i] = value_of(f, x[i], y[i], z[i]);
  if (!loop.select) return;
  Chunk<C> computed = chunk;
  computed.in[loop.weighted] = values;
  loop.select(op, computed);
}

// ---- Loops of the gradients.  in: c = grad / denominator, [weight], x, y, [z];  out: dx, dy, [dz]; null if not wanted

// dx = c w slope(x, y), and dy = -dx where both are wanted
template <class C, class F, bool kMask, bool kWeight>
void slope_loop(const void* op, const Chunk<C>& chunk) {
  const LossLoop<F, C> f = *static_cast<const LossLoop<F, C>*>(op);
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight], *y = chunk.in[2 + kWeight];
  const uint8_t* mask = chunk.mask;
  C *dx = chunk.out[0], *dy = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C scale = f.sign * c[i];
    if constexpr (kWeight) scale *= w[i];
    const C slope = scale * f.loss.slope(x[i], y[i]);
    dx[i] = select_or_zero(is_kept<C, kMask, kWeight>(mask, w, i), slope);
  }
  if (!dy) return;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) dy[i] = 0 - dx[i];  // +0 stays +0
}

template <int kPlace, class C>
C at(Slopes<C> slopes) {  // by value, since a reference keeps gcc from vectorising the loop
  return kPlace == 0 ? slopes.first : kPlace == 1 ? slopes.second : slopes.third;
}

// Returns the derivative with respect to operand kPlace. slope() is the derivative with respect to x: for y, the loop's
// `sign` negates it.
template <int kPlace, class C, class F>
C slope_of(const F& f, C x, C y, C z) {
  if constexpr (!has_slopes<F>)
    return f.slope(x, y);
  else if constexpr (has_third<F, C>)
    return at<kPlace>(f.slopes(x, y, z));
  else
    return at<kPlace>(f.slopes(x, y));
}

// Computes the gradient of operand kPlace from slopes(). The compiler removes code that only the other operands'
// gradients need.
template <int kPlace, class C, class F>
void gradient_loop(const LossLoop<F, C>& loop, const F& f, const Chunk<C>& chunk) {
  const C *const *in = chunk.in + 1 + loop.weighted, *x = in[0], *y = in[1], *z = in[2];
  C* out = chunk.out[kPlace];
  if (!out) return;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) out[i] = slope_of<kPlace>(f, x[i], y[i], z[i]);
  Chunk<C> slopes = chunk;
  slopes.out[0] = out;
  loop.select(&loop, slopes);
}

template <class C, class F>
void gradients_loop(const void* op, const Chunk<C>& chunk) {
  const LossLoop<F, C>& loop = *static_cast<const LossLoop<F, C>*>(op);
  const F f = loop.loss;
  gradient_loop<0>(loop, f, chunk);
  gradient_loop<1>(loop, f, chunk);
  if constexpr (has_third<F, C>) gradient_loop<2>(loop, f, chunk);
}

// Computes the gradient of operand kPlace from stored elements x, y, [z] and a single number c: out = keep ? scale
// slope : 0.
template <int kPlace, class C, class F, class S, bool kMask>
void stored_gradient(const LossLoop<F, C>& loop, const Stored& run, C* const* outputs) {
  const F f = loop.loss;
  const C scale = loop.scale;
  const S *x = run.input<S>(0), *y = run.input<S>(1), *z = run.input<S>(2);
  const uint8_t* mask = run.mask;
  C* out = outputs[kPlace];
  if (!out) return;
  if constexpr (kPlace == 1 && !has_slopes<F>) {
    const C* dx = outputs[0];
    SAFEOPS_SIMD
    for (int64_t i = 0; i < run.n; ++i) out[i] = 0 - dx[i];  // +0 stays +0
  } else {
    SAFEOPS_SIMD
    for (int64_t i = 0; i < run.n; ++i) {
      const C slope = slope_of<kPlace, C>(f, widen(x[i]), widen(y[i]), widen(z[i]));
      bool keep = !kMask || mask[i] != 0;
      if constexpr (is_flat<F>) keep = keep & (slope != 0);
      out[i] = select_or_zero(keep, scale * slope);
    }
  }
}

template <class C, class F, class S, bool kMask>
void stored_gradients(const void* op, const Stored& run, C* const* outputs) {
  const LossLoop<F, C>& loop = *static_cast<const LossLoop<F, C>*>(op);
  stored_gradient<0, C, F, S, kMask>(loop, run, outputs);
  stored_gradient<1, C, F, S, kMask>(loop, run, outputs);
  if constexpr (has_third<F, C>) stored_gradient<2, C, F, S, kMask>(loop, run, outputs);
}

template <class C, class F>
Loop<C> pick_slope(bool mask, bool weight) {
  if (mask) return weight ? pick<&slope_loop<C, F, true, true>>() : pick<&slope_loop<C, F, true, false>>();
  return weight ? pick<&slope_loop<C, F, false, true>>() : pick<&slope_loop<C, F, false, false>>();
}

}  // namespace safeops::cpu
