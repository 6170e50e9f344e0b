// The gradient of softmax and log softmax; y is the softmax:
//     softmax:      dx = y (g - sum g y)
//     log softmax:  dx = g - y sum g
// I/O: read g, mask, and y, or x (from which y is computed with the row's maximum and sum); write dx.
#include "cpu/classification/softmax.h"

namespace safeops::cpu {

namespace {

// The state of a row is its sum of g y (log softmax: of g). The memo holds y if y is computed from x (kInput).

enum YSource { kInput, kLogInput, kOutput };  // y comes from x; likewise, for log softmax; input 1 is y itself

template <class C, YSource kFrom>
inline C probability_of(C x, C pivot, C inverse) {
  if constexpr (kFrom == kOutput) return x;
  return exp_nonpositive(x - pivot) * inverse;
}

template <class C>
void prepare(const void*, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double sum = row_inputs[1][r];
    parameters[kPivot][r] = pivot_of(static_cast<C>(row_inputs[0][r]));
    parameters[kInverse][r] = static_cast<C>(sum == 0 ? 0.0 : 1.0 / sum);
  }
}

template <class C, int kBytes, YSource kFrom, bool kMask>
void accumulate_back_rows(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  alignas(64) C products[kBuffer], values[kBuffer];
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if constexpr (kFrom == kInput) {
      const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r];
      C* y = p.memo ? p.memo + r * n : values;
      for_blocks(n, [&](int64_t i) {
        y[i] = probability_of<C, kFrom>(x[i], pivot, inverse);
        C product = g[i] * y[i];
        if constexpr (kMask) product = select_bits_or_zero<C>(keep[i], product);
        products[i] = product;
      });
      states[0][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(products + i, v); });
    } else {
      states[0][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) {
        load_vector(g + i, v);
        if constexpr (kFrom == kOutput) {
          V y;
          load_vector(x + i, y);
          v *= y;
        }
        if constexpr (kMask) mask_vector<C>(keep + i, v);
      });
    }
  }
}

template <class C, YSource kFrom, bool kMask>
void accumulate_back_columns(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  alignas(64) C sum[kChunk];
  const int64_t n = p.width;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse];
  for (int64_t k = 0; k < n; ++k) sum[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    const BitsOf<C>* keep = kMask ? p.keep + i * p.keep_step : nullptr;
    const auto summand = [&](int64_t k, C y) {
      const C product = kFrom == kLogInput ? g[k] : g[k] * y;
      if constexpr (kMask) return select_bits_or_zero<C>(keep[k], product);
      return product;
    };
    if (kFrom == kInput && p.memo) {
      C* memo = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        memo[k] = probability_of<C, kFrom>(x[k], pivot[k], inverse[k]);
        sum[k] += summand(k, memo[k]);
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        sum[k] += summand(k, kFrom == kLogInput ? C(0) : probability_of<C, kFrom>(x[k], pivot[k], inverse[k]));
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

// Returns dx: y (g - dot) with dot = sum g y; for log softmax g - y dot with dot = sum g.
template <class C, YSource kFrom, bool kMask>
inline C slope_of(const C* g, C y, C dot, const BitsOf<C>* keep, int64_t i) {
  const C slope = kFrom == kLogInput ? g[i] - y * dot : y * (g[i] - dot);
  if constexpr (kMask) return select_bits_or_zero<C>(keep[i], slope);
  return slope;
}

template <class C, YSource kFrom, bool kMask>
void map_back_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    C* dx = p.out[0] + r * p.out_step[0];
    const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r], dot = parameters[kDot][r];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if (kFrom == kInput && p.memo) {
      const C* y = p.memo + r * n;
      for_blocks(n, [&](int64_t i) { dx[i] = slope_of<C, kFrom, kMask>(g, y[i], dot, keep, i); });
    } else {
      for_blocks(n, [&](int64_t i) {
        dx[i] = slope_of<C, kFrom, kMask>(g, probability_of<C, kFrom>(x[i], pivot, inverse), dot, keep, i);
      });
    }
  }
}

