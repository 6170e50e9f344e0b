// max(|a - p| - |a - n| + margin, 0) for each row of anchors a, positives p and negatives n, and its gradients. With
// `swap`, |p - n| replaces |a - n| if it is less. A difference is x - y + eps, as in torch. Equal vectors have distance
// 0.
// I/O: forward reads a, p, n; backward reads them again and writes da, dp, dn.
#include "cpu/vectors/norms.h"

namespace safeops::cpu {

namespace {

constexpr int kFirst[] = {0, 0, 1}, kSecond[] = {1, 2, 2};  // the two inputs of each distance
enum { kNear, kFar, kApart };                               // the distances |a - p|, |a - n| and |p - n|

struct Op {
  double margin, eps;
  bool swap;
};

inline double smaller(double x, double y) { return (x < y) | (x != x) ? x : y; }  // NaN passes

inline double excess(const Op& op, double near, double far, double apart) {
  return near - (op.swap ? smaller(far, apart) : far) + op.margin;
}

// ---- Forward. States of each distance: a power of two by which its differences are multiplied; their sum of squares;
// a number that is > 0 if the two vectors certainly differ.

constexpr int power_of(int pair) { return 3 * pair; }
constexpr int squares_of(int pair) { return 3 * pair + 1; }
constexpr int differ_of(int pair) { return 3 * pair + 2; }

// Returns an upper bound of the sum of squares that n differences of equal vectors give: each is eps, before rounding.
inline double most_of_equal(const void* op, int64_t n) {
  const double eps = static_cast<const Op*>(op)->eps;
  return 1.001 * eps * eps * static_cast<double>(n);
}

template <class C>
void set_sum(const void* op, int64_t n, double sum, int64_t row, int pair, double* const* states) {
  states[power_of(pair)][row] = 1;
  states[squares_of(pair)][row] = sum;
  states[differ_of(pair)][row] = sum > most_of_equal(op, n);
}

template <class C, int kPairs, int kBytes>
void accumulate_rows(const void* op, const Piece<C>& p, const C* const*, double* const* states) {
  using V = Vector<C, kBytes>;
  const C eps = static_cast<C>(static_cast<const Op*>(op)->eps);
  for (int64_t r = 0; r < p.height; ++r)
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = kFirst[pair], j = kSecond[pair];
      const C *x = p.in[i] + r * p.step[i], *y = p.in[j] + r * p.step[j];
      const double sum = sum_run<kBytes, C>(p.width, [&](int64_t k, V& d) {
        V other;
        load_vector(x + k, d);
        load_vector(y + k, other);
        d = d - other + eps;
        d *= d;
      });
      set_sum<C>(op, p.width, sum, r, pair, states);
    }
}

template <class C, int kPairs>
void accumulate_columns(const void* op, const Piece<C>& p, const C* const*, double* const* states) {
  const C eps = static_cast<C>(static_cast<const Op*>(op)->eps);
  for (int pair = 0; pair < kPairs; ++pair) {
    alignas(64) C squares[kChunk];
    for (int64_t k = 0; k < p.width; ++k) squares[k] = 0;
    const int i = kFirst[pair], j = kSecond[pair];
    for (int64_t line = 0; line < p.height; ++line) {
      const C *x = p.in[i] + line * p.step[i], *y = p.in[j] + line * p.step[j];
      SAFEOPS_SIMD
      for (int64_t k = 0; k < p.width; ++k) {
        const C d = x[k] - y[k] + eps;
        squares[k] += d * d;
      }
    }
    for (int64_t k = 0; k < p.width; ++k) set_sum<C>(op, p.height, squares[k], k, pair, states);
  }
}

// RowLoops::find_lost. It also marks rows whose vectors may be equal (all differences eps); accumulate_carefully finds
// out.
template <class C, int kPairs>
bool find_unsure(int64_t rows, const double* const* states, C* recompute) {
  bool any = false;
  for (int64_t r = 0; r < rows; ++r) {
    bool unsure = false;
    for (int pair = 0; pair < kPairs; ++pair)
      unsure |= (states[differ_of(pair)][r] == 0) | squares_lost<C>(states[squares_of(pair)][r]);
    recompute[r] = unsure ? C(1) : C(0);
    any |= unsure;
  }
  return any;
}

template <class C, int kPairs>
void accumulate_carefully(const void* op, const Piece<C>& p, const C* const* parameters, double* const* states) {
  const double eps = static_cast<const Op*>(op)->eps;
  for (int64_t r = 0; r < p.rows(); ++r) {
    if (parameters[kRecompute][r] == 0) continue;
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto difference = [&](int64_t k) {
        return static_cast<double>(p.at(kFirst[pair], r, k)) - static_cast<double>(p.at(kSecond[pair], r, k));
      };
      double most = 0, sum = 0;
      bool differ = false;
      for (int64_t k = 0; k < p.length(); ++k) {
        const double d = difference(k), size = std::fabs(d + eps);
        differ |= !(d == 0);
        most = size > most ? size : most;
      }
      const double scale = scale_for(most);
      for (int64_t k = 0; k < p.length(); ++k) {
        const double d = (difference(k) + eps) * scale;
        sum += d * d;
      }
      states[power_of(pair)][r] = scale;
      states[squares_of(pair)][r] = sum;
      states[differ_of(pair)][r] = differ;
    }
  }
}

