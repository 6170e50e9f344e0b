// The backward of the divergences: dx = g (q h - q sum q h) / T and dy = g (p f - p sum p f) / T, element by element.
// divergence.h defines f and h.
// I/O: read x and y; write the gradients that are wanted.
#include "cpu/divergences/divergence.h"

namespace safeops::cpu {

namespace {

template <class C>
void prepare(const void* data, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  const C scale = static_cast<const DivergenceOptions<C>*>(data)->scale;
  for (int i = 0; i <= kGrad; ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) parameters[i][r] = static_cast<C>(row_inputs[i][r]);
  }
  for (int64_t r = 0; r < rows; ++r) parameters[kGrad][r] *= scale;
}

// Returns the gradient with respect to one class of x (kOut = 0) or y (kOut = 1).
template <class Kind, int kOut, class C>
inline C slope(const DivergenceOptions<C>& op, C x, C y, const C (&row)[kGrad + 1]) {
  C p, q;
  const Terms<C> terms =
      terms_of<Kind>(op, x, y, row[kMaximumX], row[kLogTotalX], row[kMaximumY], row[kLogTotalY], p, q);
  const C value = kOut == 0 ? terms.of_x - select_or_zero(q != 0, q * row[kMeanX])
                            : terms.of_y - select_or_zero(p != 0, p * row[kMeanY]);
  return row[kGrad] * value;
}

template <class Kind, int kOut, class C>
void map_one(const Piece<C>& p, const DivergenceOptions<C>& op, const C* const* parameters) {
  if (!p.out[kOut]) return;
  C row[kGrad + 1];
  const auto read_row = [&](int64_t r) {
    for (int i = 0; i <= kGrad; ++i) row[i] = parameters[i][r];
  };
  if (!p.interleaved) {
    for (int64_t r = 0; r < p.height; ++r) {
      const C *x = p.in[0] + r * p.step[0], *y = p.in[1] + r * p.step[1];
      C* to = p.out[kOut] + r * p.out_step[kOut];
      if (parameters[kKept][r] == 0) {
        std::fill_n(to, p.width, C(0));
        continue;
      }
      read_row(r);
      for_blocks(
          p.width, [&](int64_t i) { to[i] = slope<Kind, kOut>(op, x[i], y[i], row); },
          [&](int64_t i) { p.prefetch(r * p.width + i); });
    }
    return;
  }
  for (int64_t i = 0; i < p.height; ++i) {
    const C *x = p.in[0] + i * p.step[0], *y = p.in[1] + i * p.step[1];
    C* to = p.out[kOut] + i * p.out_step[kOut];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k) {
      C own[kGrad + 1];
      for (int j = 0; j <= kGrad; ++j) own[j] = parameters[j][k];
      to[k] = select_or_zero(own[kKept] != 0, slope<Kind, kOut>(op, x[k], y[k], own));
    }
  }
}

template <class Kind, class C>
void map(const void* data, const Piece<C>& p, const C* const* parameters) {
  const auto& op = *static_cast<const DivergenceOptions<C>*>(data);
  map_one<Kind, 0>(p, op, parameters);
  map_one<Kind, 1>(p, op, parameters);
}

// ---- the op

template <class Kind, class C>
void run(const Pair& pair, const DivergenceOptions<C>& op, const View& grad, const View& row_stats,
         const Tensor* slopes,
         const bool* needed) {
  RowLoops<C> loops;
  loops.prepare = pick<&prepare<C>>();
  loops.map_rows = loops.map_columns = pick<&map<Kind, C>>();
  Rowwise<C> walk(pair.shape, -1, pair.x);
  walk.input(pair.x), walk.input(pair.y);
  for (int i = 0; i < kRowStatCount; ++i) walk.row_input(pair.number(row_stats, i).view(), false);
  const RowValues<const double> keep = pair.keep();
  walk.row_input(keep.view(), false);
  walk.row_input(grad, false);
  for (int i = 0; i < 2; ++i) walk.output(View(slopes[i]), needed[i]);
  walk.run(loops, &op);
}

template <class Kind>
std::tuple<Tensor, Tensor> divergence_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                               const Tensor& row_stats, const std::optional<Tensor>& keep,
                                               double temperature, double beta, bool need_input, bool need_target) {
  constexpr char kName[] = "divergence_backward";
  const Pair pair(kName, input, target, keep);
  const View g(grad), stats(row_stats);
  STD_TORCH_CHECK(g.is_floating() && pair.rows.is(g.ndim, g.sizes), kName,
                  ": grad must be floating, one for each row");
  pair.check_row_stats(kName, stats);
  const bool needed[] = {need_input, need_target};
  const auto make = [&](bool wanted, const Tensor& t, const View& view) {
    return wanted ? output_like(pair.shape, view.dtype, t, view) : empty_vector(view.dtype, t);
  };
  const Tensor slopes[] = {make(need_input, input, pair.x), make(need_target, target, pair.y)};
  if (wide(pair.dtype, g.dtype) == DType::kDouble) {
    run<Kind, double>(pair, {1 / temperature, beta}, g, stats, slopes, needed);
  } else {
    run<Kind, float>(pair, {static_cast<float>(1 / temperature), static_cast<float>(beta)}, g, stats, slopes, needed);
  }
  return {slopes[0], slopes[1]};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_kl_div_with_logits_backward", TORCH_BOX(&divergence_backward<Kl>));
  m.impl("_js_div_with_logits_backward", TORCH_BOX(&divergence_backward<Js>));
  m.impl("_tv_with_logits_backward", TORCH_BOX(&divergence_backward<Tv>));
}

}  // namespace safeops::cpu
