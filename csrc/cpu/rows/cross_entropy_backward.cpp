// dx_c = g ((k + 2 z L) p_c - e w_c - own part), p_c = exp(x_c - L), from the numbers L, k, e of each row. The own part
// is (1 - s) w_y of the row's class alone, or of probabilities (1 - s) w_c q_c; dq_c = g (1 - s) w_c (L - x_c).
// I/O: read x, of probabilities read them; write dx, dq.
#include "cpu/rows/cross_entropy.h"

namespace safeops::cpu {

namespace {

// Of a row: L in two parts, the largest logit and the rest; g (k + 2 z L) exp(-rest), g e, g (1 - s) w_y (of
// probabilities without w_y). All are 0 where dx is.
enum { kHigh = kFirstFree, kLow, kFactor, kEven, kOwn };

// The given numbers of a row. Those a call does not have stand for the place.
enum { kGivenPlace, kGivenGrad, kGivenHigh, kGivenLow, kGivenWeight, kGivenFactor, kGivenEven };

template <class C>
void prepare(const void* data, int64_t rows, const double* const* given, C* const* parameters) {
  constexpr C kLower = 1 / static_cast<C>(int64_t{1} << kLowest<C>);
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const bool weighted = op.row_weights, has_factor = op.has_factor, has_even = op.has_even;
  const double z = 2 * op.z, rest = 1 - op.smoothing;
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {  // (what a call does not have is read too: a branch would not be vectorised)
    const double high = given[kGivenHigh][r], l = high + given[kGivenLow][r], g = given[kGivenGrad][r];
    const double weight = select(weighted, given[kGivenWeight][r], 1.0);
    const double factor = select(has_factor, given[kGivenFactor][r], weight) + select_or_zero(z != 0, z * l);
    const C low = static_cast<C>(given[kGivenLow][r]);
    parameters[kHigh][r] = static_cast<C>(high);
    parameters[kLow][r] = low;
    parameters[kFactor][r] = static_cast<C>(g * factor) * (kLower * exp_(0 - low));
    parameters[kEven][r] = static_cast<C>(select_or_zero(has_even, g * given[kGivenEven][r]));
    parameters[kOwn][r] = static_cast<C>(g * (rest * weight));
  }
  for (int64_t r = 0; r < rows; ++r) {
    // +inf: the row's own logit, which alone is it. The loss is 0, and its gradient.
    const bool certain = given[kGivenHigh][r] == std::numeric_limits<double>::infinity();
    split_place(certain ? -1.0 : given[kGivenPlace][r], r, parameters);
  }
}

// p_c exp(rest), raised; the row's factor is lowered as far.
template <class C>
inline C share_of(C x, C high) {
  return exp_raised<kLowest<C>>(x - high);
}

// dq_c / (g (1 - s)). A class of -inf without a share does not exist.
template <class C>
inline C slope_of_share(C x, C q, C w, C high, C low) {
  return select((x == kNothing<C>) & (q * w == 0), C(0), w * ((high - x) + low));
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
    const C *x = p.in[0] + r * p.step[0], *q = op.shares ? p.in[1] + r * p.step[1] : nullptr;
    const C high = parameters[kHigh][r], low = parameters[kLow][r], own = parameters[kOwn][r];
    if (dq)
      for_blocks(n, [&](int64_t i) { dq[i] = own * slope_of_share(x[i], q[i], w ? w[i] : C(1), high, low); });
    if (!dx) continue;
    const C even = parameters[kEven][r];
    const C factor = parameters[kFactor][r];
    // What is written at once: for_blocks may come by twice.
    if (op.shares) {
      for_blocks(n, [&](int64_t i) {
        const C wi = w ? w[i] : C(1);
        const C minus = own * (q[i] * wi) + select_or_zero(x[i] != kNothing<C>, even * wi);
        dx[i] = factor * share_of(x[i], high) - minus;
      });
    } else if (op.has_even) {
      for_blocks(n, [&](int64_t i) {
        const C minus = select_or_zero(x[i] != kNothing<C>, w ? even * w[i] : even);
        dx[i] = factor * share_of(x[i], high) - minus;
      });
    } else {
      for_blocks(
          n, [&](int64_t i) { dx[i] = factor * share_of(x[i], high); }, [&](int64_t i) { p.prefetch(r * n + i); });
    }
    const int64_t at = place_of(parameters, r) - p.first;
    if (!op.shares && at >= 0 && at < n) dx[at] -= own;
  }
}

template <class C>
void map_columns(const void* data, const Piece<C>& p, const C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  const C *high = parameters[kHigh], *low = parameters[kLow], *even = parameters[kEven], *own = parameters[kOwn];
  const C *factor = parameters[kFactor], *live = parameters[kPlaceHigh];
  const int64_t n = p.width;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *x = p.in[0] + i * p.step[0], *q = op.shares ? p.in[1] + i * p.step[1] : nullptr;
    C* dx = p.out[0] ? p.out[0] + i * p.out_step[0] : nullptr;
    C* dq = p.out[1] ? p.out[1] + i * p.out_step[1] : nullptr;
    const C w = op.weights ? op.weights[p.first + i] : C(1);
    if (dq) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        dq[k] = select_or_zero(live[k] >= 0, own[k] * slope_of_share(x[k], q[k], w, high[k], low[k]));
    }
    if (!dx) continue;
    if (op.shares || op.has_even) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C share = q ? own[k] * (q[k] * w) : C(0);
        const C minus = share + select_or_zero(x[k] != kNothing<C>, even[k] * w);
        dx[k] = select_or_zero(live[k] >= 0, factor[k] * share_of(x[k], high[k]) - minus);
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        dx[k] = select_or_zero(live[k] >= 0, factor[k] * share_of(x[k], high[k]));
    }
  }
  if (op.shares || !p.out[0]) return;
  alignas(64) int32_t line[kChunk];
  own_lines(p, parameters, line);
  for (int64_t k = 0; k < n; ++k)
    p.out[0][std::max(line[k], 0) * p.out_step[0] + k] -= select_or_zero(line[k] >= 0, own[k]);
}

