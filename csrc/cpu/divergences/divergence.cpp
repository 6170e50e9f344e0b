// kl_div_with_logits, js_div_with_logits and tv_with_logits: divergences of the distributions of two rows of logits.
// I/O: read x and y (twice for js and tv, whose terms need the sums of whole rows first); for each row write the
// divergence and the row_stats for its backward.
#include "cpu/divergences/divergence.h"

namespace safeops::cpu {

Pair::Pair(const char* name, const Tensor& input, const Tensor& target, const std::optional<Tensor>& keep)
    : x(input), y(target), shape(x.shape()), rows(shape), dtype(wide(x.dtype, y.dtype)) {
  STD_TORCH_CHECK(x.is_floating() && y.is_floating() && x.ndim > 0 && shape.is(y.ndim, y.sizes), name,
                  ": input and target must be floating, of one shape, with a dim of classes");
  --rows.ndim;
  kept.assign(std::max<int64_t>(1, rows.numel()), 1);
  if (!keep) return;
  const View mask(*keep);
  STD_TORCH_CHECK(mask.dtype == DType::kBool && mask.contiguous() && rows.is(mask.ndim, mask.sizes), name,
                  ": keep must be a contiguous bool for each row");
  std::copy_n(reinterpret_cast<const uint8_t*>(mask.data), rows.numel(), kept.data());
}

Shape Pair::row_stats_shape() const {
  Shape out;
  out.size[out.ndim++] = kRowStatCount;
  for (int d = 0; d < rows.ndim; ++d) out.size[out.ndim++] = rows.size[d];
  return out;
}

void Pair::check_row_stats(const char* name, const View& row_stats) const {
  STD_TORCH_CHECK(row_stats.dtype == dtype && row_stats.contiguous() &&
                      row_stats_shape().is(row_stats.ndim, row_stats.sizes),
                  name, ": row_stats are not those of the forward");
}

namespace {

// ---- First pass. States: max x and sum exp((x - max x) / T); likewise of y; for Kl also kCross = sum exp((y - max y)
// / T) ((y - max y) - (x - max x)).

// kScale: 1 / T, which merge_sums needs.
enum { kTotalX = kMaximumX + 1, kTotalY = kMaximumY + 1, kCross, kScale, kSumStates };

template <class C>
void prepare_kept(const void*, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  for (int64_t r = 0; r < rows; ++r) parameters[kKept][r] = static_cast<C>(row_inputs[0][r]);
}

template <class Kind, class C, int kBytes>
void sum_rows(const void* data, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  const C scale = static_cast<const DivergenceOptions<C>*>(data)->scale;
  alignas(64) C terms[kBuffer], cross[kBuffer];
  const int64_t n = p.width;
  const auto sum = [&](const C* values) {
    return sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(values + i, v); });
  };
  const auto sum_scaled = [&](const C* values, C pivot, int64_t first) {
    return sum_run<kBytes, C>(n, [&](int64_t i, V& v) {
      p.prefetch(first + i);
      load_vector(values + i, v);
      v = exp_term((v - pivot) * scale);
    });
  };
  for (int64_t r = 0; r < p.height; ++r) {
    for (int i = 0; i < kSumStates; ++i) states[i][r] = 0;
    states[kScale][r] = scale;
    if (parameters[kKept][r] == 0) continue;
    const C *x = p.in[0] + r * p.step[0], *y = p.in[1] + r * p.step[1];
    states[kMaximumX][r] = max_run<kBytes>(x, n);
    states[kMaximumY][r] = max_run<kBytes>(y, n);
    const C pivot_x = pivot_of(static_cast<C>(states[kMaximumX][r]));
    const C pivot_y = pivot_of(static_cast<C>(states[kMaximumY][r]));
    states[kTotalX][r] = sum_scaled(x, pivot_x, r * n);
    if (!Kind::one_pass) {
      states[kTotalY][r] = sum_scaled(y, pivot_y, r * n);
      continue;
    }
    for_blocks(n, [&](int64_t i) {
      terms[i] = exp_term((y[i] - pivot_y) * scale);
      cross[i] = select_or_zero(terms[i] != 0, terms[i] * ((y[i] - pivot_y) - (x[i] - pivot_x)));
    });
    states[kTotalY][r] = sum(terms);
    states[kCross][r] = sum(cross);
  }
}

