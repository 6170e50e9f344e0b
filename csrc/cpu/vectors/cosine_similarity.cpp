// c = <x1, x2> / (max(|x1|, eps) max(|x2|, eps)) for each row, within [-1, 1]. If x1 or x2 is zero, c and its gradients
// are 0.
// I/O: forward reads x1, x2; backward reads x1, x2 once, since it needs no sums, and writes dx1, dx2.
#include "cpu/vectors/norms.h"

namespace safeops::cpu {

namespace {

// ---- Forward. States: for each operand a power of two by which it is multiplied, and its sum of squares; the sum of
// products.

enum { kPower1, kSquares1, kPower2, kSquares2, kProducts };

// Reduces a piece of rows: x and y are (rows, values).
template <class C, int kBytes>
void accumulate_rows(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  using V = Vector<C, kBytes>;
  for (int64_t r = 0; r < p.height; ++r) {
    const C *x = p.in[0] + r * p.step[0], *y = p.in[1] + r * p.step[1];
    const auto products = [&](const C* a, const C* b) {
      return sum_run<kBytes, C>(p.width, [&](int64_t i, V& v) {
        V other;
        load_vector(a + i, v);
        load_vector(b + i, other);
        v *= other;
      });
    };
    states[kPower1][r] = states[kPower2][r] = 1;
    states[kSquares1][r] = products(x, x);
    states[kSquares2][r] = products(y, y);
    states[kProducts][r] = products(x, y);
  }
}

// Reduces a piece of rows side by side: x and y are (values, rows).
template <class C>
void accumulate_columns(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  alignas(64) C xx[kChunk], yy[kChunk], xy[kChunk];
  for (int64_t k = 0; k < p.width; ++k) xx[k] = yy[k] = xy[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *x = p.in[0] + i * p.step[0], *y = p.in[1] + i * p.step[1];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k) {
      xx[k] += x[k] * x[k];
      yy[k] += y[k] * y[k];
      xy[k] += x[k] * y[k];
    }
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < p.width; ++k) {
    states[kPower1][k] = states[kPower2][k] = 1;
    states[kSquares1][k] = xx[k];
    states[kSquares2][k] = yy[k];
    states[kProducts][k] = xy[k];
  }
}

template <class C>
void accumulate_carefully(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  for (int64_t r = 0; r < p.rows(); ++r) {
    if (parameters[kRecompute][r] == 0) continue;
    const double scale1 = scale_of_row(p, 0, r), scale2 = scale_of_row(p, 1, r);
    double xx = 0, yy = 0, xy = 0;
    for (int64_t i = 0; i < p.length(); ++i) {
      const double x = p.at(0, r, i) * scale1, y = p.at(1, r, i) * scale2;
      xx += x * x;
      yy += y * y;
      xy += x * y;
    }
    states[kPower1][r] = scale1;
    states[kPower2][r] = scale2;
    states[kSquares1][r] = xx;
    states[kSquares2][r] = yy;
    states[kProducts][r] = xy;
  }
}

inline void merge(int64_t rows, double* const* into, const double* const* from) {
  for (int64_t r = 0; r < rows; ++r) {
    const double s1 = std::min(into[kPower1][r], from[kPower1][r]), s2 = std::min(into[kPower2][r], from[kPower2][r]);
    const double a1 = s1 / into[kPower1][r], b1 = s1 / from[kPower1][r];
    const double a2 = s2 / into[kPower2][r], b2 = s2 / from[kPower2][r];
    into[kSquares1][r] = rescaled(into[kSquares1][r], a1, a1) + rescaled(from[kSquares1][r], b1, b1);
    into[kSquares2][r] = rescaled(into[kSquares2][r], a2, a2) + rescaled(from[kSquares2][r], b2, b2);
    into[kProducts][r] = rescaled(into[kProducts][r], a1, a2) + rescaled(from[kProducts][r], b1, b2);
    into[kPower1][r] = s1;
    into[kPower2][r] = s2;
  }
}

template <class C>
void finish(const void* op, int64_t rows, const double* const* states, double* const* results, C* const*) {
  const double eps = static_cast<const Floor*>(op)->eps;
  for (int64_t r = 0; r < rows; ++r) {
    const double power1 = states[kPower1][r], power2 = states[kPower2][r];
    const double root1 = std::sqrt(states[kSquares1][r]), root2 = std::sqrt(states[kSquares2][r]);
    results[1][r] = saved_norm(root1, power1);
    results[2][r] = saved_norm(root2, power2);
    // The division takes the scaled sums, so that nothing overflows.
    const double floor1 = eps * power1, floor2 = eps * power2;
    const double divisor1 = root1 <= floor1 ? floor1 : root1, divisor2 = root2 <= floor2 ? floor2 : root2;
    const double value = states[kProducts][r] / divisor1 / divisor2;
    const double above = value < -1 ? -1 : value, within = above > 1 ? 1 : above;  // NaN passes
    results[0][r] = ((root1 == 0) | (root2 == 0)) & (states[kProducts][r] == 0) ? 0 : within;  // NaN passes
  }
}

// ---- Backward: dx1 = g (x2/d2 - c x1/d1) / d1 with d = max(|x|, eps). The second term is 0 if |x1| <= eps. dx2
// likewise.

enum { kScale1, kRatio1, kCosine1, kScale2, kRatio2, kCosine2, kUpstream, kLive1, kLive2 };

template <class C>
void prepare(const void* op, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  constexpr double most = std::numeric_limits<double>::max();
  const double eps = static_cast<const Floor*>(op)->eps;
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double g = row_inputs[0][r], c = row_inputs[1][r], norm1 = row_inputs[2][r], norm2 = row_inputs[3][r];
    C scale, ratio;
    split_norm(norm1, eps, scale, ratio);
    parameters[kScale1][r] = scale;
    parameters[kRatio1][r] = ratio;
    parameters[kCosine1][r] = static_cast<C>(at_most(norm1, eps) ? 0.0 : c);
    split_norm(norm2, eps, scale, ratio);
    parameters[kScale2][r] = scale;
    parameters[kRatio2][r] = ratio;
    parameters[kCosine2][r] = static_cast<C>(at_most(norm2, eps) ? 0.0 : c);
    parameters[kUpstream][r] = static_cast<C>(g);
    // The gradient is 0 if the operand is zero, or if its norm is finite and the other operand is zero.
    parameters[kLive1][r] = (norm1 == 0) | ((norm2 == 0) & (norm1 <= most)) ? C(0) : C(1);
    parameters[kLive2][r] = (norm2 == 0) | ((norm1 == 0) & (norm2 <= most)) ? C(0) : C(1);
  }
}

