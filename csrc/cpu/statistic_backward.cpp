// The gradient of every statistic: dx = keep ? c w shape(x, origin) : 0, c = grad scale.
// I/O: read x, mask, weight, write dx; what belongs to the outputs is the smaller side.
#include "exp.h"
#include "statistic.h"

namespace safeops::cpu {

namespace {

enum Kind : int64_t { kLinear = 0, kEqual = 1, kExp = 2, kSign = 3, kEqualMagnitude = 4 };

// The last two only compare: their weight is a mask and no more.
constexpr bool compares(int kind) { return kind == kEqual || kind == kEqualMagnitude; }

// d|x|/dx: 0 at 0, NaN at NaN
template <class C>
inline C sign(C x) {
  return select(x > 0, C(1), select(x < 0, C(-1), x));
}

template <class C, int kKind>
inline C shape_of(C x, C origin) {
  if constexpr (kKind == kLinear) return x - origin;
  if constexpr (kKind == kExp) return exp_(x - origin);
  if constexpr (kKind == kSign) return sign(x);
  const bool nan = (x != x) & (origin != origin);
  if constexpr (kKind == kEqual) return kept_or_zero((x == origin) | nan, C(1));
  if constexpr (kKind == kEqualMagnitude) return kept_or_zero((std::fabs(x) == origin) | nan, sign(x));
}

// in: c, [weight], x, origin, [what the origin lost in float];  out: dx
template <class C, int kKind, bool kMask, bool kWeight, bool kRest>
void statistic_loop(const void*, const Chunk<C>& chunk) {
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight];
  const C *origin = chunk.in[2 + kWeight], *rest = chunk.in[3 + kWeight];
  const uint8_t* mask = chunk.mask;
  C* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C shape = shape_of<C, kKind>(x[i], origin[i]);
    if constexpr (kRest) shape -= rest[i];
    C scale = c[i];
    if constexpr (kWeight && !compares(kKind)) scale *= w[i];
    dx[i] = kept_or_zero(kept<C, kMask, kWeight>(mask, w, i), scale * shape);
  }
}

template <class C, int kKind, bool kRest>
Loop<C> pick_masked(bool mask, bool weight) {
  if (mask)
    return weight ? pick<&statistic_loop<C, kKind, true, true, kRest>>()
                  : pick<&statistic_loop<C, kKind, true, false, kRest>>();
  return weight ? pick<&statistic_loop<C, kKind, false, true, kRest>>()
                : pick<&statistic_loop<C, kKind, false, false, kRest>>();
}

template <class C>
Loop<C> pick_loop(int64_t kind, bool rest, bool mask, bool weight) {
  switch (kind) {
    case kLinear:
      return rest ? pick_masked<C, kLinear, true>(mask, weight) : pick_masked<C, kLinear, false>(mask, weight);
    case kEqual: return pick_masked<C, kEqual, false>(mask, weight);
    case kExp: return pick_masked<C, kExp, false>(mask, weight);
    case kSign: return pick_masked<C, kSign, false>(mask, weight);
    default: return pick_masked<C, kEqualMagnitude, false>(mask, weight);
  }
}

// c = grad scale, in double: 0 where scale is, whatever grad is.
void slope_loop_of_outputs(const void*, const Chunk<double>& chunk) {
  const double *grad = chunk.in[0], *scale = chunk.in[1];
  double* c = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) c[i] = kept_or_zero(scale[i] != 0, grad[i] * scale[i]);
}

// What float loses of n origins; whether it loses any.
bool rest_loop(const double* origin, int64_t n, double* rest) {
  double lost = 0;
#pragma omp simd reduction(+ : lost)
  for (int64_t i = 0; i < n; ++i) {
    const double r = origin[i] - static_cast<double>(static_cast<float>(origin[i]));
    const double finite = kept_or_zero(std::fabs(r) <= std::numeric_limits<double>::max(), r);
    lost += kept_or_zero(finite != 0, 1.0);
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
    lost += kept_or_zero(large, 1.0) + kept_or_zero(small, 1.0);
  }
  return lost == 0;
}

// What belongs to the outputs, of shape `full`: the input's with reduced dims of size 1.
struct PerOutput {
  Shape full;
  int64_t strides[kMaxDims];

