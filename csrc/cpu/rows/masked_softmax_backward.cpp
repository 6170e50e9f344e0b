// The gradient of softmax y: dx = y (g - sum g y); of log softmax, whose exp is y: dx = g - y sum g.
// I/O: read g, mask, and x (y is recomputed from two numbers of each row) or y itself, write dx.
#include "cpu/rows/softmax.h"

namespace safeops::cpu {

namespace {

// State: the sum. The memo is y where it was recomputed.

enum Of { kInput, kLogInput, kOutput };  // what y is found from: x, x for the logarithm, y itself

template <class C, Of kOf>
inline C share_of(C x, C pivot, C inverse) {
  if constexpr (kOf == kOutput) return x;
  return exp_nonpositive(x - pivot) * inverse;
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
void accumulate_back_rows(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  alignas(64) C products[kBuffer], values[kBuffer];
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
    const C *g = p.in[0] + r * p.step[0], *x = p.in[1] + r * p.step[1];
    const BitsOf<C>* keep = kMask ? p.keep + r * p.keep_step : nullptr;
    if constexpr (kOf == kInput) {
      const C pivot = parameters[kPivot][r], inverse = parameters[kInverse][r];
      C* y = p.memo ? p.memo + r * n : values;
      for_blocks(n, [&](int64_t i) {
        y[i] = share_of<C, kOf>(x[i], pivot, inverse);
        C product = g[i] * y[i];
        if constexpr (kMask) product = select_bits_or_zero<C>(keep[i], product);
        products[i] = product;
      });
      states[0][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(products + i, v); });
    } else {
      states[0][r] = sum_run<kBytes, C>(n, [&](int64_t i, V& v) {
        load_vector(g + i, v);
        if constexpr (kOf == kOutput) {
          V y;
          load_vector(x + i, y);
          v *= y;
        }
        if constexpr (kMask) mask_vector<C>(keep + i, v);
      });
    }
  }
}

template <class C, Of kOf, bool kMask>
void accumulate_back_columns(const void*, const Piece<C>& p, const C* const* parameters, double* const* states) {
  alignas(64) C sum[kChunk];
  const int64_t n = p.width;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse];
  for (int64_t k = 0; k < n; ++k) sum[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *g = p.in[0] + i * p.step[0], *x = p.in[1] + i * p.step[1];
    const BitsOf<C>* keep = kMask ? p.keep + i * p.keep_step : nullptr;
    const auto summand = [&](int64_t k, C y) {
      const C product = kOf == kLogInput ? g[k] : g[k] * y;
      if constexpr (kMask) return select_bits_or_zero<C>(keep[k], product);
      return product;
    };
    if (kOf == kInput && p.memo) {
      C* memo = p.memo + i * n;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        memo[k] = share_of<C, kOf>(x[k], pivot[k], inverse[k]);
        sum[k] += summand(k, memo[k]);
      }
    } else {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k)
        sum[k] += summand(k, kOf == kLogInput ? C(0) : share_of<C, kOf>(x[k], pivot[k], inverse[k]));
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
  if constexpr (kMask) return select_bits_or_zero<C>(keep[i], slope);
  return slope;
}

template <class C, Of kOf, bool kMask>
void map_back_rows(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.width;
  for (int64_t r = 0; r < p.height; ++r) {
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
void map_back_columns(const void*, const Piece<C>& p, const C* const* parameters) {
  const int64_t n = p.width;
  const C *pivot = parameters[kPivot], *inverse = parameters[kInverse], *dot = parameters[kDot];
  for (int64_t i = 0; i < p.height; ++i) {
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

// ---- the ops

template <class C, Of kOf, bool kMask>
RowLoops<C> backward_loops() {
  RowLoops<C> loops;
  if (kOf != kOutput) loops.prepare = pick<&prepare<C>>();
  loops.accumulate_rows = pick_width<&accumulate_back_rows<C, 64, kOf, kMask>, &accumulate_back_rows<C, 32, kOf, kMask>,
                               &accumulate_back_rows<C, 16, kOf, kMask>>();
  loops.accumulate_columns = pick<&accumulate_back_columns<C, kOf, kMask>>();
  loops.merge = merge_sums;
  loops.finish = finish_back<C>;
  loops.map_rows = pick<&map_back_rows<C, kOf, kMask>>();
  loops.map_columns = pick<&map_back_columns<C, kOf, kMask>>();
  loops.states = 1;
  loops.memo = kOf == kInput;
  return loops;
}

template <class C>
RowLoops<C> backward_loops(Of of, bool mask) {
  if (of == kLogInput) return mask ? backward_loops<C, kLogInput, true>() : backward_loops<C, kLogInput, false>();
  if (of == kInput) return mask ? backward_loops<C, kInput, true>() : backward_loops<C, kInput, false>();
  return mask ? backward_loops<C, kOutput, true>() : backward_loops<C, kOutput, false>();
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
  m.impl("_masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
  m.impl("_masked_softmax_slope", TORCH_BOX(&masked_softmax_slope));
}

}  // namespace safeops::cpu