// Returns the gradient of operand 1, with unit1 = x1 / d1, unit2 = x2 / d2 and scale ratio = 1 / d1.
template <class C>
inline C slope_of(C unit1, C unit2, C cosine, C upstream, C scale, C ratio) {
  return (unit2 - cosine * unit1) * upstream * ratio * scale;
}

template <class C>
void map_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  for (int64_t r = 0; r < p.height; ++r) {
    const auto of = [&](int parameter) { return parameters[parameter][r]; };
    const C scale[2] = {of(kScale1), of(kScale2)}, ratio[2] = {of(kRatio1), of(kRatio2)};
    const C cosine[2] = {of(kCosine1), of(kCosine2)}, upstream = of(kUpstream);
    for (int side = 0; side < 2; ++side) {
      if (!p.out[side]) continue;
      C* dx = p.out[side] + r * p.out_step[side];
      if (of(side ? kLive2 : kLive1) == 0) {
        std::fill_n(dx, p.width, C(0));
        continue;
      }
      const C *x = p.in[side] + r * p.step[side], *y = p.in[1 - side] + r * p.step[1 - side];
      const C s = scale[side], q = ratio[side], c = cosine[side], t = scale[1 - side], u = ratio[1 - side];
      for_blocks(p.width, [&](int64_t i) { dx[i] = slope_of(x[i] * s * q, y[i] * t * u, c, upstream, s, q); });
    }
  }
}

template <class C>
void map_columns(const void*, const Piece<C>& p, const C* const* parameters) {
  const C* upstream = parameters[kUpstream];
  for (int side = 0; side < 2; ++side) {
    if (!p.out[side]) continue;
    const C *s = parameters[side ? kScale2 : kScale1], *q = parameters[side ? kRatio2 : kRatio1];
    const C *t = parameters[side ? kScale1 : kScale2], *u = parameters[side ? kRatio1 : kRatio2];
    const C *c = parameters[side ? kCosine2 : kCosine1], *live = parameters[side ? kLive2 : kLive1];
    for (int64_t i = 0; i < p.height; ++i) {
      const C *x = p.in[side] + i * p.step[side], *y = p.in[1 - side] + i * p.step[1 - side];
      C* dx = p.out[side] + i * p.out_step[side];
      SAFEOPS_SIMD
      for (int64_t k = 0; k < p.width; ++k)
        dx[k] = select_or_zero(live[k] != 0,
                             slope_of(x[k] * s[k] * q[k], y[k] * t[k] * u[k], c[k], upstream[k], s[k], q[k]));
    }
  }
}

// ---- ops

