#include "cpu/engine/weighted_sum.h"

#include <cmath>
#include <limits>

namespace safeops::cpu {

namespace {

// Divides in double, as GradientScale does for single numbers: a row's factor has the same bits alone and among other
// rows.
void quotient_loop(const void*, const Chunk<double>& chunk) {
  const double *g = chunk.in[0], *d = chunk.in[1];
  double* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) out[i] = g[i] / d[i];
}

// Replaces a slope in `out` by its gradient: out = keep ? c w out : 0. kFlat: a slope of 0 gives 0, even if c is inf.
template <class C, bool kFlat, bool kMask, bool kWeight>
void scale_loop(const void*, const Chunk<C>& chunk) {
  const C *c = chunk.in[0], *w = chunk.in[1];
  const uint8_t* mask = chunk.mask;
  C* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C scale = c[i];
    if constexpr (kWeight) scale *= w[i];
    bool keep = is_kept<C, kMask, kWeight>(mask, w, i);
    if constexpr (kFlat) keep = keep & (out[i] != 0);
    out[i] = select_or_zero(keep, scale * out[i]);
  }
}

template <class C, bool kFlat>
Loop<C> pick_scale(bool mask, bool weight) {
  if (mask) return weight ? pick<&scale_loop<C, kFlat, true, true>>() : pick<&scale_loop<C, kFlat, true, false>>();
  return weight ? pick<&scale_loop<C, kFlat, false, true>>() : pick<&scale_loop<C, kFlat, false, false>>();
}

}  // namespace

template <class C>
Loop<C> pick_selection(bool mask, bool weight) {
  return pick_value<C, Identity<C>>(mask, weight);
}

template <class C>
Loop<C> pick_scale(bool flat, bool mask, bool weight) {
  return flat ? pick_scale<C, true>(mask, weight) : pick_scale<C, false>(mask, weight);
}

template <class C>
GradientScale<C>::GradientScale(const Tensor& grad, const std::optional<Tensor>& denominator) : view(grad) {
  if (!denominator) return;
  const View g = view, d(*denominator);
  if (g.single() && d.single()) {
    number = static_cast<C>(read_scalar(View(g.data, g.dtype)) / read_scalar(View(d.data, d.dtype)));
    view.data = reinterpret_cast<char*>(&number);
    view.dtype = dtype_v<C>;
    return;
  }
  const Shape shape = broadcast(g.shape(), d.shape());
  quotient.emplace(empty(shape, dtype_v<C>, grad));
  view = View(*quotient);
  Elementwise<double> loop(shape, view);
  loop.input(g);
  loop.input(d);
  loop.output(view);
  loop.run(pick<&quotient_loop>(), nullptr);
}

bool leaves_fp32(const Tensor& grad, const std::optional<Tensor>& denominator) {
  if (!denominator) return false;
  const View g(grad), d(*denominator);
  if (!g.single() || !d.single()) return false;
  const double c = std::fabs(read_scalar(View(g.data, g.dtype)) / read_scalar(View(d.data, d.dtype)));
  return c != 0 && (c < std::numeric_limits<float>::min() || c > std::numeric_limits<float>::max());
}

template struct GradientScale<float>;
template struct GradientScale<double>;
template Loop<float> pick_selection(bool mask, bool weight);
template Loop<double> pick_selection(bool mask, bool weight);
template Loop<float> pick_scale(bool flat, bool mask, bool weight);
template Loop<double> pick_scale(bool flat, bool mask, bool weight);

}  // namespace safeops::cpu
