// y = exp(x - max x) / sum exp(x - max x) over the kept values of each row, or its logarithm.
// I/O: forward reads x, mask and writes y; backward reads g, mask, and x (y is recomputed from two numbers a row) or y
// itself, and writes dx.
#include <cmath>
#include <limits>

#include "cpu/engine/exp.h"
#include "cpu/rows/rowwise.h"

namespace safeops::cpu {

namespace {

template <class C>
constexpr C kNothing = -std::numeric_limits<C>::infinity();  // a masked value: it is no maximum, and its exp is 0

template <class C>
inline C pivot_of(C top) {
  return select(top == kNothing<C>, C(0), top);  // a piece may keep nothing
}

// ---- forward. States: the largest kept value, the sum of exp(x - it), and whether anything is kept.
// Parameters: the pivot, and what follows from the sum: its inverse, or its logarithm.

enum { kTop, kTotal, kKept };
enum { kPivot, kInverse, kDot };

// Where a piece's largest value is -inf, all kept ones may be: only a look at the mask tells.
template <class C>
double keeps_any(const Piece<C>& p, int64_t row) {
  for (int64_t i = 0; i < p.length(); ++i)
    if (p.kept(row, i)) return 1;
  return 0;
}

template <class C, int kBytes, bool kMask>
void fold_rows(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  using V = Line<C, kBytes>;
  alignas(64) C kept[kBuffer], terms[kBuffer];
  const int64_t n = p.side;
  for (int64_t r = 0; r < p.lines; ++r) {
    const C* x = p.in[0] + r * p.step[0];
    if constexpr (kMask) {
      const BitsOf<C>* keep = p.keep + r * p.keep_step;
      const C* all = x;
      for_blocks(n, [&](int64_t i) { kept[i] = choose<C>(keep[i], all[i], kNothing<C>); });
      x = kept;
    }
    const C top = max_lines<kBytes>(x, n), pivot = pivot_of(top);
    C* e = p.memo ? p.memo + r * n : terms;
    for_blocks(n, [&](int64_t i) { e[i] = exp_below(x[i] - pivot); });
    states[kTop][r] = top;
    states[kTotal][r] = sum_lines<kBytes, C>(n, [&](int64_t i, V& line) { load_line(e + i, line); });
    states[kKept][r] = top == kNothing<C> ? keeps_any(p, r) : 1;
  }
}

template <class C, bool kMask>
void fold_lanes(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  alignas(64) C kept[4096], top[kChunk], sum[kChunk];
  const int64_t n = p.side;
  const C* x = p.in[0];
  int64_t step = p.step[0];
  if constexpr (kMask) {
    for (int64_t i = 0; i < p.lines; ++i) {
      const C* from = p.in[0] + i * p.step[0];
      const BitsOf<C>* keep = p.keep + i * p.keep_step;
      C* to = kept + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) to[k] = choose<C>(keep[k], from[k], kNothing<C>);
    }
    x = kept;
    step = n;
  }
  for (int64_t k = 0; k < n; ++k) top[k] = x[k], sum[k] = 0;
  for (int64_t i = 1; i < p.lines; ++i) {
    const C* line = x + i * step;
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) top[k] = line[k] > top[k] ? line[k] : top[k];
  }
  C none = 0;
#pragma omp simd reduction(+ : none)
  for (int64_t k = 0; k < n; ++k) {
    states[kTop][k] = top[k];
    states[kKept][k] = 1;
    none += kept_or_zero(top[k] == kNothing<C>, C(1));
    top[k] = pivot_of(top[k]);
  }
  for (int64_t i = 0; i < p.lines; ++i) {
    const C* line = x + i * step;
    if (p.memo) {
      C* e = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        e[k] = exp_below(line[k] - top[k]);
        sum[k] += e[k];
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) sum[k] += exp_below(line[k] - top[k]);
    }
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) states[kTotal][k] = sum[k];
  for (int64_t k = 0; k < n && none != 0; ++k)
    if (states[kTop][k] == kNothing<C>) states[kKept][k] = keeps_any(p, k);
}

// exp(a - b) of two tops, where they are the same infinity too.
template <class C>
inline C ratio_of(double a, double b) {
  return exp_below(static_cast<C>(a == b ? 0.0 : a - b));
}

template <class C>
void merge(int64_t rows, double* const* into, const double* const* from) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double a = into[kTop][r], b = from[kTop][r], top = a > b ? a : b;
    into[kTotal][r] = into[kTotal][r] * ratio_of<C>(a, top) + from[kTotal][r] * ratio_of<C>(b, top);
    into[kTop][r] = top;
    into[kKept][r] = std::max(into[kKept][r], from[kKept][r]);
  }
}