template <class C>
void compare_rows(const Shape& shape, const View& x1, const View& x2, int64_t dim, double eps, const View& value,
                  const View& norm1, const View& norm2) {
  RowLoops<C> loops;
  loops.accumulate_rows = pick_width<&accumulate_rows<C, 64>, &accumulate_rows<C, 32>, &accumulate_rows<C, 16>>();
  loops.accumulate_columns = pick<&accumulate_columns<C>>();
  loops.find_lost = pick<&find_lost<C, kSquares1, kSquares2>>();
  loops.accumulate_carefully = pick<&accumulate_carefully<C>>();
  loops.merge = merge;
  loops.finish = pick<&finish<C>>();
  loops.states = 5;
  loops.start[kPower1] = loops.start[kPower2] = 1;
  const Floor op{eps};
  Rowwise<C> rows(shape, dim, shape.is(x1.ndim, x1.sizes) ? x1 : x2);
  rows.input(x1);
  rows.input(x2);
  rows.result(value, false);
  rows.result(norm1, true);
  rows.result(norm2, true);
  rows.run(loops, &op);
}

std::tuple<Tensor, Tensor, Tensor> cosine_similarity(const Tensor& x1, const Tensor& x2, int64_t dim,
                                                     const std::optional<double>& eps) {
  const View a(x1), b(x2);
  STD_TORCH_CHECK(a.is_floating() && b.is_floating(), "_cosine_similarity: operands must be floating point");
  const Shape shape = broadcast(a.shape(), b.shape()), per_row = row_shape(shape, dim, true);
  const DType type = wide(a.dtype, b.dtype);
  const Tensor value = empty(row_shape(shape, dim, false), type, x1);
  const Tensor norm1 = empty(per_row, DType::kDouble, x1), norm2 = empty(per_row, DType::kDouble, x1);
  const bool in_double = type == DType::kDouble;
  const auto run = in_double ? compare_rows<double> : compare_rows<float>;
  run(shape, a, b, dim, floor_of(eps, in_double), View(value), View(norm1), View(norm2));
  return {value, norm1, norm2};
}

template <class C>
void compare_rows_backward(const Shape& shape, const View& g, const View& x1, const View& x2, const View& value,
                           const View& norm1, const View& norm2, int64_t dim, double eps, const Tensor* d1,
                           const Tensor* d2) {
  RowLoops<C> loops;
  loops.prepare = pick<&prepare<C>>();
  loops.map_rows = pick<&map_rows<C>>();
  loops.map_columns = pick<&map_columns<C>>();
  const Floor op{eps};
  Rowwise<C> rows(shape, dim, shape.is(x1.ndim, x1.sizes) ? x1 : x2);
  rows.input(x1);
  rows.input(x2);
  rows.row_input(g, false);
  rows.row_input(value, false);
  rows.row_input(norm1, true);
  rows.row_input(norm2, true);
  rows.output(View(d1 ? *d1 : *d2), d1 != nullptr);
  rows.output(View(d2 ? *d2 : *d1), d2 != nullptr);
  rows.run(loops, &op);
}

// The caller sums the gradient of a broadcast operand, so that gradient has the dtype in which it is computed.
std::tuple<Tensor, Tensor> cosine_similarity_backward(const Tensor& grad, const Tensor& x1, const Tensor& x2,
                                                      const Tensor& value, const Tensor& norm1, const Tensor& norm2,
                                                      int64_t dim, const std::optional<double>& eps, bool need_x1,
                                                      bool need_x2) {
  const View g(grad), a(x1), b(x2);
  STD_TORCH_CHECK(g.is_floating() && a.is_floating() && b.is_floating(),
                  "_cosine_similarity_backward: operands must be floating point");
  const Shape shape = broadcast(a.shape(), b.shape());
  const DType type = wide(a.dtype, b.dtype);
  const bool in_double = type == DType::kDouble || g.dtype == DType::kDouble;
  const auto make = [&](bool needed, const Tensor& x, const View& view) {
    const DType dtype = shape.is(view.ndim, view.sizes) ? view.dtype : in_double ? DType::kDouble : DType::kFloat;
    return needed ? output_like(shape, dtype, x, view) : empty_vector(dtype, x);
  };
  const Tensor d1 = make(need_x1, x1, a), d2 = make(need_x2, x2, b);
  if (!need_x1 && !need_x2) return {d1, d2};
  const auto run = in_double ? compare_rows_backward<double> : compare_rows_backward<float>;
  run(shape, g, a, b, View(value), View(norm1), View(norm2), dim, floor_of(eps, type == DType::kDouble),
      need_x1 ? &d1 : nullptr, need_x2 ? &d2 : nullptr);
  return {d1, d2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_cosine_similarity", TORCH_BOX(&cosine_similarity));
  m.impl("_cosine_similarity_backward", TORCH_BOX(&cosine_similarity_backward));
}

}  // namespace safeops::cpu