template <class C, YSource kFrom, bool kMask>
void map_back_columns(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.width;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse], *dot = parameters[kDot];
  for (int64_t i = 0; i < p.height; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    C* dx = p.out[0] + i * p.out_step[0];
    const BitsOf<C>* keep = kMask ? p.keep + i * p.keep_step : nullptr;
    if (kFrom == kInput && p.memo) {
      const C* y = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) dx[k] = slope_of<C, kFrom, kMask>(g, y[k], dot[k], keep, k);
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        dx[k] = slope_of<C, kFrom, kMask>(g, probability_of<C, kFrom>(x[k], pivot[k], inverse[k]), dot[k], keep, k);
    }
  }
}

// ---- the ops

template <class C, YSource kFrom, bool kMask>
RowLoops<C> backward_loops() {
  RowLoops<C> loops;
  if (kFrom != kOutput) loops.prepare = pick<&prepare<C>>();
  loops.accumulate_rows = pick_width<&accumulate_back_rows<C, 64, kFrom, kMask>,
                                     &accumulate_back_rows<C, 32, kFrom, kMask>,
                                     &accumulate_back_rows<C, 16, kFrom, kMask>>();
  loops.accumulate_columns = pick<&accumulate_back_columns<C, kFrom, kMask>>();
  loops.merge = merge_sums;
  loops.finish = finish_back<C>;
  loops.map_rows = pick<&map_back_rows<C, kFrom, kMask>>();
  loops.map_columns = pick<&map_back_columns<C, kFrom, kMask>>();
  loops.states = 1;
  loops.memo = kFrom == kInput;
  return loops;
}

template <class C>
RowLoops<C> backward_loops(YSource y_source, bool mask) {
  if (y_source == kLogInput) return mask ? backward_loops<C, kLogInput, true>() : backward_loops<C, kLogInput, false>();
  if (y_source == kInput) return mask ? backward_loops<C, kInput, true>() : backward_loops<C, kInput, false>();
  return mask ? backward_loops<C, kOutput, true>() : backward_loops<C, kOutput, false>();
}

template <class C>
void softmax_backward(const View& g, const View& x, const Tensor* maximum, const Tensor* total,
                      const std::optional<Tensor>& mask, int64_t dim, YSource y_source, const View& dx) {
  Rowwise<C> rows(x.shape(), dim, x);
  rows.input(g);
  rows.input(x);
  if (mask) rows.mask(View(*mask));
  if (maximum) rows.row_input(View(*maximum), true);
  if (total) rows.row_input(View(*total), true);
  rows.output(dx);
  rows.run(backward_loops<C>(y_source, mask.has_value()), nullptr);
}

Tensor backward_of(const Tensor& grad, const Tensor& input, const Tensor* maximum, const Tensor* total,
                   const std::optional<Tensor>& mask, int64_t dim, YSource y_source) {
  const View g(grad), x(input);
  STD_TORCH_CHECK(g.is_floating() && x.is_floating(), "_masked_softmax_backward: operands must be floating point");
  const Tensor dx = output_like(x.shape(), x.dtype, input, x);
  const bool in_double = x.dtype == DType::kDouble || g.dtype == DType::kDouble;
  (in_double ? softmax_backward<double> : softmax_backward<float>)(g, x, maximum, total, mask, dim, y_source, View(dx));
  return dx;
}

Tensor masked_softmax_backward(const Tensor& grad, const Tensor& input, const Tensor& maximum, const Tensor& total,
                               const std::optional<Tensor>& mask, int64_t dim, bool log) {
  return backward_of(grad, input, &maximum, &total, mask, dim, log ? kLogInput : kInput);
}

Tensor masked_softmax_slope(const Tensor& grad, const Tensor& output, const std::optional<Tensor>& mask, int64_t dim) {
  return backward_of(grad, output, nullptr, nullptr, mask, dim, kOutput);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
  m.impl("_masked_softmax_slope", TORCH_BOX(&masked_softmax_slope));
}

}  // namespace safeops::cpu