template <class C, bool kLog>
void finish(const void*, int64_t rows, const double* const* states, double* const* results, C* const* parameters) {
  for (int64_t r = 0; r < rows; ++r) {
    // Nothing kept: all zeros. Nothing but -inf kept: NaN, as torch has it.
    const double top = states[kTop][r], total = states[kTotal][r];
    const bool empty = states[kKept][r] == 0;
    const double sum = total == 0 && !empty ? std::numeric_limits<double>::quiet_NaN() : total;
    results[0][r] = top;
    results[1][r] = sum;
    parameters[kPivot][r] = pivot_of(static_cast<C>(top));
    parameters[kInverse][r] = static_cast<C>(kLog ? std::log(sum) : empty ? 0.0 : 1.0 / sum);
  }
}

template <class C, bool kLog>
inline C value_of(C x, C pivot, C inverse) {
  if constexpr (kLog)
    return (x - pivot) - inverse;
  else
    return exp_below(x - pivot) * inverse;
}

template <class C>
inline C masked_value(bool log) {
  return log ? kNothing<C> : C(0);
}

// What the memo's exponentials, taken from the piece's own top, are multiplied by.
template <class C>
inline C memo_factor(double key, C pivot, C inverse) {
  return ratio_of<C>(key, static_cast<double>(pivot)) * inverse;
}

template <class C, bool kLog, bool kMask>
void map_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.side;
  for (int64_t r = 0; r < p.lines; ++r) {
    C* y = p.out[0] + r * p.out_step[0];
    const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if (!kLog && p.memo) {
      const C* e = p.memo + r * n;
      const C factor = memo_factor(p.key[r], pivot, inverse);
      if (kMask && factor != factor)  // the kept values are NaN: the others, 0 so far, must not follow
        for_blocks(n, [&](int64_t i) { y[i] = choose_or_zero<C>(keep[i], factor); });
      else
        for_blocks(n, [&](int64_t i) { y[i] = e[i] * factor; });
      continue;
    }
    const C* x = p.in[0] + r * p.step[0];
    if constexpr (kMask)
      for_blocks(n, [&](int64_t i) {
        y[i] = choose<C>(keep[i], value_of<C, kLog>(x[i], pivot, inverse), masked_value<C>(kLog));
      });
    else
      for_blocks(n, [&](int64_t i) { y[i] = value_of<C, kLog>(x[i], pivot, inverse); });
  }
}

template <class C, bool kLog, bool kMask>
void map_lanes(const void*, const Piece<C>& p, const C* const* parameters) {
  alignas(64) C factor[kChunk];
  const int64_t n = p.side;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse];
  const bool remembered = !kLog && p.memo;
  C unusual = 0;
  if (remembered) {
#pragma omp simd reduction(+ : unusual)
    for (int64_t k = 0; k < n; ++k) {
      factor[k] = memo_factor(p.key[k], pivot[k], inverse[k]);
      unusual += kept_or_zero(factor[k] != factor[k], C(1));
    }
  }
  for (int64_t i = 0; i < p.lines; ++i) {
    C* y = p.out[0] + i * p.out_step[0];
    const BitsOf<C>* keep = kMask ? p.keep + i * p.keep_step : nullptr;
    if (remembered) {
      const C* e = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) y[k] = e[k] * factor[k];
      for (int64_t k = 0; k < n && kMask && unusual != 0; ++k)
        if (!keep[k]) y[k] = 0;
      continue;
    }
    const C* x = p.in[0] + i * p.step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      C value = value_of<C, kLog>(x[k], pivot[k], inverse[k]);
      if constexpr (kMask) value = choose<C>(keep[k], value, masked_value<C>(kLog));
      y[k] = value;
    }
  }
}

// ---- backward: dx = y (g - sum g y), of the logarithm g - y sum g. State: the sum. The memo is y, if it needed one.

enum Of { kInput, kLogInput, kOutput };  // what y is found from: x, x for the logarithm, y itself

template <class C, Of kOf>
inline C share_of(C x, C pivot, C inverse) {
  if constexpr (kOf == kOutput) return x;
  return exp_below(x - pivot) * inverse;
}

template <class C>
void prepare(const void*, int64_t rows, const double* const* given, C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double sum = given[1][r];
    parameters[kPivot][r] = pivot_of(static_cast<C>(given[0][r]));
    parameters[kInverse][r] = static_cast<C>(sum == 0 ? 0.0 : 1.0 / sum);
  }
}

