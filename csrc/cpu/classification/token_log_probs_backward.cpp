// The backward of token_log_probs. With p_j = exp(x_j - L) and the upstream gradients a of the log probability, b of
// the entropy H, c of L:
//     dx_j = p_j (c - a - b (log p_j + H)) + a [j is the row's class]
// I/O: read x; write dx.
#include "cpu/classification/cross_entropy.h"

namespace safeops::cpu {

namespace {

// Parameters of a row. With log_total = L - largest logit they are, in this order: the largest logit; log_total - H; (c
// - a) exp(-log_total) / 2^kLowest; b exp(-log_total) / 2^kLowest; a.
enum { kMaximum = kFirstFree, kOffset, kFactor, kEntropy, kTarget };
enum { kInputClass, kInputLogProb, kInputEntropy, kInputSum, kInputMaximum, kInputLogTotal, kInputH };

template <class C>
void prepare(const void*, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  constexpr C kLower = 1 / static_cast<C>(int64_t{1} << kLowest<C>);
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double log_total = row_inputs[kInputLogTotal][r], a = row_inputs[kInputLogProb][r];
    const C by = kLower * exp_(0 - static_cast<C>(log_total));
    parameters[kMaximum][r] = static_cast<C>(row_inputs[kInputMaximum][r]);
    parameters[kOffset][r] = static_cast<C>(log_total - row_inputs[kInputH][r]);
    parameters[kFactor][r] = static_cast<C>(row_inputs[kInputSum][r] - a) * by;
    parameters[kEntropy][r] = static_cast<C>(row_inputs[kInputEntropy][r]) * by;
    parameters[kTarget][r] = static_cast<C>(a);
  }
  for (int64_t r = 0; r < rows; ++r) {
    // If the largest logit is +inf, only the row's class has it: the results do not depend on the logits.
    const bool certain = row_inputs[kInputMaximum][r] == std::numeric_limits<double>::infinity();
    split_class_index(certain ? -1.0 : row_inputs[kInputClass][r], r, parameters);
  }
}

// Returns dx_j without the term a [j is the row's class]. If p_j is 0, log p_j is -inf and left out.
template <class C>
inline C slope(C x, C maximum, C offset, C factor, C entropy) {
  const C above = x - maximum, p = exp_raised<kLowest<C>>(above);
  return p * (factor - select_or_zero(p != 0, entropy * (above - offset)));
}

template <class C>
void map_rows(const void* data, const Piece<C>& p, const C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    C* dx = p.out[0] + r * p.out_step[0];
    if (!is_kept(parameters, r)) {
      std::fill_n(dx, n, C(0));
      continue;
    }
    const C *x = p.in[0] + r * p.step[0], maximum = parameters[kMaximum][r], offset = parameters[kOffset][r];
    const C factor = parameters[kFactor][r], entropy = parameters[kEntropy][r];
    for_blocks(
        n, [&](int64_t i) { dx[i] = slope(x[i], maximum, offset, factor, entropy); },
        [&](int64_t i) { p.prefetch(r * n + i); });
    const int64_t at = class_index_of(parameters, r) - p.first;
    if (at >= 0 && at < n) dx[at] += parameters[kTarget][r];
    op.logits.differentiate(x, n, dx);
  }
}

template <class C>
void map_columns(const void* data, const Piece<C>& p, const C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const C *maximum = parameters[kMaximum], *offset = parameters[kOffset], *factor = parameters[kFactor],
      *entropy = parameters[kEntropy], *target = parameters[kTarget], *live = parameters[kClassHigh];
  const int64_t n = p.width;
  for (int64_t i = 0; i < p.height; ++i) {
    const C* x = p.in[0] + i * p.step[0];
    C* dx = p.out[0] + i * p.out_step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k)
      dx[k] = select_or_zero(live[k] >= 0, slope(x[k], maximum[k], offset[k], factor[k], entropy[k]));
  }
  alignas(64) int32_t line[kChunk];
  target_lines(p, parameters, line);
  for (int64_t k = 0; k < n; ++k)
    p.out[0][std::max(line[k], 0) * p.out_step[0] + k] += select_or_zero(line[k] >= 0, target[k]);
  differentiate_columns(op.logits, p, live);
}

// ---- the op

template <class C>
void run(const ClassRows& rows, const View& g, const View& x, const View& row_stats, double temperature,
         double softcap, const View& dx) {
  const CrossEntropy<C> op(false, nullptr, false, 0, 0, Logits<C>(temperature, softcap));
  RowLoops<C> loops;
  if (op.logits.changed) loops.read = pick<&read_logits<C>>();
  loops.prepare = pick<&prepare<C>>();
  loops.map_rows = pick<&map_rows<C>>();
  loops.map_columns = pick<&map_columns<C>>();
  Rowwise<C> walk(x.shape(), rows.dim, x);
  walk.input(x);
  const RowValues<double> class_index(rows.shape, rows.class_index.get(), DType::kDouble);
  walk.row_input(class_index.view(), false);
  View grad = g;  // (3, *rows), walked as three views of one number per row
  --grad.ndim, ++grad.sizes, ++grad.strides;
  for (int i = 0; i < 3; ++i, grad.data += g.strides[0] * size_of(g.dtype)) walk.row_input(grad, false);
  for (int i = 0; i < 3; ++i) walk.row_input(row_stat(rows, row_stats, i).view(), false);
  walk.output(dx);
  walk.run(loops, &op);
}

Tensor token_log_probs_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                const Tensor& row_stats, const std::optional<Tensor>& mask, int64_t ignore_index,
                                double temperature, double softcap, bool partial) {
  constexpr char kName[] = "_token_log_probs_backward";
  const View g(grad), x(input), stats(row_stats);
  ClassRows rows(kName, x);
  rows.partial = partial;
  STD_TORCH_CHECK(g.is_floating() && rows.with(3).is(g.ndim, g.sizes), kName,
                  ": grad must be floating, three for each row");
  STD_TORCH_CHECK((stats.dtype == DType::kFloat || stats.dtype == DType::kDouble) && stats.contiguous() &&
                      rows.with(3).is(stats.ndim, stats.sizes),
                  kName, ": row_stats are not those of the forward");
  rows.read(kName, &target, mask, ignore_index, false, nullptr);
  const Tensor dx = output_like(x.shape(), x.dtype, input, x);
  (wide(x.dtype, g.dtype) == DType::kDouble ? run<double> : run<float>)(rows, g, x, stats, temperature, softcap,
                                                                        View(dx));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_token_log_probs_backward", TORCH_BOX(&token_log_probs_backward));
}

}  // namespace safeops::cpu