template <int kPairs>
void merge(int64_t rows, double* const* into, const double* const* from) {
  for (int pair = 0; pair < kPairs; ++pair) {
    double *power = into[power_of(pair)], *squares = into[squares_of(pair)], *differ = into[differ_of(pair)];
    for (int64_t r = 0; r < rows; ++r) {
      const double other = from[power_of(pair)][r], scale = std::min(power[r], other);
      squares[r] = rescaled(squares[r], scale / power[r], scale / power[r]) +
                   rescaled(from[squares_of(pair)][r], scale / other, scale / other);
      power[r] = scale;
      differ[r] += from[differ_of(pair)][r];
    }
  }
}

// Sets the results: the loss, and the distances.
template <int kPairs>
void finish(const void* data, int64_t rows, const double* const* states, double* const* results) {
  const Op& op = *static_cast<const Op*>(data);
  for (int64_t r = 0; r < rows; ++r) {
    double distance[3] = {};
    for (int pair = 0; pair < kPairs; ++pair) {
      const double norm = std::sqrt(states[squares_of(pair)][r]) / states[power_of(pair)][r];
      results[1 + pair][r] = distance[pair] = states[differ_of(pair)][r] == 0 ? 0 : norm;
    }
    const double d = excess(op, distance[kNear], distance[kFar], distance[kApart]);
    results[0][r] = d <= 0 ? 0 : d;  // NaN passes
  }
}

// ---- Backward: a distance has the derivative (x - y + eps) / distance, which a factor of the row multiplies. A scale
// of 0 makes it 0.

constexpr int factor_of(int pair) { return 3 * pair; }
constexpr int scale_of(int pair) { return 3 * pair + 1; }
constexpr int ratio_of(int pair) { return 3 * pair + 2; }

template <class C>
void prepare(const void* data, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  const Op& op = *static_cast<const Op*>(data);
  for (int64_t r = 0; r < rows; ++r) {
    const double near = row_inputs[1][r], far = row_inputs[2][r], apart = op.swap ? row_inputs[3][r] : 0;
    const double g = excess(op, near, far, apart) <= 0 ? 0 : row_inputs[0][r];
    double far_weight = 1;  // the smaller distance has weight 1; equal distances have 1/2 each, as in torch's minimum
    if (op.swap) far_weight = far == apart ? 0.5 : far > apart ? 0 : 1;
    const double apart_weight = !op.swap ? 0 : far == apart ? 0.5 : far < apart ? 0 : 1;
    const double distance[] = {near, far, apart}, weight[] = {1, -far_weight, -apart_weight};
    for (int pair = 0; pair < 3; ++pair) {
      const double norm = distance[pair], factor = g == 0 ? 0 : g * weight[pair];
      C &scale = parameters[scale_of(pair)][r], &ratio = parameters[ratio_of(pair)][r];
      parameters[factor_of(pair)][r] = static_cast<C>(factor);
      split_divisor(norm == 0 ? 1 : norm, scale, ratio);
      // A distance that is not finite keeps its slope, even if factor is 0: the gradient is NaN.
      if ((norm == 0) | ((factor == 0) & (norm <= std::numeric_limits<double>::max()))) scale = 0;
    }
  }
}

// Returns factor (x - y + eps) / distance; scale ratio = 1 / distance.
template <class C>
inline C slope_of(C x, C y, C eps, C factor, C scale, C ratio) {
  return select_or_zero(scale != 0, (x - y + eps) * scale * ratio * factor);
}

// A term of an operand's gradient, which is the sum of the slopes of two distances. x and y are the inputs of distance
// `pair`. first: true if the operand is x; if it is y, the slope has the opposite sign.
struct DistanceTerm {
  int pair, x, y;
  bool first;
};
constexpr DistanceTerm kTerms[3][2] = {{{kNear, 0, 1, true}, {kFar, 0, 2, true}},
                               {{kNear, 0, 1, false}, {kApart, 1, 2, true}},
                               {{kFar, 0, 2, false}, {kApart, 1, 2, false}}};