template <class Kind, class C>
void sum_columns(const void* data, const Piece<C>& p, const C* const*, double* const* states) {
  const C scale = static_cast<const DivergenceOptions<C>*>(data)->scale;
  alignas(64) C pivots[2][kChunk], totals[2][kChunk], cross[kChunk];
  const int64_t n = p.width;
  for (int j = 0; j < 2; ++j) {
    C *pivot = pivots[j], *total = totals[j];
    for (int64_t k = 0; k < n; ++k) pivot[k] = p.in[j][k];
    for (int64_t i = 1; i < p.height; ++i) {
      const C* line = p.in[j] + i * p.step[j];
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) pivot[k] = line[k] > pivot[k] ? line[k] : pivot[k];
    }
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      states[j == 0 ? kMaximumX : kMaximumY][k] = pivot[k];
      pivot[k] = pivot_of(pivot[k]);
      total[k] = 0;
    }
    for (int64_t i = 0; i < p.height; ++i) {
      const C* line = p.in[j] + i * p.step[j];
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) total[k] += exp_term((line[k] - pivot[k]) * scale);
    }
    for (int64_t k = 0; k < n; ++k) states[j == 0 ? kTotalX : kTotalY][k] = total[k];
  }
  for (int64_t k = 0; k < n; ++k) cross[k] = 0;
  for (int64_t i = 0; i < p.height && Kind::one_pass; ++i) {
    const C *x = p.in[0] + i * p.step[0], *y = p.in[1] + i * p.step[1];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      const C above = y[k] - pivots[1][k], e = exp_term(above * scale);
      cross[k] += select_or_zero(e != 0, e * (above - (x[k] - pivots[0][k])));
    }
  }
  for (int64_t k = 0; k < n; ++k) states[kCross][k] = cross[k], states[kScale][k] = scale;
}

// Returns maximum - most, which turns a difference x - maximum into x - most when it is added. Returns 0 if both are
// equal, even if they are infinite.
inline double raised(double maximum, double most) { return select_or_zero(maximum != most, maximum - most); }

template <class C>
void merge_sums(int64_t rows, double* const* into, const double* const* from) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double most_x = std::max(into[kMaximumX][r], from[kMaximumX][r]);
    const double most_y = std::max(into[kMaximumY][r], from[kMaximumY][r]);
    const auto moved = [&](const double* const* s) {
      const double by = raised(s[kMaximumY][r], most_y) - raised(s[kMaximumX][r], most_x);
      return s[kCross][r] + select_or_zero(s[kTotalY][r] != 0, s[kTotalY][r] * by);
    };
    const double cross_into = moved(into), cross_from = moved(from);
    const auto shrink = [&](double maximum, double most) {
      return exp_nonpositive(static_cast<C>(raised(maximum, most) * into[kScale][r]));
    };
    const double y_into = shrink(into[kMaximumY][r], most_y), y_from = shrink(from[kMaximumY][r], most_y);
    const double x_into = shrink(into[kMaximumX][r], most_x), x_from = shrink(from[kMaximumX][r], most_x);
    into[kCross][r] =
        select_or_zero(y_into != 0, cross_into * y_into) + select_or_zero(y_from != 0, cross_from * y_from);
    into[kTotalY][r] = into[kTotalY][r] * y_into + from[kTotalY][r] * y_from;
    into[kTotalX][r] = into[kTotalX][r] * x_into + from[kTotalX][r] * x_from;
    into[kMaximumX][r] = most_x, into[kMaximumY][r] = most_y;
  }
}

template <class Kind, class C>
void finish_sums(const void*, int64_t rows, const double* const* states, double* const* results,
                 C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const bool kept = parameters[kKept][r] != 0;
    for (int j : {0, 2}) {
      const double total = states[j + 1][r];
      results[j][r] = select_or_zero(kept, states[j][r]);
      results[j + 1][r] = select_or_zero(kept, select(total == 0, kMinusInfinity<double>, math::log_positive(total)));
    }
    if (!Kind::one_pass) continue;
    const double mean = states[kScale][r] * states[kCross][r] / states[kTotalY][r];
    const double value = select(states[kTotalX][r] == 0, std::numeric_limits<double>::quiet_NaN(),
                                mean + (results[kLogTotalX][r] - results[kLogTotalY][r]));
    results[kMeanX][r] = select_or_zero(kept, -1.0);
    results[kMeanY][r] = results[kRowStatCount][r] = select_or_zero(kept, value);
  }
}