template <class C, int kBytes, Of kOf, bool kMask>
void fold_back_rows(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Line<C, kBytes>;
  alignas(64) C terms[kBuffer], values[kBuffer];
  const int64_t n = p.side;
  for (int64_t r = 0; r < p.lines; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if constexpr (kOf == kInput) {
      const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r];
      C* y = p.memo ? p.memo + r * n : values;
      for_blocks(n, [&](int64_t i) {
        y[i] = share_of<C, kOf>(x[i], pivot, inverse);
        C term = g[i] * y[i];
        if constexpr (kMask) term = choose_or_zero<C>(keep[i], term);
        terms[i] = term;
      });
      states[0][r] = sum_lines<kBytes, C>(n, [&](int64_t i, V& line) { load_line(terms + i, line); });
    } else {
      states[0][r] = sum_lines<kBytes, C>(n, [&](int64_t i, V& line) {
        load_line(g + i, line);
        if constexpr (kOf == kOutput) {
          V y;
          load_line(x + i, y);
          line *= y;
        }
        if constexpr (kMask) keep_bits<C>(keep + i, line);
      });
    }
  }
}

template <class C, Of kOf, bool kMask>
void fold_back_lanes(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  alignas(64) C sum[kChunk];
  const int64_t n = p.side;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse];
  for (int64_t k = 0; k < n; ++k) sum[k] = 0;
  for (int64_t i = 0; i < p.lines; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    const BitsOf<C>* keep = kMask ? p.keep + i * p.keep_step : nullptr;
    const auto term = [&](int64_t k, C y) {
      const C product = kOf == kLogInput ? g[k] : g[k] * y;
      if constexpr (kMask) return choose_or_zero<C>(keep[k], product);
      return product;
    };
    if (kOf == kInput && p.memo) {
      C* memo = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        memo[k] = share_of<C, kOf>(x[k], pivot[k], inverse[k]);
        sum[k] += term(k, memo[k]);
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        sum[k] += term(k, kOf == kLogInput ? C(0) : share_of<C, kOf>(x[k], pivot[k], inverse[k]));
    }
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) states[0][k] = sum[k];
}

inline void merge_sums(int64_t rows, double* const* into, const double* const* from) {
  for (int64_t r = 0; r < rows; ++r) into[0][r] += from[0][r];
}

template <class C>
void finish_back(const void*, int64_t rows, const double* const* states, double* const*, C* const* parameters) {
  for (int64_t r = 0; r < rows; ++r) parameters[kDot][r] = static_cast<C>(states[0][r]);
}

template <class C, Of kOf, bool kMask>
inline C slope_of(const C* g, C y, C dot, const BitsOf<C>* keep, int64_t i) {
  const C slope = kOf == kLogInput ? g[i] - y * dot : y * (g[i] - dot);
  if constexpr (kMask) return choose_or_zero<C>(keep[i], slope);
  return slope;
}

template <class C, Of kOf, bool kMask>
void map_back_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.side;
  for (int64_t r = 0; r < p.lines; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    C* dx = p.out[0] + r * p.out_step[0];
    const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r], dot = parameters[kDot][r];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if (kOf == kInput && p.memo) {
      const C* y = p.memo + r * n;
      for_blocks(n, [&](int64_t i) { dx[i] = slope_of<C, kOf, kMask>(g, y[i], dot, keep, i); });
    } else {
      for_blocks(n, [&](int64_t i) {
        dx[i] = slope_of<C, kOf, kMask>(g, share_of<C, kOf>(x[i], pivot, inverse), dot, keep, i);
      });
    }
  }
}

template <class C, Of kOf, bool kMask>
void map_back_lanes(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.side;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse], *dot = parameters[kDot];
  for (int64_t i = 0; i < p.lines; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    C* dx = p.out[0] + i * p.out_step[0];
    const BitsOf<C>* keep = kMask ? p.keep + i * p.keep_step : nullptr;
    if (kOf == kInput && p.memo) {
      const C* y = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) dx[k] = slope_of<C, kOf, kMask>(g, y[k], dot[k], keep, k);
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        dx[k] = slope_of<C, kOf, kMask>(g, share_of<C, kOf>(x[k], pivot[k], inverse[k]), dot[k], keep, k);
    }
  }
}

// ---- ops

template <class C, bool kLog, bool kMask>
RowLoops<C> forward_loops() {
  RowLoops<C> loops;
  loops.fold_rows = pick_width<&fold_rows<C, 64, kMask>, &fold_rows<C, 32, kMask>, &fold_rows<C, 16, kMask>>();
  loops.fold_lanes = pick<&fold_lanes<C, kMask>>();
  loops.merge = pick<&merge<C>>();
  loops.finish = finish<C, kLog>;
  loops.map_rows = pick<&map_rows<C, kLog, kMask>>();
  loops.map_lanes = pick<&map_lanes<C, kLog, kMask>>();
  loops.states = 3;
  loops.start[kTop] = kNothing<double>;
  loops.memo = !kLog;
  loops.map_reads = false;
  return loops;
}

