#include "cpu/engine/weighted_sum.h"

namespace safeops::cpu {

namespace {

template <class C>
void quotient_loop(const void*, const Chunk<C>& chunk) {
  const C *g = chunk.in[0], *d = chunk.in[1];
  C* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) out[i] = g[i] / d[i];
}

}  // namespace

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
  Elementwise<C> loop(shape, view);
  loop.input(g);
  loop.input(d);
  loop.output(view);
  loop.run(pick<&quotient_loop<C>>(), nullptr);
}

template struct GradientScale<float>;
template struct GradientScale<double>;

}  // namespace safeops::cpu