// ---- Second pass, for Js and Tv: sums of the terms of the classes, which need the first pass's sums of whole rows.

enum { kValue, kOfY, kTermStates };

template <class C>
void prepare_row_stats(const void*, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  for (int i = 0; i <= kMeanX; ++i) {  // the last row_input is 1 if the row is kept, else 0
    C* to = parameters[i == kMeanX ? kKept : i];
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) to[r] = static_cast<C>(row_inputs[i][r]);
  }
}

template <class Kind, class C, int kBytes>
void add_rows(const void* data, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  const auto& op = *static_cast<const DivergenceOptions<C>*>(data);
  alignas(64) C values[kBuffer], of_y[kBuffer];
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    states[kValue][r] = states[kOfY][r] = 0;
    if (parameters[kKept][r] == 0) continue;
    const C *x = p.in[0] + r * p.step[0], *y = p.in[1] + r * p.step[1];
    const C maximum_x = parameters[kMaximumX][r], log_total_x = parameters[kLogTotalX][r];
    const C maximum_y = parameters[kMaximumY][r], log_total_y = parameters[kLogTotalY][r];
    for_blocks(
        n,
        [&](int64_t i) {
          C a, b;
          const Terms<C> terms = terms_of<Kind>(op, x[i], y[i], maximum_x, log_total_x, maximum_y, log_total_y, a, b);
          values[i] = terms.value, of_y[i] = terms.of_y;
        },
        [&](int64_t i) { p.prefetch(r * n + i); });
    states[kValue][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(values + i, v); });
    states[kOfY][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(of_y + i, v); });
  }
}

template <class Kind, class C>
void add_columns(const void* data, const Piece<C>& p, const C* const* parameters, double* const* states) {
  const auto& op = *static_cast<const DivergenceOptions<C>*>(data);
  alignas(64) C values[kChunk], of_y[kChunk];
  const int64_t n = p.width;
  for (int64_t k = 0; k < n; ++k) values[k] = of_y[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *x = p.in[0] + i * p.step[0], *y = p.in[1] + i * p.step[1];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      C a, b;
      const Terms<C> terms = terms_of<Kind>(op, x[k], y[k], parameters[kMaximumX][k], parameters[kLogTotalX][k],
                                            parameters[kMaximumY][k], parameters[kLogTotalY][k], a, b);
      values[k] += terms.value, of_y[k] += terms.of_y;
    }
  }
  for (int64_t k = 0; k < n; ++k) states[kValue][k] = values[k], states[kOfY][k] = of_y[k];
}

inline void merge_terms(int64_t rows, double* const* into, const double* const* from) {
  for (int i = 0; i < kTermStates; ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) into[i][r] += from[i][r];
  }
}

template <class C>
void finish_terms(const void*, int64_t rows, const double* const* states, double* const* results,
                  C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const bool kept = parameters[kKept][r] != 0;
    results[0][r] = select_or_zero(kept, states[kValue][r] - states[kOfY][r]);
    results[1][r] = select_or_zero(kept, states[kOfY][r]);
    results[2][r] = select_or_zero(kept, states[kValue][r]);
  }
}

// ---- the op

// sums: views that receive, for each row, sum q h (= divergence - sum p f for Js and Tv), sum p f and the divergence.
template <class Kind, class C>
void add_terms(const Pair& pair, const DivergenceOptions<C>& op, const View& row_stats,
               std::initializer_list<View> sums) {
  RowLoops<C> terms;
  terms.prepare = pick<&prepare_row_stats<C>>();
  terms.accumulate_rows = pick_width<&add_rows<Kind, C, 64>, &add_rows<Kind, C, 32>, &add_rows<Kind, C, 16>>();
  terms.accumulate_columns = pick<&add_columns<Kind, C>>();
  terms.merge = merge_terms;
  terms.finish = pick<&finish_terms<C>>();
  terms.states = kTermStates;
  Rowwise<C> walk(pair.shape, -1, pair.x);
  walk.input(pair.x), walk.input(pair.y);
  for (int i = 0; i < kMeanX; ++i) walk.row_input(pair.number(row_stats, i).view(), false);
  const RowValues<const double> keep = pair.keep();
  walk.row_input(keep.view(), false);
  for (const View& sum : sums) walk.result(sum, false);
  walk.run(terms, &op);
}