template <class C>
void map_rows(const void* op, const Piece<C>& p, const C* const* parameters) {
  const C eps = static_cast<C>(static_cast<const Op*>(op)->eps);
  for (int out = 0; out < 3; ++out) {
    if (!p.out[out]) continue;
    const DistanceTerm one = kTerms[out][0], two = kTerms[out][1];
    for (int64_t r = 0; r < p.height; ++r) {
      const auto parameter_of = [&](int parameter) { return parameters[parameter][r]; };
      const auto line = [&](int input) { return p.in[input] + r * p.step[input]; };
      C* to = p.out[out] + r * p.out_step[out];
      const C s = parameter_of(scale_of(one.pair)), q = parameter_of(ratio_of(one.pair));
      const C t = parameter_of(scale_of(two.pair)), u = parameter_of(ratio_of(two.pair));
      if ((s == 0) & (t == 0)) {
        std::fill_n(to, p.width, C(0));
        continue;
      }
      const C f = one.first ? parameter_of(factor_of(one.pair)) : -parameter_of(factor_of(one.pair));
      const C g = two.first ? parameter_of(factor_of(two.pair)) : -parameter_of(factor_of(two.pair));
      const C *x = line(one.x), *y = line(one.y), *v = line(two.x), *w = line(two.y);
      for_blocks(p.width, [&](int64_t k) {
        to[k] = slope_of(x[k], y[k], eps, f, s, q) + slope_of(v[k], w[k], eps, g, t, u);
      });
    }
  }
}

template <class C>
void map_columns(const void* op, const Piece<C>& p, const C* const* parameters) {
  const C eps = static_cast<C>(static_cast<const Op*>(op)->eps);
  for (int out = 0; out < 3; ++out) {
    if (!p.out[out]) continue;
    const DistanceTerm one = kTerms[out][0], two = kTerms[out][1];
    const C *f = parameters[factor_of(one.pair)], *g = parameters[factor_of(two.pair)];
    const C *s = parameters[scale_of(one.pair)], *q = parameters[ratio_of(one.pair)];
    const C *t = parameters[scale_of(two.pair)], *u = parameters[ratio_of(two.pair)];
    const C sign = one.first ? C(1) : C(-1), other = two.first ? C(1) : C(-1);
    for (int64_t i = 0; i < p.height; ++i) {
      const auto line = [&](int input) { return p.in[input] + i * p.step[input]; };
      const C *x = line(one.x), *y = line(one.y), *v = line(two.x), *w = line(two.y);
      C* to = p.out[out] + i * p.out_step[out];
      SAFEOPS_SIMD
      for (int64_t k = 0; k < p.width; ++k)
        to[k] = slope_of(x[k], y[k], eps, sign * f[k], s[k], q[k]) +
                slope_of(v[k], w[k], eps, other * g[k], t[k], u[k]);
    }
  }
}

// ---- ops

struct Vectors {
  View views[3];
  Shape shape, rows;
  DType type;

  Vectors(const Tensor& a, const Tensor& p, const Tensor& n, const char* name)
      : views{View(a), View(p), View(n)}, shape(views[0].shape()), rows(row_shape(shape, -1, false)) {
    type = wide(views[0].dtype, views[1].dtype);
    if (views[2].dtype == DType::kDouble) type = DType::kDouble;
    for (const View& x : views)
      STD_TORCH_CHECK(x.is_floating() && shape.ndim > 0 && shape.is(x.ndim, x.sizes), name,
                      ": operands must be floating, of one shape (..., D)");
  }
};

template <class C, int kPairs>
void compare(const Vectors& x, const Op& op, const View& loss, const View* distances) {
  RowLoops<C> loops;
  loops.accumulate_rows =
      pick_width<&accumulate_rows<C, kPairs, 64>, &accumulate_rows<C, kPairs, 32>, &accumulate_rows<C, kPairs, 16>>();
  loops.accumulate_columns = pick<&accumulate_columns<C, kPairs>>();
  loops.find_lost = pick<&find_unsure<C, kPairs>>();
  loops.accumulate_carefully = pick<&accumulate_carefully<C, kPairs>>();
  loops.merge = merge<kPairs>;
  loops.finish = [](const void* data, int64_t rows, const double* const* states, double* const* results, C* const*) {
    finish<kPairs>(data, rows, states, results);
  };
  loops.states = 3 * kPairs;
  for (int pair = 0; pair < kPairs; ++pair) loops.start[power_of(pair)] = 1;
  Rowwise<C> rows(x.shape, -1, x.views[0]);
  for (const View& vectors : x.views) rows.input(vectors);
  rows.result(loss, false);
  for (int pair = 0; pair < kPairs; ++pair) rows.result(distances[pair], false);
  rows.run(loops, &op);
}

