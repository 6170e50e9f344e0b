// The gradient of every statistic: dx = keep ? grad scale w derivative(x, origin) : 0.
// I/O: read x, mask, weight, write dx; grad, scale and origin have an entry for each output, which are fewer.
#include "cpu/engine/exp.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

enum Kind : int64_t { kLinear = 0, kEqual = 1, kExp = 2, kSign = 3, kEqualMagnitude = 4 };

// Kinds that compare x with the origin: of their weight it only matters where it is 0.
constexpr bool compares(int kind) { return kind == kEqual || kind == kEqualMagnitude; }

// d|x|/dx: 0 at 0, NaN at NaN
template <class C>
inline C sign(C x) {
  return select(x > 0, C(1), select(x < 0, C(-1), x));
}

// c times the derivative of the kind. `rest`: what the origin lost in float. A kind that compares selects c and does
// not multiply it by 0: a NaN or inf from upstream reaches the extreme elements alone.
template <class C, int kKind>
inline C times_derivative(C c, C x, C origin, C rest) {
  if constexpr (kKind == kLinear) return c * ((x - origin) - rest);
  if constexpr (kKind == kExp) return c * exp_(select(x == origin, C(0), x - origin));  // of two that are inf, too
  if constexpr (kKind == kSign) return c * sign(x);
  const bool nan = (x != x) & (origin != origin);
  if constexpr (kKind == kEqual) return select_or_zero((x == origin) | nan, c);
  if constexpr (kKind == kEqualMagnitude) return select_or_zero((std::fabs(x) == origin) | nan, c * sign(x));
}

// in: c = grad scale, [weight], x, origin, [rest];  out: dx
template <int kKind, bool kMask, bool kWeight, bool kRest>
void float_loop(const void*, const Chunk<float>& chunk) {
  const float *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight];
  const float *origin = chunk.in[2 + kWeight], *rest = chunk.in[3 + kWeight];
  const uint8_t* mask = chunk.mask;
  float* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    float slope = times_derivative<float, kKind>(c[i], x[i], origin[i], kRest ? rest[i] : 0.0f);
    if constexpr (kWeight && !compares(kKind)) slope *= w[i];  // not c w: that may leave the range where dx does not
    dx[i] = select_or_zero(is_kept<float, kMask, kWeight>(mask, w, i), slope);
  }
}

// in: grad, scale, [weight], x, origin;  out: dx. Where scale is 0, grad does not count.
template <int kKind, bool kMask, bool kWeight>
void double_loop(const void*, const Chunk<double>& chunk) {
  const double *grad = chunk.in[0], *scale = chunk.in[1], *w = chunk.in[2];
  const double *x = chunk.in[2 + kWeight], *origin = chunk.in[3 + kWeight];
  const uint8_t* mask = chunk.mask;
  double* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool beyond = is_beyond(scale[i]);
    const double by = select(beyond, -scale[i], scale[i]), g = select_or_zero(by != 0, grad[i]);
    double slope;
    if constexpr (compares(kKind)) {
      slope = times_derivative<double, kKind>(g * by, x[i], origin[i], 0);
    } else {  // the gradient last: of a small norm, its product with the scale may overflow where dx does not
      slope = times_derivative<double, kKind>(by, x[i], origin[i], 0);
      if constexpr (kWeight) slope *= w[i];
      slope = slope * select(beyond, kBeyond, 1.0) * g;
    }
    dx[i] = select_or_zero(is_kept<double, kMask, kWeight>(mask, w, i), slope);
  }
}

template <int kKind, bool kRest>
Loop<float> pick_float(bool mask, bool weight) {
  if (mask)
    return weight ? pick<&float_loop<kKind, true, true, kRest>>() : pick<&float_loop<kKind, true, false, kRest>>();
  return weight ? pick<&float_loop<kKind, false, true, kRest>>() : pick<&float_loop<kKind, false, false, kRest>>();
}

template <int kKind>
Loop<double> pick_double(bool mask, bool weight) {
  if (mask) return weight ? pick<&double_loop<kKind, true, true>>() : pick<&double_loop<kKind, true, false>>();
  return weight ? pick<&double_loop<kKind, false, true>>() : pick<&double_loop<kKind, false, false>>();
}

Loop<float> float_loop_of(int64_t kind, bool rest, bool mask, bool weight) {
  switch (kind) {
    case kLinear: return rest ? pick_float<kLinear, true>(mask, weight) : pick_float<kLinear, false>(mask, weight);
    case kEqual: return pick_float<kEqual, false>(mask, weight);
    case kExp: return pick_float<kExp, false>(mask, weight);
    case kSign: return pick_float<kSign, false>(mask, weight);
    default: return pick_float<kEqualMagnitude, false>(mask, weight);
  }
}

Loop<double> double_loop_of(int64_t kind, bool mask, bool weight) {
  switch (kind) {
    case kLinear: return pick_double<kLinear>(mask, weight);
    case kEqual: return pick_double<kEqual>(mask, weight);
    case kExp: return pick_double<kExp>(mask, weight);
    case kSign: return pick_double<kSign>(mask, weight);
    default: return pick_double<kEqualMagnitude>(mask, weight);
  }
}

