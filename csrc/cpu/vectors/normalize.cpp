// y = x / max(|x|, eps) for each row, where |x| is the row's norm. A zero row stays 0, with gradient 0.
// I/O: forward reads x and writes y; backward reads g, x and writes dx.
#include "cpu/vectors/norms.h"

namespace safeops::cpu {

namespace {

// ---- Forward. States: a power of two `scale`, and the sum of (x scale)^2. Parameters: the scale and ratio that
// split_divisor makes of the divisor.

enum { kPower, kSquares };
enum { kScale, kRatio, kFloored, kDot, kLive };

template <class C, int kBytes>
void accumulate_rows(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  using V = Vector<C, kBytes>;
  for (int64_t r = 0; r < p.height; ++r) {
    const C* x = p.in[0] + r * p.step[0];
    states[kPower][r] = 1;
    states[kSquares][r] = sum_run<kBytes, C>(p.width, [&](int64_t i, V& v) {
      load_vector(x + i, v);
      v *= v;
    });
  }
}

template <class C>
void accumulate_columns(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  alignas(64) C sum[kChunk];
  for (int64_t k = 0; k < p.width; ++k) sum[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C* x = p.in[0] + i * p.step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k) sum[k] += x[k] * x[k];
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < p.width; ++k) states[kPower][k] = 1, states[kSquares][k] = sum[k];
}

template <class C>
void accumulate_carefully(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  for (int64_t r = 0; r < p.rows(); ++r) {
    if (parameters[kRecompute][r] == 0) continue;
    const double scale = scale_of_row(p, 0, r);
    double sum = 0;
    for (int64_t i = 0; i < p.length(); ++i) {
      const double x = p.at(0, r, i) * scale;
      sum += x * x;
    }
    states[kPower][r] = scale;
    states[kSquares][r] = sum;
  }
}

inline void merge(int64_t rows, double* const* into, const double* const* from) {
  for (int64_t r = 0; r < rows; ++r) {
    const double scale = std::min(into[kPower][r], from[kPower][r]);
    const double a = scale / into[kPower][r], b = scale / from[kPower][r];
    into[kSquares][r] = rescaled(into[kSquares][r], a, a) + rescaled(from[kSquares][r], b, b);
    into[kPower][r] = scale;
  }
}

template <class C>
void finish(const void* op, int64_t rows, const double* const* states, double* const* results, C* const* parameters) {
  const double eps = static_cast<const Floor*>(op)->eps;
  for (int64_t r = 0; r < rows; ++r) {
    const double power = states[kPower][r], root = std::sqrt(states[kSquares][r]);
    const double norm = results[0][r] = saved_norm(root, power);
    C scale, ratio;
    split_norm(norm, eps, scale, ratio);
    parameters[kScale][r] = scale;
    parameters[kRatio][r] = norm == 0 ? C(0) : ratio;
  }
}

template <class C>
void map_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  for (int64_t r = 0; r < p.height; ++r) {
    const C* x = p.in[0] + r * p.step[0];
    C* y = p.out[0] + r * p.out_step[0];
    const C scale = parameters[kScale][r], ratio = parameters[kRatio][r];
    // y = x / max(|x|, eps)
    for_blocks(p.width, [&](int64_t i) { y[i] = x[i] * scale * ratio; });
  }
}

template <class C>
void map_columns(const void*, const Piece<C>& p, const C* const* parameters) {
  const C *scale = parameters[kScale], *ratio = parameters[kRatio];
  for (int64_t i = 0; i < p.height; ++i) {
    const C* x = p.in[0] + i * p.step[0];
    C* y = p.out[0] + i * p.out_step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k) y[k] = x[k] * scale[k] * ratio[k];
  }
}

// ---- Backward: dx = (g - y sum g y) / |x|. If |x| <= eps, y = x / eps, so dx = g / eps.

template <class C>
void prepare(const void* op, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  const double eps = static_cast<const Floor*>(op)->eps;
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double norm = row_inputs[0][r];
    C scale, ratio;
    split_norm(norm, eps, scale, ratio);
    parameters[kScale][r] = scale;
    parameters[kRatio][r] = ratio;
    parameters[kFloored][r] = at_most(norm, eps) ? C(1) : C(0);
    parameters[kLive][r] = norm == 0 ? C(0) : C(1);
  }
}

template <class C, int kBytes>
void accumulate_back_rows(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  for (int64_t r = 0; r < p.height; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    const C scale = parameters[kScale][r], ratio = parameters[kRatio][r];
    states[0][r] = sum_run<kBytes, C>(p.width, [&](int64_t i, V& v) {
      V upstream;
      load_vector(x + i, v);
      load_vector(g + i, upstream);
      v = upstream * (v * scale * ratio);
    });
  }
}

template <class C>
void accumulate_back_columns(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  alignas(64) C sum[kChunk];
  const C *scale = parameters[kScale], *ratio = parameters[kRatio];
  for (int64_t k = 0; k < p.width; ++k) sum[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k) sum[k] += g[k] * (x[k] * scale[k] * ratio[k]);
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < p.width; ++k) states[0][k] = sum[k];
}