template <class C, Of kOf, bool kMask>
RowLoops<C> backward_loops() {
  RowLoops<C> loops;
  if (kOf != kOutput) loops.prepare = pick<&prepare<C>>();
  loops.fold_rows = pick_width<&fold_back_rows<C, 64, kOf, kMask>, &fold_back_rows<C, 32, kOf, kMask>,
                               &fold_back_rows<C, 16, kOf, kMask>>();
  loops.fold_lanes = pick<&fold_back_lanes<C, kOf, kMask>>();
  loops.merge = merge_sums;
  loops.finish = finish_back<C>;
  loops.map_rows = pick<&map_back_rows<C, kOf, kMask>>();
  loops.map_lanes = pick<&map_back_lanes<C, kOf, kMask>>();
  loops.states = 1;
  loops.memo = kOf == kInput;
  return loops;
}

template <class C>
RowLoops<C> forward_loops(bool log, bool mask) {
  if (log) return mask ? forward_loops<C, true, true>() : forward_loops<C, true, false>();
  return mask ? forward_loops<C, false, true>() : forward_loops<C, false, false>();
}

template <class C>
RowLoops<C> backward_loops(Of of, bool mask) {
  if (of == kLogInput) return mask ? backward_loops<C, kLogInput, true>() : backward_loops<C, kLogInput, false>();
  if (of == kInput) return mask ? backward_loops<C, kInput, true>() : backward_loops<C, kInput, false>();
  return mask ? backward_loops<C, kOutput, true>() : backward_loops<C, kOutput, false>();
}

template <class C>
void softmax(const View& x, const std::optional<Tensor>& mask, int64_t dim, bool log, const View& out, const View& top,
             const View& total) {
  Rowwise<C> rows(x.shape(), dim, x);
  rows.input(x);
  if (mask) rows.mask(View(*mask));
  rows.output(out);
  rows.result(top, true);
  rows.result(total, true);
  rows.run(forward_loops<C>(log, mask.has_value()), nullptr);
}

std::tuple<Tensor, Tensor, Tensor> masked_softmax(const Tensor& input, const std::optional<Tensor>& mask, int64_t dim,
                                                  bool log) {
  const View x(input);
  const Shape shape = x.shape(), thin = row_shape(shape, dim, true);
  STD_TORCH_CHECK(x.is_floating(), "_masked_softmax: input must be floating point");
  const Tensor out = output_like(shape, x.dtype, input, x);
  const Tensor top = empty(thin, DType::kDouble, input), total = empty(thin, DType::kDouble, input);
  const auto run = x.dtype == DType::kDouble ? softmax<double> : softmax<float>;
  run(x, mask, dim, log, View(out), View(top), View(total));
  return {out, top, total};
}

template <class C>
void softmax_backward(const View& g, const View& x, const Tensor* top, const Tensor* total,
                      const std::optional<Tensor>& mask, int64_t dim, Of of, const View& dx) {
  Rowwise<C> rows(x.shape(), dim, x);
  rows.input(g);
  rows.input(x);
  if (mask) rows.mask(View(*mask));
  if (top) rows.given(View(*top), true);
  if (total) rows.given(View(*total), true);
  rows.output(dx);
  rows.run(backward_loops<C>(of, mask.has_value()), nullptr);
}

Tensor backward_of(const Tensor& grad, const Tensor& input, const Tensor* top, const Tensor* total,
                   const std::optional<Tensor>& mask, int64_t dim, Of of) {
  const View g(grad), x(input);
  STD_TORCH_CHECK(g.is_floating() && x.is_floating(), "_masked_softmax_backward: operands must be floating point");
  const Tensor dx = output_like(x.shape(), x.dtype, input, x);
  const bool in_double = x.dtype == DType::kDouble || g.dtype == DType::kDouble;
  (in_double ? softmax_backward<double> : softmax_backward<float>)(g, x, top, total, mask, dim, of, View(dx));
  return dx;
}

Tensor masked_softmax_backward(const Tensor& grad, const Tensor& input, const Tensor& top, const Tensor& total,
                               const std::optional<Tensor>& mask, int64_t dim, bool log) {
  return backward_of(grad, input, &top, &total, mask, dim, log ? kLogInput : kInput);
}

Tensor masked_softmax_slope(const Tensor& grad, const Tensor& output, const std::optional<Tensor>& mask, int64_t dim) {
  return backward_of(grad, output, nullptr, nullptr, mask, dim, kOutput);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_masked_softmax", TORCH_BOX(&masked_softmax));
  m.impl("_masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
  m.impl("_masked_softmax_slope", TORCH_BOX(&masked_softmax_slope));
}

}  // namespace safeops::cpu