template <class Kind, class C>
void run(const Pair& pair, const DivergenceOptions<C>& op, const View& loss, const View& row_stats) {
  RowLoops<C> sums;
  sums.prepare = pick<&prepare_kept<C>>();
  sums.accumulate_rows = pick_width<&sum_rows<Kind, C, 64>, &sum_rows<Kind, C, 32>, &sum_rows<Kind, C, 16>>();
  sums.accumulate_columns = pick<&sum_columns<Kind, C>>();
  sums.merge = pick<&merge_sums<C>>();
  sums.finish = pick<&finish_sums<Kind, C>>();
  sums.states = kSumStates;
  sums.start[kMaximumX] = sums.start[kMaximumY] = kMinusInfinity<double>;
  const RowValues<const double> keep = pair.keep();
  Rowwise<C> first(pair.shape, -1, pair.x);
  first.input(pair.x), first.input(pair.y);
  first.row_input(keep.view(), false);
  for (int i = 0; i < (Kind::one_pass ? kRowStatCount : kMeanX); ++i)
    first.result(pair.number(row_stats, i).view(), false);
  if (Kind::one_pass) first.result(loss, false);
  first.run(sums, &op);
  if (Kind::one_pass) return;
  add_terms<Kind>(pair, op, row_stats,
                  {pair.number(row_stats, kMeanX).view(), pair.number(row_stats, kMeanY).view(), loss});
}

template <class Kind>
std::tuple<Tensor, Tensor> divergence(const Tensor& input, const Tensor& target, const std::optional<Tensor>& keep,
                                      double temperature, double beta) {
  const Pair pair("divergence", input, target, keep);
  const Tensor loss = empty(pair.rows, pair.dtype, input), row_stats = empty(pair.row_stats_shape(), pair.dtype, input);
  if (pair.shape.size[pair.rows.ndim] == 0) {
    set_zero(loss), set_zero(row_stats);
  } else if (pair.dtype == DType::kDouble) {
    run<Kind, double>(pair, {1 / temperature, beta}, View(loss), View(row_stats));
  } else {
    run<Kind, float>(pair, {static_cast<float>(1 / temperature), static_cast<float>(beta)}, View(loss),
                     View(row_stats));
  }
  return {loss, row_stats};
}

// Returns (3, *rows): sum q h, sum p f and the divergence over some of the classes, from the row_stats of whole rows.
template <class Kind>
Tensor divergence_sums(const Tensor& input, const Tensor& target, const Tensor& row_stats,
                       const std::optional<Tensor>& keep, double temperature, double beta) {
  constexpr char kName[] = "divergence_sums";
  const Pair pair(kName, input, target, keep);
  const View stats(row_stats);
  pair.check_row_stats(kName, stats);
  Shape shape = pair.row_stats_shape();
  shape.size[0] = 3;
  const Tensor sums = empty(shape, pair.dtype, input);
  if (pair.shape.size[pair.rows.ndim] == 0) {
    set_zero(sums);
    return sums;
  }
  const View view(sums);
  const auto add = [&](auto scale, auto share) {
    add_terms<Kind>(pair, DivergenceOptions<decltype(scale)>{scale, share}, stats,
                    {pair.number(view, 0).view(), pair.number(view, 1).view(), pair.number(view, 2).view()});
  };
  if (pair.dtype == DType::kDouble) {
    add(1 / temperature, beta);
  } else {
    add(static_cast<float>(1 / temperature), static_cast<float>(beta));
  }
  return sums;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_kl_div_with_logits", TORCH_BOX(&divergence<Kl>));
  m.impl("_js_div_with_logits", TORCH_BOX(&divergence<Js>));
  m.impl("_tv_with_logits", TORCH_BOX(&divergence<Tv>));
  m.impl("_js_div_with_logits_sums", TORCH_BOX(&divergence_sums<Js>));
  m.impl("_tv_with_logits_sums", TORCH_BOX(&divergence_sums<Tv>));
}

}  // namespace safeops::cpu