inline void merge_back(int64_t rows, double* const* into, const double* const* from) {
  for (int64_t r = 0; r < rows; ++r) into[0][r] += from[0][r];
}

template <class C>
void finish_back(const void*, int64_t rows, const double* const* states, double* const*, C* const* parameters) {
  for (int64_t r = 0; r < rows; ++r)
    parameters[kDot][r] = parameters[kFloored][r] != 0 ? C(0) : static_cast<C>(states[0][r]);
}

// Returns dx = (g - y dot) / |x|, with y = x / |x| and dot = sum g y.
template <class C>
inline C slope_of(C g, C x, C scale, C ratio, C dot) {
  return (g - x * scale * ratio * dot) * ratio * scale;
}

template <class C>
void map_back_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  for (int64_t r = 0; r < p.height; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    C* dx = p.out[0] + r * p.out_step[0];
    const C scale = parameters[kScale][r], ratio = parameters[kRatio][r], dot = parameters[kDot][r];
    if (parameters[kLive][r] != 0)
      for_blocks(p.width, [&](int64_t i) { dx[i] = slope_of(g[i], x[i], scale, ratio, dot); });
    else
      std::fill_n(dx, p.width, C(0));
  }
}

template <class C>
void map_back_columns(const void*, const Piece<C>& p, const C* const* parameters) {
  const C *scale = parameters[kScale], *ratio = parameters[kRatio], *dot = parameters[kDot], *live = parameters[kLive];
  for (int64_t i = 0; i < p.height; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    C* dx = p.out[0] + i * p.out_step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k)
      dx[k] = select_or_zero(live[k] != 0, slope_of(g[k], x[k], scale[k], ratio[k], dot[k]));
  }
}

// ---- ops

template <class C>
void normalize_rows(const View& x, int64_t dim, double eps, const View& out, const View& norm) {
  RowLoops<C> loops;
  loops.accumulate_rows = pick_width<&accumulate_rows<C, 64>, &accumulate_rows<C, 32>, &accumulate_rows<C, 16>>();
  loops.accumulate_columns = pick<&accumulate_columns<C>>();
  loops.find_lost = pick<&find_lost<C, kSquares>>();
  loops.accumulate_carefully = pick<&accumulate_carefully<C>>();
  loops.merge = merge;
  loops.finish = pick<&finish<C>>();
  loops.map_rows = pick<&map_rows<C>>();
  loops.map_columns = pick<&map_columns<C>>();
  loops.states = 2;
  loops.start[kPower] = 1;
  const Floor op{eps};
  Rowwise<C> rows(x.shape(), dim, x);
  rows.input(x);
  rows.output(out);
  rows.result(norm, true);
  rows.run(loops, &op);
}

std::tuple<Tensor, Tensor> normalize(const Tensor& input, int64_t dim, const std::optional<double>& eps) {
  const View x(input);
  STD_TORCH_CHECK(x.is_floating(), "_normalize: input must be floating point");
  const Tensor out = output_like(x.shape(), x.dtype, input, x);
  const Tensor norm = empty(row_shape(x.shape(), dim, true), DType::kDouble, input);
  const bool in_double = x.dtype == DType::kDouble;
  const auto run = in_double ? normalize_rows<double> : normalize_rows<float>;
  run(x, dim, floor_of(eps, in_double), View(out), View(norm));
  return {out, norm};
}

template <class C>
void normalize_rows_backward(const View& g, const View& x, const View& norm, int64_t dim, double eps, const View& dx) {
  RowLoops<C> loops;
  loops.prepare = pick<&prepare<C>>();
  loops.accumulate_rows =
      pick_width<&accumulate_back_rows<C, 64>, &accumulate_back_rows<C, 32>, &accumulate_back_rows<C, 16>>();
  loops.accumulate_columns = pick<&accumulate_back_columns<C>>();
  loops.merge = merge_back;
  loops.finish = pick<&finish_back<C>>();
  loops.map_rows = pick<&map_back_rows<C>>();
  loops.map_columns = pick<&map_back_columns<C>>();
  loops.states = 1;
  const Floor op{eps};
  Rowwise<C> rows(x.shape(), dim, x);
  rows.input(g);
  rows.input(x);
  rows.row_input(norm, true);
  rows.output(dx);
  rows.run(loops, &op);
}

Tensor normalize_backward(const Tensor& grad, const Tensor& input, const Tensor& norm, int64_t dim,
                          const std::optional<double>& eps) {
  const View g(grad), x(input);
  STD_TORCH_CHECK(g.is_floating() && x.is_floating(), "_normalize_backward: operands must be floating point");
  const Tensor dx = output_like(x.shape(), x.dtype, input, x);
  const bool in_double = x.dtype == DType::kDouble || g.dtype == DType::kDouble;
  const auto run = in_double ? normalize_rows_backward<double> : normalize_rows_backward<float>;
  run(g, x, View(norm), dim, floor_of(eps, x.dtype == DType::kDouble), View(dx));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_normalize", TORCH_BOX(&normalize));
  m.impl("_normalize_backward", TORCH_BOX(&normalize_backward));
}

}  // namespace safeops::cpu