// Returns (loss, near, far, apart): the loss of each row, and the distances for the backward; all are 0 for rows that
// are not kept.
std::tuple<Tensor, Tensor, Tensor, Tensor> triplet_margin_loss(
    const Tensor& anchor, const Tensor& positive, const Tensor& negative, const std::optional<Tensor>& keep,
    double margin, double p, double eps, bool swap) {
  STD_TORCH_CHECK(p == 2, "_triplet_margin_loss: the kernel has p = 2 alone");
  const Vectors x(anchor, positive, negative, "_triplet_margin_loss");
  const Tensor loss = empty(x.rows, x.type, anchor);
  const Tensor none = empty_vector(DType::kDouble, anchor);
  const Tensor near = empty(x.rows, DType::kDouble, anchor), far = empty(x.rows, DType::kDouble, anchor);
  const Tensor apart = swap ? empty(x.rows, DType::kDouble, anchor) : none;
  const View results[] = {View(near), View(far), View(apart)}, losses(loss);
  const Op op{margin, eps, swap};
  const bool in_double = x.type == DType::kDouble;
  const auto run = in_double ? (swap ? compare<double, 3> : compare<double, 2>)
                             : (swap ? compare<float, 3> : compare<float, 2>);
  run(x, op, losses, results);
  if (keep) {
    const View mask(*keep);
    STD_TORCH_CHECK(mask.dtype == DType::kBool && mask.contiguous() && x.rows.is(mask.ndim, mask.sizes),
                    "_triplet_margin_loss: keep must be a contiguous bool for each row");
    const auto* kept = reinterpret_cast<const uint8_t*>(mask.data);
    for (int64_t r = 0, n = x.rows.numel(); r < n; ++r) {
      if (kept[r]) continue;
      if (in_double) reinterpret_cast<double*>(losses.data)[r] = 0;
      else reinterpret_cast<float*>(losses.data)[r] = 0;
      for (int pair = 0; pair < (swap ? 3 : 2); ++pair) reinterpret_cast<double*>(results[pair].data)[r] = 0;
    }
  }
  return {loss, near, far, apart};
}

template <class C>
void differentiate(const Vectors& x, const Op& op, const View& grad, const View* distances, const Tensor* slopes,
                   const bool* needed) {
  RowLoops<C> loops;
  loops.prepare = pick<&prepare<C>>();
  loops.map_rows = pick<&map_rows<C>>();
  loops.map_columns = pick<&map_columns<C>>();
  Rowwise<C> rows(x.shape, -1, x.views[0]);
  for (const View& vectors : x.views) rows.input(vectors);
  rows.row_input(grad, false);
  for (int pair = 0; pair < (op.swap ? 3 : 2); ++pair) rows.row_input(distances[pair], false);
  for (int i = 0; i < 3; ++i) rows.output(View(slopes[i]), needed[i]);
  rows.run(loops, &op);
}

std::tuple<Tensor, Tensor, Tensor> triplet_margin_loss_backward(
    const Tensor& grad, const Tensor& anchor, const Tensor& positive, const Tensor& negative, const Tensor& near,
    const Tensor& far, const Tensor& apart, double margin, double eps, bool swap, bool need_anchor, bool need_positive,
    bool need_negative) {
  const Vectors x(anchor, positive, negative, "_triplet_margin_loss_backward");
  const View g(grad), distances[] = {View(near), View(far), View(apart)};
  STD_TORCH_CHECK(g.is_floating() && x.rows.is(g.ndim, g.sizes),
                  "_triplet_margin_loss_backward: grad must be floating, one for each row");
  for (int pair = 0; pair < (swap ? 3 : 2); ++pair)
    STD_TORCH_CHECK(distances[pair].dtype == DType::kDouble && x.rows.is(distances[pair].ndim, distances[pair].sizes),
                    "_triplet_margin_loss_backward: distances must be float64, one for each row");
  const bool needed[] = {need_anchor, need_positive, need_negative};
  const Tensor* operands[] = {&anchor, &positive, &negative};
  const auto make = [&](int i) {
    return needed[i] ? output_like(x.shape, x.views[i].dtype, *operands[i], x.views[i])
                     : empty_vector(x.views[i].dtype, *operands[i]);
  };
  const Tensor slopes[] = {make(0), make(1), make(2)};
  const bool in_double = x.type == DType::kDouble || g.dtype == DType::kDouble;
  (in_double ? differentiate<double> : differentiate<float>)(x, {margin, eps, swap}, g, distances, slopes, needed);
  return {slopes[0], slopes[1], slopes[2]};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_triplet_margin_loss", TORCH_BOX(&triplet_margin_loss));
  m.impl("_triplet_margin_loss_backward", TORCH_BOX(&triplet_margin_loss_backward));
}

}  // namespace safeops::cpu
