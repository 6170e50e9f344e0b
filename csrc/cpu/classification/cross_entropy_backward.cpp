// The backward of cross entropy (cross_entropy.h). With p_c = exp(x_c - L), e = s / A and W = sum_c w_c, d/dx_c of
//     (1) (1 - s) w_y (L - x_y)      is (1 - s) w_y (p_c - [c = y])
//     (2) e sum_c w_c (L - x_c)      is e (W p_c - w_c), and 0 where x_c is -inf
//     (3) z L^2                      is 2 z L p_c
// so dx_c = g ((k + 2 z L) p_c - e w_c - t_c), with k = (1 - s) w_y + e W and t_c = (1 - s) w_y [c = y]. For
// probabilities sum_c w_c q_c takes the place of w_y in k, t_c = (1 - s) w_c q_c, and dq_c = g (1 - s) w_c (L - x_c).
// row_stats has L, k (factor) and e (uniform).
// I/O: read x, and q if there are probabilities; write dx, dq.
#include "cpu/classification/cross_entropy.h"

namespace safeops::cpu {

namespace {

// Parameters of a row, from kMaximum on: the largest logit; log_total = L - largest logit; g (k + 2 z L)
// exp(-log_total) / 2^kLowest; g e; g (1 - s) w_y, or g (1 - s) for probabilities.
enum { kMaximum = kFirstFree, kLogTotal, kFactor, kUniform, kTarget };

// Inputs of a row. If a call lacks an input, another input is passed in its place, and not used.
enum { kInputClass, kInputGrad, kInputMaximum, kInputLogTotal, kInputWeight, kInputFactor, kInputUniform };

template <class C>
void prepare(const void* data, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  constexpr C kLower = 1 / static_cast<C>(int64_t{1} << kLowest<C>);
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const bool weighted = op.row_weights, has_factor = op.has_factor, has_uniform = op.has_uniform;
  const double z = 2 * op.z, confidence = 1 - op.smoothing;
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {  // inputs that are not used are read too: a branch would not be vectorised
    const double maximum = row_inputs[kInputMaximum][r], l = maximum + row_inputs[kInputLogTotal][r];
    const double g = row_inputs[kInputGrad][r];
    const double weight = select(weighted, row_inputs[kInputWeight][r], 1.0);
    const double factor = select(has_factor, row_inputs[kInputFactor][r], weight) + select_or_zero(z != 0, z * l);
    const C log_total = static_cast<C>(row_inputs[kInputLogTotal][r]);
    parameters[kMaximum][r] = static_cast<C>(maximum);
    parameters[kLogTotal][r] = log_total;
    parameters[kFactor][r] = static_cast<C>(g * factor) * (kLower * exp_(0 - log_total));
    parameters[kUniform][r] = static_cast<C>(select_or_zero(has_uniform, g * row_inputs[kInputUniform][r]));
    parameters[kTarget][r] = static_cast<C>(g * (confidence * weight));
  }
  for (int64_t r = 0; r < rows; ++r) {
    // If the largest logit is +inf, only the target has it (else the forward made it NaN): loss and gradient are 0.
    const bool certain = row_inputs[kInputMaximum][r] == std::numeric_limits<double>::infinity();
    split_class_index(certain ? -1.0 : row_inputs[kInputClass][r], r, parameters);
  }
}

// Returns 2^kLowest p_c exp(log_total). Its product with the parameter kFactor is g (k + 2 z L) p_c.
template <class C>
inline C probability_of(C x, C maximum) {
  return exp_raised<kLowest<C>>(x - maximum);
}

// Returns dq_c / (g (1 - s)) = w_c (L - x_c), or 0 for a class with logit -inf and w_c q_c = 0.
template <class C>
inline C probability_slope(C x, C q, C w, C maximum, C log_total) {
  return select((x == kMinusInfinity<C>) & (q * w == 0), C(0), w * ((maximum - x) + log_total));
}

template <class C>
void map_rows(const void* data, const Piece<C>& p, const C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const C* w = op.weights ? op.weights + p.first : nullptr;
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    C* dx = p.out[0] ? p.out[0] + r * p.out_step[0] : nullptr;
    C* dq = p.out[1] ? p.out[1] + r * p.out_step[1] : nullptr;
    if (!is_kept(parameters, r)) {
      if (dx) std::fill_n(dx, n, C(0));
      if (dq) std::fill_n(dq, n, C(0));
      continue;
    }
    const C *x = p.in[0] + r * p.step[0], *q = op.has_probabilities ? p.in[1] + r * p.step[1] : nullptr;
    const C maximum = parameters[kMaximum][r], log_total = parameters[kLogTotal][r], target = parameters[kTarget][r];
    if (dq)
      for_blocks(n, [&](int64_t i) {
        dq[i] = target * probability_slope(x[i], q[i], w ? w[i] : C(1), maximum, log_total);
      });
    if (!dx) continue;
    const C uniform = parameters[kUniform][r];
    // dx = g (k + 2 z L) p - uniform term - target term
    const C factor = parameters[kFactor][r];
    // dx[i] is set, and never updated: for_blocks may compute an element twice.
    if (op.has_probabilities) {
      for_blocks(n, [&](int64_t i) {
        const C wi = w ? w[i] : C(1);
        const C minus = target * (q[i] * wi) + select_or_zero(x[i] != kMinusInfinity<C>, uniform * wi);
        dx[i] = factor * probability_of(x[i], maximum) - minus;
      });
    } else if (op.has_uniform) {
      for_blocks(n, [&](int64_t i) {
        const C minus = select_or_zero(x[i] != kMinusInfinity<C>, w ? uniform * w[i] : uniform);
        dx[i] = factor * probability_of(x[i], maximum) - minus;
      });
    } else {
      for_blocks(
          n, [&](int64_t i) { dx[i] = factor * probability_of(x[i], maximum); },
          [&](int64_t i) { p.prefetch(r * n + i); });
    }
    const int64_t at = class_index_of(parameters, r) - p.first;
    if (!op.has_probabilities && at >= 0 && at < n) dx[at] -= target;
    op.logits.differentiate(x, n, dx);
  }
}

template <class C>
void map_columns(const void* data, const Piece<C>& p, const C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const C *maximum = parameters[kMaximum], *log_total = parameters[kLogTotal], *uniform = parameters[kUniform],
      *target = parameters[kTarget];
  const C *factor = parameters[kFactor], *live = parameters[kClassHigh];
  const int64_t n = p.width;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *x = p.in[0] + i * p.step[0], *q = op.has_probabilities ? p.in[1] + i * p.step[1] : nullptr;
    C* dx = p.out[0] ? p.out[0] + i * p.out_step[0] : nullptr;
    C* dq = p.out[1] ? p.out[1] + i * p.out_step[1] : nullptr;
    const C w = op.weights ? op.weights[p.first + i] : C(1);
    if (dq) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        dq[k] = select_or_zero(live[k] >= 0, target[k] * probability_slope(x[k], q[k], w, maximum[k], log_total[k]));
    }
    if (!dx) continue;
    if (op.has_probabilities || op.has_uniform) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C target_term = q ? target[k] * (q[k] * w) : C(0);
        const C minus = target_term + select_or_zero(x[k] != kMinusInfinity<C>, uniform[k] * w);
        dx[k] = select_or_zero(live[k] >= 0, factor[k] * probability_of(x[k], maximum[k]) - minus);
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        dx[k] = select_or_zero(live[k] >= 0, factor[k] * probability_of(x[k], maximum[k]));
    }
  }
  if (!p.out[0]) return;
  if (!op.has_probabilities) {
    alignas(64) int32_t line[kChunk];
    target_lines(p, parameters, line);
    for (int64_t k = 0; k < n; ++k)
      p.out[0][std::max(line[k], 0) * p.out_step[0] + k] -= select_or_zero(line[k] >= 0, target[k]);
  }
  differentiate_columns(op.logits, p, live);
}