// c = grad scale, in double: 0 where scale is, whatever grad is.
void slope_loop_of_outputs(const void*, const Chunk<double>& chunk) {
  const double *grad = chunk.in[0], *scale = chunk.in[1];
  double* c = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) c[i] = select_or_zero(scale[i] != 0, grad[i] * scale[i]);
}

// What float loses of n origins; whether it loses any.
bool rest_loop(const double* origin, int64_t n, double* rest) {
  double lost = 0;
#pragma omp simd reduction(+ : lost)
  for (int64_t i = 0; i < n; ++i) {
    const double r = origin[i] - static_cast<double>(static_cast<float>(origin[i]));
    const double finite = select_or_zero(std::fabs(r) <= std::numeric_limits<double>::max(), r);
    lost += select_or_zero(finite != 0, 1.0);
    rest[i] = finite;
  }
  return lost != 0;
}

// exp(x - origin) = exp(x - float(origin)) exp(-rest)
void scale_by_rest_loop(double* c, const double* rest, int64_t n) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) c[i] *= exp_(0 - rest[i]);
}

// Numbers that float holds with all their digits: 0, normal ones, and what is not finite anyway.
bool fit_float(const double* c, int64_t n) {
  double lost = 0;
#pragma omp simd reduction(+ : lost)
  for (int64_t i = 0; i < n; ++i) {
    const double size = std::fabs(c[i]);
    const bool large = (size > std::numeric_limits<float>::max()) & (size <= std::numeric_limits<double>::max());
    const bool small = (size < std::numeric_limits<float>::min()) & (size != 0);
    lost += select_or_zero(large, 1.0) + select_or_zero(small, 1.0);
  }
  return lost == 0;
}

// False, and nothing is done, where the products of grad and scale do not fit float.
bool run_in_float(const Shape& outputs, int64_t kind, const View& grad, const View& scale, const Tensor& origin,
                  const View& o, const View& x, const OptionalTensor& mask, const OptionalTensor& weight,
                  const View& out) {
  const Tensor c = empty(outputs, DType::kDouble, origin);
  Elementwise<double> prepare(outputs, View(c));
  prepare.input(grad);
  prepare.input(scale);
  prepare.output(View(c));
  prepare.run(pick<&slope_loop_of_outputs>(), nullptr);

  const int64_t n = outputs.numel();
  double* slopes = reinterpret_cast<double*>(View(c).data);
  if (!fit_float(slopes, n)) return false;
  std::optional<Tensor> rest;
  if (kind == kExp || (kind == kLinear && x.dtype == DType::kFloat)) {
    const View given(origin);
    STD_TORCH_CHECK(given.dtype == DType::kDouble && given.contiguous() && given.shape().numel() == n,
                    "_statistic_backward: origin must be contiguous float64 of the statistic's shape");
    rest.emplace(empty(outputs, DType::kDouble, origin));
    double* lost = reinterpret_cast<double*>(View(*rest).data);
    if (!pick<&rest_loop>()(reinterpret_cast<const double*>(given.data), n, lost)) {
      rest.reset();
    } else if (kind == kExp) {
      pick<&scale_by_rest_loop>()(slopes, lost, n);
      rest.reset();
    }
  }
  Elementwise<float> work(x.shape(), out);
  work.input(View(c));
  if (weight) work.input(View(*weight));
  work.input(x);
  work.input(o);
  if (rest) work.input(View(*rest));
  if (mask) work.mask(View(*mask));
  work.output(out);
  work.run(float_loop_of(kind, rest.has_value(), mask.has_value(), weight.has_value()), nullptr);
  return true;
}

Tensor statistic_backward(const Tensor& grad, const Tensor& input, const Tensor& origin, const Tensor& scale,
                          const OptionalTensor& mask, const OptionalTensor& weight, int64_t kind, const Dims& dim,
                          bool keepdim) {
  const View x(input);
  STD_TORCH_CHECK(x.is_floating(), "_statistic_backward: input must be floating point");
  STD_TORCH_CHECK(kLinear <= kind && kind <= kEqualMagnitude, "_statistic_backward: kind is 0 to 4");
  const Shape shape = x.shape();
  const ReducedDims dims = reduced_dims(shape, dim);
  const Tensor dx = output_like(shape, x.dtype, input, x);
  if (shape.numel() == 0) return dx;

  const auto seen = [&](const Tensor& t) {
    return Unreduced(View(t), dims, shape.ndim, keepdim, "_statistic_backward");
  };
  const Unreduced grad_seen = seen(grad), scale_seen = seen(scale), origin_seen = seen(origin);
  const View &g = grad_seen.view, &by = scale_seen.view, &o = origin_seen.view, out(dx);
  const bool may_fit = x.dtype != DType::kDouble && g.dtype != DType::kDouble && !in_double(weight);
  if (may_fit && run_in_float(dims.output(shape, true), kind, g, by, origin, o, x, mask, weight, out)) return dx;
  Elementwise<double> work(shape, out);
  work.input(g);
  work.input(by);
  if (weight) work.input(View(*weight));
  work.input(x);
  work.input(o);
  if (mask) work.mask(View(*mask));
  work.output(out);
  work.run(double_loop_of(kind, mask.has_value(), weight.has_value()), nullptr);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_statistic_backward", TORCH_BOX(&statistic_backward)); }

}  // namespace safeops::cpu