// ---- the op

template <class C>
void run(const ClassRows& rows, const View& g, const View& x, const View* shares, const View& numbers, double smoothing,
         double z, const View* dx, const View* dq) {
  const std::vector<C> weights = narrowed<C>(rows.weights);
  const CrossEntropy<C> op(shares != nullptr, rows.weighted ? weights.data() : nullptr, rows.weighted, smoothing, z);
  STD_TORCH_CHECK((numbers.dtype == DType::kFloat || numbers.dtype == DType::kDouble) && numbers.contiguous() &&
                      rows.with(op.numbers()).is(numbers.ndim, numbers.sizes),
                  "_cross_entropy_backward: numbers are not those of the forward");
  RowLoops<C> loops;
  loops.prepare = pick<&prepare<C>>();
  loops.map_rows = pick<&map_rows<C>>();
  loops.map_columns = pick<&map_columns<C>>();
  Rowwise<C> walk(x.shape(), rows.dim, x);
  walk.input(x);
  if (shares) walk.input(*shares);
  const RowNumbers<double> place(rows.shape, rows.place.get(), DType::kDouble);
  const RowNumbers<double> weight(rows.shape, rows.weight ? rows.weight.get() : rows.place.get(), DType::kDouble);
  const RowNumbers<char> high = numbers_at(rows, numbers, 0), low = numbers_at(rows, numbers, 1),
                         factor = numbers_at(rows, numbers, 1 + op.has_factor),
                         even = numbers_at(rows, numbers, op.numbers() - 1);
  walk.given(place.view(), false);
  walk.given(g, false);
  for (const View& number : {high.view(), low.view(), weight.view(), factor.view(), even.view()})
    walk.given(number, false);
  walk.output(dx ? *dx : x, dx != nullptr);
  walk.output(dq ? *dq : x, dq != nullptr);
  walk.run(loops, &op);
}

std::tuple<Tensor, Tensor> cross_entropy_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                  const Tensor& numbers, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& mask, int64_t ignore_index,
                                                  double smoothing, double z, bool need_input, bool need_target,
                                                  bool partial) {
  constexpr char kName[] = "_cross_entropy_backward";
  const View g(grad), x(input), t(target);
  ClassRows rows(kName, x);
  rows.partial = partial;
  const bool shares = t.is_floating();
  STD_TORCH_CHECK(g.is_floating() && rows.shape.is(g.ndim, g.sizes), kName,
                  ": grad must be floating, one for each row");
  STD_TORCH_CHECK(shares ? x.shape().is(t.ndim, t.sizes) : !need_target, kName,
                  ": probabilities must have input's shape");
  if (weight) rows.read_weights(kName, *weight);
  rows.read(kName, shares ? nullptr : &target, mask, ignore_index, false, nullptr);
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const Tensor dq = need_target ? output_like(x.shape(), t.dtype, target, t) : empty_vector(x.dtype, input);
  const View to_x(dx), to_q(dq);
  DType compute = wide(wide(x.dtype, g.dtype), shares ? t.dtype : x.dtype);
  if (weight) compute = wide(compute, View(*weight).dtype);
  (compute == DType::kDouble ? run<double> : run<float>)(rows, g, x, shares ? &t : nullptr, View(numbers), smoothing, z,
                                                         need_input ? &to_x : nullptr, need_target ? &to_q : nullptr);
  return {dx, dq};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_cross_entropy_backward", TORCH_BOX(&cross_entropy_backward)); }

}  // namespace safeops::cpu