// ---- the op

template <class C>
void run(const ClassRows& rows, const View& g, const View& x, const View* probabilities, const View& row_stats,
         double smoothing, double z, double temperature, double softcap, const View* dx, const View* dq) {
  const std::vector<C> weights = narrowed<C>(rows.weights);
  const CrossEntropy<C> op(probabilities != nullptr, rows.weighted ? weights.data() : nullptr, rows.weighted,
                           smoothing, z, Logits<C>(temperature, softcap));
  STD_TORCH_CHECK((row_stats.dtype == DType::kFloat || row_stats.dtype == DType::kDouble) && row_stats.contiguous() &&
                      rows.with(op.stats_count()).is(row_stats.ndim, row_stats.sizes),
                  "_cross_entropy_backward: row_stats are not those of the forward");
  RowLoops<C> loops;
  if (op.logits.changed) loops.read = pick<&read_logits<C>>();
  loops.prepare = pick<&prepare<C>>();
  loops.map_rows = pick<&map_rows<C>>();
  loops.map_columns = pick<&map_columns<C>>();
  Rowwise<C> walk(x.shape(), rows.dim, x);
  walk.input(x);
  if (probabilities) walk.input(*probabilities);
  const RowValues<double> class_index(rows.shape, rows.class_index.get(), DType::kDouble);
  const RowValues<double> weight(rows.shape, rows.weight ? rows.weight.get() : rows.class_index.get(), DType::kDouble);
  const RowValues<char> maximum = row_stat(rows, row_stats, 0), log_total = row_stat(rows, row_stats, 1),
                         factor = row_stat(rows, row_stats, 1 + op.has_factor),
                         uniform = row_stat(rows, row_stats, op.stats_count() - 1);
  walk.row_input(class_index.view(), false);
  walk.row_input(g, false);
  for (const View& row_stat_view : {maximum.view(), log_total.view(), weight.view(), factor.view(), uniform.view()})
    walk.row_input(row_stat_view, false);
  walk.output(dx ? *dx : x, dx != nullptr);
  walk.output(dq ? *dq : x, dq != nullptr);
  walk.run(loops, &op);
}

