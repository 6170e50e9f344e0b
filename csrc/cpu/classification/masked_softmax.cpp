// y = exp(x - max x) / sum exp(x - max x) over the kept values of each row, or its logarithm.
// I/O: read x, mask, write y.
#include "cpu/classification/softmax.h"

namespace safeops::cpu {

namespace {

// States: the largest kept value, the sum of exp(x - max), and 1 if any value is kept.
enum { kMax, kTotal, kKept };

// Returns 1 if the mask keeps any value of the row. Asked if the maximum of a piece is -inf: the piece then keeps no
// value, or only values of -inf.
template <class C>
double keeps_any(const Piece<C>& p, int64_t row) {
  for (int64_t i = 0; i < p.length(); ++i)
    if (p.kept(row, i)) return 1;
  return 0;
}

// Reduces a piece of rows: x and keep are (rows, values).
template <class C, int kBytes, bool kMask>
void accumulate_rows(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  using V = Vector<C, kBytes>;
  alignas(64) C kept[kBuffer], exponentials[kBuffer];
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    const C* x = p.in[0] + r * p.step[0];
    if constexpr (kMask) {
      const BitsOf<C>* keep = p.keep + r * p.keep_step;
      const C* all = x;
      for_blocks(n, [&](int64_t i) { kept[i] = select_bits<C>(keep[i], all[i], kMinusInfinity<C>); });
      x = kept;
    }
    const C maximum = max_run<kBytes>(x, n), pivot = pivot_of(maximum);
    C* e = p.memo ? p.memo + r * n : exponentials;
    for_blocks(n, [&](int64_t i) { e[i] = exp_nonpositive(x[i] - pivot); });
    states[kMax][r] = maximum;
    states[kTotal][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(e + i, v); });
    states[kKept][r] = maximum == kMinusInfinity<C> ? keeps_any(p, r) : 1;
  }
}

// Reduces a piece of rows side by side: x and keep are (values, rows).
template <class C, bool kMask>
void accumulate_columns(const void*, const Piece<C>& p, const C* const*, double* const* states) {
  alignas(64) C kept[4096], maximum[kChunk], sum[kChunk];
  const int64_t n = p.width;
  const C* x = p.in[0];
  int64_t step = p.step[0];
  if constexpr (kMask) {
    for (int64_t i = 0; i < p.height; ++i) {
      const C* from = p.in[0] + i * p.step[0];
      const BitsOf<C>* keep = p.keep + i * p.keep_step;
      C* to = kept + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) to[k] = select_bits<C>(keep[k], from[k], kMinusInfinity<C>);
    }
    x = kept;
    step = n;
  }
  for (int64_t k = 0; k < n; ++k) maximum[k] = x[k], sum[k] = 0;
  for (int64_t i = 1; i < p.height; ++i) {
    const C* xi = x + i * step;
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) maximum[k] = xi[k] > maximum[k] ? xi[k] : maximum[k];
  }
  C none = 0;
#pragma omp simd reduction(+ : none)
  for (int64_t k = 0; k < n; ++k) {
    states[kMax][k] = maximum[k];
    states[kKept][k] = 1;
    none += select_or_zero(maximum[k] == kMinusInfinity<C>, C(1));
    maximum[k] = pivot_of(maximum[k]);
  }
  for (int64_t i = 0; i < p.height; ++i) {
    const C* xi = x + i * step;
    if (p.memo) {
      C* e = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        e[k] = exp_nonpositive(xi[k] - maximum[k]);
        sum[k] += e[k];
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) sum[k] += exp_nonpositive(xi[k] - maximum[k]);
    }
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) states[kTotal][k] = sum[k];
  for (int64_t k = 0; k < n && none != 0; ++k)
    if (states[kMax][k] == kMinusInfinity<C>) states[kKept][k] = keeps_any(p, k);
}

template <class C>
void merge(int64_t rows, double* const* into, const double* const* from) {
  merge_exponentials<C>(rows, into[kMax], into[kTotal], from[kMax], from[kTotal]);
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) into[kKept][r] = std::max(into[kKept][r], from[kKept][r]);
}

template <class C, bool kLog>
void finish(const void*, int64_t rows, const double* const* states, double* const* results, C* const* parameters) {
  for (int64_t r = 0; r < rows; ++r) {
    // A row that keeps no value gives zeros (log softmax: -inf); a row that keeps only -inf gives NaN, as in torch.
    const double maximum = states[kMax][r], total = states[kTotal][r];
    const bool empty = states[kKept][r] == 0;
    const double sum = total == 0 && !empty ? std::numeric_limits<double>::quiet_NaN() : total;
    results[0][r] = maximum;
    results[1][r] = sum;
    parameters[kPivot][r] = pivot_of(static_cast<C>(maximum));
    parameters[kInverse][r] = static_cast<C>(kLog ? std::log(sum) : empty ? 0.0 : 1.0 / sum);
  }
}