  PerOutput(const Shape& shape, const ReducedDims& dims) : full(dims.output(shape, true)) {
    contiguous_strides(full, strides);
  }

  // A tensor of the outputs' shape; its reduced dims, if they are gone, come back.
  View seen(const Tensor& t, bool keepdim, const ReducedDims& dims, int64_t* room) const {
    View view(t);
    if (keepdim || view.ndim == 0) return view;
    int from = 0;
    for (int d = 0; d < full.ndim; ++d) {
      const bool present = !dims.reduced[d] && from < view.ndim;
      STD_TORCH_CHECK(!present || view.sizes[from] == full.size[d] || view.sizes[from] == 1,
                      "_statistic_backward: grad, origin and scale need the statistic's shape");
      room[d] = present ? view.strides[from] * (view.sizes[from] != 1) : 0;
      from += present;
    }
    STD_TORCH_CHECK(from == view.ndim, "_statistic_backward: grad has too many dims");
    view.ndim = full.ndim;
    view.sizes = full.size;
    view.strides = room;
    return view;
  }

  View seen(const Tensor& contiguous) const {
    View view(contiguous);
    view.ndim = full.ndim;
    view.sizes = full.size;
    view.strides = strides;
    return view;
  }
};

Tensor statistic_backward(const Tensor& grad, const Tensor& input, const Tensor& origin, const Tensor& scale,
                          const OptionalTensor& mask, const OptionalTensor& weight, int64_t kind, const Dims& dim,
                          bool keepdim) {
  const View x(input);
  STD_TORCH_CHECK(x.is_floating(), "_statistic_backward: input must be floating point");
  STD_TORCH_CHECK(kLinear <= kind && kind <= kEqualMagnitude, "_statistic_backward: kind is 0 to 4");
  const Shape shape = x.shape();
  const ReducedDims dims = reduced_dims(shape, dim);
  const PerOutput outputs(shape, dims);
  const Tensor dx = output_like(shape, x.dtype, input, x);
  if (shape.numel() == 0) return dx;

  const Tensor c = empty(outputs.full, DType::kDouble, input);
  int64_t of_grad[kMaxDims], of_scale[kMaxDims], of_origin[kMaxDims];
  const View o = outputs.seen(origin, keepdim, dims, of_origin), out(dx);
  Elementwise<double> prepare(outputs.full, View(c));
  prepare.input(outputs.seen(grad, keepdim, dims, of_grad));
  prepare.input(outputs.seen(scale, keepdim, dims, of_scale));
  prepare.output(View(c));
  prepare.run(pick<&slope_loop_of_outputs>(), nullptr);

  const int64_t n = outputs.full.numel();
  double* slopes = reinterpret_cast<double*>(View(c).data);
  const auto run = [&](auto type, const std::optional<Tensor>& rest) {
    using C = decltype(type);
    Elementwise<C> work(shape, out);
    work.input(View(c));
    if (weight) work.input(View(*weight));
    work.input(x);
    work.input(o);
    if (rest) work.input(View(*rest));
    if (mask) work.mask(View(*mask));
    work.output(out);
    work.run(pick_loop<C>(kind, rest.has_value(), mask.has_value(), weight.has_value()), nullptr);
  };
  const bool fits = x.dtype != DType::kDouble && dtype_of(grad) != DType::kDouble && !in_double(weight) &&
                    fit_float(slopes, n);
  std::optional<Tensor> rest;
  if (fits && (kind == kExp || (kind == kLinear && x.dtype == DType::kFloat))) {
    const View given(origin);
    STD_TORCH_CHECK(given.dtype == DType::kDouble && given.contiguous() && given.shape().numel() == n,
                    "_statistic_backward: origin must be contiguous float64 of the statistic's shape");
    rest.emplace(empty(outputs.full, DType::kDouble, input));
    double* lost = reinterpret_cast<double*>(View(*rest).data);
    if (!pick<&rest_loop>()(reinterpret_cast<const double*>(given.data), n, lost)) {
      rest.reset();
    } else if (kind == kExp) {
      pick<&scale_by_rest_loop>()(slopes, lost, n);
      rest.reset();
    }
  }
  fits ? run(float{}, rest) : run(double{}, rest);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_statistic_backward", TORCH_BOX(&statistic_backward)); }

}  // namespace safeops::cpu