std::tuple<Tensor, Tensor> cross_entropy_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                  const Tensor& row_stats, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& mask, int64_t ignore_index,
                                                  double smoothing, double z, double temperature, double softcap,
                                                  bool need_input, bool need_target, bool partial) {
  constexpr char kName[] = "_cross_entropy_backward";
  const View g(grad), x(input), t(target);
  ClassRows rows(kName, x);
  rows.partial = partial;
  const bool has_probabilities = t.is_floating();
  STD_TORCH_CHECK(g.is_floating() && rows.shape.is(g.ndim, g.sizes), kName,
                  ": grad must be floating, one for each row");
  STD_TORCH_CHECK(has_probabilities ? x.shape().is(t.ndim, t.sizes) : !need_target, kName,
                  ": probabilities must have input's shape");
  if (weight) rows.read_weights(kName, *weight);
  rows.read(kName, has_probabilities ? nullptr : &target, mask, ignore_index, false, nullptr);
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const Tensor dq = need_target ? output_like(x.shape(), t.dtype, target, t) : empty_vector(x.dtype, input);
  const View to_x(dx), to_q(dq);
  DType compute = wide(wide(x.dtype, g.dtype), has_probabilities ? t.dtype : x.dtype);
  if (weight) compute = wide(compute, View(*weight).dtype);
  (compute == DType::kDouble ? run<double> : run<float>)(rows, g, x, has_probabilities ? &t : nullptr, View(row_stats),
                                                         smoothing, z, temperature, softcap,
                                                         need_input ? &to_x : nullptr, need_target ? &to_q : nullptr);
  return {dx, dq};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_cross_entropy_backward", TORCH_BOX(&cross_entropy_backward)); }

}  // namespace safeops::cpu