template <class C, bool kLog>
inline C value_of(C x, C pivot, C inverse) {
  if constexpr (kLog)
    return (x - pivot) - inverse;
  else
    return exp_nonpositive(x - pivot) * inverse;
}

template <class C>
inline C masked_value(bool log) {
  return log ? kMinusInfinity<C> : C(0);
}

// key: the maximum of a piece. The memo holds exp(x - key); this factor turns it into y.
template <class C>
inline C memo_factor(double key, C pivot, C inverse) {
  return ratio_of<C>(key, static_cast<double>(pivot)) * inverse;
}

template <class C, bool kLog, bool kMask>
void map_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    C* y = p.out[0] + r * p.out_step[0];
    const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if (!kLog && p.memo) {
      const C* e = p.memo + r * n;
      const C factor = memo_factor(p.memo_state[r], pivot, inverse);
      if (kMask && factor != factor)  // kept values are NaN, masked values 0
        for_blocks(n, [&](int64_t i) { y[i] = select_bits_or_zero<C>(keep[i], factor); });
      else
        for_blocks(n, [&](int64_t i) { y[i] = e[i] * factor; });
      continue;
    }
    // y = keep ? exp(x - max) / sum : 0, or its logarithm
    const C* x = p.in[0] + r * p.step[0];
    if constexpr (kMask)
      for_blocks(n, [&](int64_t i) {
        y[i] = select_bits<C>(keep[i], value_of<C, kLog>(x[i], pivot, inverse), masked_value<C>(kLog));
      });
    else
      for_blocks(n, [&](int64_t i) { y[i] = value_of<C, kLog>(x[i], pivot, inverse); });
  }
}

template <class C, bool kLog, bool kMask>
void map_columns(const void*, const Piece<C>& p, const C* const* parameters) {
  alignas(64) C factor[kChunk];
  const int64_t n = p.width;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse];
  const bool remembered = !kLog && p.memo;
  C unusual = 0;
  if (remembered) {
#pragma omp simd reduction(+ : unusual)
    for (int64_t k = 0; k < n; ++k) {
      factor[k] = memo_factor(p.memo_state[k], pivot[k], inverse[k]);
      unusual += select_or_zero(factor[k] != factor[k], C(1));
    }
  }
  for (int64_t i = 0; i < p.height; ++i) {
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
      if constexpr (kMask) value = select_bits<C>(keep[k], value, masked_value<C>(kLog));
      y[k] = value;
    }
  }
}

// ---- the op

template <class C, bool kLog, bool kMask>
RowLoops<C> forward_loops() {
  RowLoops<C> loops;
  loops.accumulate_rows = pick_width<&accumulate_rows<C, 64, kMask>, &accumulate_rows<C, 32, kMask>,
                                     &accumulate_rows<C, 16, kMask>>();
  loops.accumulate_columns = pick<&accumulate_columns<C, kMask>>();
  loops.merge = pick<&merge<C>>();
  loops.finish = finish<C, kLog>;
  loops.map_rows = pick<&map_rows<C, kLog, kMask>>();
  loops.map_columns = pick<&map_columns<C, kLog, kMask>>();
  loops.states = 3;
  loops.start[kMax] = kMinusInfinity<double>;
  loops.memo = !kLog;
  loops.map_reads = false;
  return loops;
}

template <class C>
RowLoops<C> forward_loops(bool log, bool mask) {
  if (log) return mask ? forward_loops<C, true, true>() : forward_loops<C, true, false>();
  return mask ? forward_loops<C, false, true>() : forward_loops<C, false, false>();
}

template <class C>
void softmax(const View& x, const std::optional<Tensor>& mask, int64_t dim, bool log, const View& out,
             const View& maximum, const View& total) {
  Rowwise<C> rows(x.shape(), dim, x);
  rows.input(x);
  if (mask) rows.mask(View(*mask));
  rows.output(out);
  rows.result(maximum, true);
  rows.result(total, true);
  rows.run(forward_loops<C>(log, mask.has_value()), nullptr);
}

std::tuple<Tensor, Tensor, Tensor> masked_softmax(const Tensor& input, const std::optional<Tensor>& mask, int64_t dim,
                                                  bool log) {
  const View x(input);
  const Shape shape = x.shape(), per_row = row_shape(shape, dim, true);
  STD_TORCH_CHECK(x.is_floating(), "_masked_softmax: input must be floating point");
  const Tensor out = output_like(shape, x.dtype, input, x);
  const Tensor maximum = empty(per_row, DType::kDouble, input), total = empty(per_row, DType::kDouble, input);
  const auto run = x.dtype == DType::kDouble ? softmax<double> : softmax<float>;
  run(x, mask, dim, log, View(out), View(maximum), View(total));
  return {out, maximum, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_masked_softmax", TORCH_BOX(&masked_softmax)); }

}  // namespace safeops::cpu
