// The gradient of every statistic: dx = keep ? grad scale w derivative(x, origin) : 0.
// I/O: read x, mask, weight, write dx; grad, scale and origin have one entry for each output.
#include "cpu/engine/exp.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

enum Kind : int64_t { kLinear = 0, kEqual = 1, kExp = 2, kSign = 3, kEqualMagnitude = 4 };

// True for kinds that compare x with the origin. A weight does not scale their gradient: a weight of 0 drops the
// element.
constexpr bool compares(int kind) { return kind == kEqual || kind == kEqualMagnitude; }

// Returns d|x|/dx: 0 at 0, NaN at NaN.
template <class C>
inline C sign(C x) {
  return select(x > 0, C(1), select(x < 0, C(-1), x));
}

// Returns c times the derivative of the kind. rest: what rounding the origin to float lost. A kind that compares
// selects c instead of multiplying it by 0, so that a NaN or inf in c reaches only the extreme elements.
template <class C, int kKind>
inline C times_derivative(C c, C x, C origin, C rest) {
  if constexpr (kKind == kLinear) return c * ((x - origin) - rest);
  if constexpr (kKind == kExp) return c * exp_(select(x == origin, C(0), x - origin));  // equal infinities differ by 0
  if constexpr (kKind == kSign) return c * sign(x);
  const bool nan = (x != x) & (origin != origin);
  if constexpr (kKind == kEqual) return select_or_zero((x == origin) | nan, c);
  if constexpr (kKind == kEqualMagnitude) return select_or_zero((std::fabs(x) == origin) | nan, c * sign(x));
}

// in: c = grad scale, [weight], x, origin, [rest];  out: dx
template <class C, int kKind, bool kMask, bool kWeight, bool kRest>
void slope_loop(const void*, const Chunk<C>& chunk) {
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight];
  const C *origin = chunk.in[2 + kWeight], *rest = chunk.in[3 + kWeight];
  const uint8_t* mask = chunk.mask;
  C* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C slope = times_derivative<C, kKind>(c[i], x[i], origin[i], kRest ? rest[i] : C(0));
    if constexpr (kWeight && !compares(kKind)) slope *= w[i];  // last, since c w may overflow where dx does not
    dx[i] = select_or_zero(is_kept<C, kMask, kWeight>(mask, w, i), slope);
  }
}

// Computes dx if grad scale leaves the range of double. grad is multiplied last: for a small norm, grad scale may
// overflow where dx does not. Where scale is 0, grad is ignored.
// in: grad, scale, [weight], x, origin;  out: dx
template <int kKind, bool kMask, bool kWeight>
void extreme_slope_loop(const void*, const Chunk<double>& chunk) {
  const double *grad = chunk.in[0], *scale = chunk.in[1], *w = chunk.in[2];
  const double *x = chunk.in[2 + kWeight], *origin = chunk.in[3 + kWeight];
  const uint8_t* mask = chunk.mask;
  double* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool beyond = is_beyond(scale[i]);
    const double by = select(beyond, -scale[i], scale[i]), g = select_or_zero(by != 0, grad[i]);
    double slope = times_derivative<double, kKind>(by, x[i], origin[i], 0);
    if constexpr (kWeight) slope *= w[i];
    slope = slope * select(beyond, kBeyond, 1.0) * g;
    dx[i] = select_or_zero(is_kept<double, kMask, kWeight>(mask, w, i), slope);
  }
}

template <class C, int kKind, bool kRest>
Loop<C> pick_slopes(bool mask, bool weight) {
  const auto any = [=](auto masked) {
    return weight ? pick<&slope_loop<C, kKind, masked, true, kRest>>()
                  : pick<&slope_loop<C, kKind, masked, false, kRest>>();
  };
  return mask ? any(std::true_type{}) : any(std::false_type{});
}

template <class C>
Loop<C> slope_loop_of(int64_t kind, bool rest, bool mask, bool weight) {
  switch (kind) {
    case kLinear:
      if constexpr (sizeof(C) == sizeof(float))
        if (rest) return pick_slopes<C, kLinear, true>(mask, weight);
      return pick_slopes<C, kLinear, false>(mask, weight);
    case kEqual: return pick_slopes<C, kEqual, false>(mask, weight);
    case kExp: return pick_slopes<C, kExp, false>(mask, weight);
    case kSign: return pick_slopes<C, kSign, false>(mask, weight);
    default: return pick_slopes<C, kEqualMagnitude, false>(mask, weight);
  }
}

template <int kKind>
Loop<double> pick_extreme(bool mask, bool weight) {
  if (mask)
    return weight ? pick<&extreme_slope_loop<kKind, true, true>>() : pick<&extreme_slope_loop<kKind, true, false>>();
  return weight ? pick<&extreme_slope_loop<kKind, false, true>>() : pick<&extreme_slope_loop<kKind, false, false>>();
}

Loop<double> extreme_slope_loop_of(int64_t kind, bool mask, bool weight) {
  switch (kind) {
    case kLinear: return pick_extreme<kLinear>(mask, weight);
    case kExp: return pick_extreme<kExp>(mask, weight);
    default: return pick_extreme<kSign>(mask, weight);
  }
}

// Sets c = grad scale, in double; 0 if scale is 0, whatever grad is. kMark: sets c to inf if the product over- or
// underflows double; the gradient may still be finite, so a wider loop computes it.
template <bool kMark>
void slope_loop_of_outputs(const void*, const Chunk<double>& chunk) {
  const double *grad = chunk.in[0], *scale = chunk.in[1];
  double* c = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const double product = select_or_zero(scale[i] != 0, grad[i] * scale[i]);
    const bool lost = (product == 0) & (scale[i] != 0) & (grad[i] != 0);
    c[i] = select(kMark && (lost | is_beyond(scale[i])), std::numeric_limits<double>::infinity(), product);
  }
}

// Sets `rest` to the rounding errors of n origins in float; an error that is not finite becomes 0. Returns true if any
// is not 0.
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

// Replaces rest by c exp(-rest), so that c exp(x - origin) = rest exp(x - float(origin)).
void scale_by_rest_loop(const double* c, double* rest, int64_t n) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) rest[i] = c[i] * exp_(0 - rest[i]);
}

// The values of c with which a loop may run: 0, NaN, magnitudes in [low, high], and magnitudes larger than `most`.
struct Range {
  double low, high, most;

  bool holds(double c) const {
    const double size = std::fabs(c);
    const bool large = (size > high) & (size <= most), small = (size < low) & (size != 0);
    return !(large | small);
  }
};

// kFloatRange: the normal numbers of float, and inf. kDoubleRange leaves room for a product with a derivative, and then
// with a weight.
constexpr Range kFloatRange{std::numeric_limits<float>::min(), std::numeric_limits<float>::max(),
                            std::numeric_limits<double>::max()};
constexpr Range kDoubleRange{0x1p-500, 0x1p+500, std::numeric_limits<double>::infinity()};

bool holds_all_loop(const Range* range, const double* c, int64_t n) {
  double lost = 0;
#pragma omp simd reduction(+ : lost)
  for (int64_t i = 0; i < n; ++i) lost += select_or_zero(!range->holds(c[i]), 1.0);
  return lost == 0;
}

// in: c, the gradient from a wider type, dx;  out: dx if the range holds c, else the wider gradient
void replace_loop(const void* op, const Chunk<double>& chunk) {
  const Range range = *static_cast<const Range*>(op);
  const double *c = chunk.in[0], *wider = chunk.in[1], *dx = chunk.in[2];
  double* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) out[i] = select(range.holds(c[i]), dx[i], wider[i]);
}

// A loop over the elements of x that computes dx, with the operands that have one entry per element.
struct Walk {
  const View &x, &dx;
  const OptionalTensor &mask, &weight;
  int64_t kind;

  // The loop reads the operands `before`, weight, x, and the operands `after`, in this order. before, after: operands
  // with one entry per output of the statistic; null: left out.
  template <class C>
  void run(Loop<C> loop, std::initializer_list<const View*> before, std::initializer_list<const View*> after) const {
    Elementwise<C> work(x.shape(), dx);
    for (const View* per_output : before) work.input(*per_output);
    if (weight) work.input(View(*weight));
    work.input(x);
    for (const View* per_output : after)
      if (per_output) work.input(*per_output);
    if (mask) work.mask(View(*mask));
    work.output(dx);
    work.run(loop, nullptr);
  }

  template <class C>
  void run_slopes(const View& c, const View& origin, const View* rest = nullptr) const {
    run(slope_loop_of<C>(kind, rest, mask.has_value(), weight.has_value()), {&c}, {&origin, rest});
  }
};

// Computes the gradient in float from c and origin in double.
void run_in_float(const Walk& walk, const Tensor& c, const Tensor& origin, const View& o) {
  const View slopes(c);
  if (walk.kind != kExp && !(walk.kind == kLinear && walk.x.dtype == DType::kFloat))
    return walk.run_slopes<float>(slopes, o);
  const View origin_view(origin);
  const int64_t n = slopes.shape().numel();
  STD_TORCH_CHECK(origin_view.dtype == DType::kDouble && origin_view.contiguous() && origin_view.shape().numel() == n,
                  "_statistic_backward: origin must be contiguous float64 of the statistic's shape");
  const Tensor rest = empty(slopes.shape(), DType::kDouble, origin);
  const View rest_view(rest);
  double* to = reinterpret_cast<double*>(rest_view.data);
  const bool any = pick<&rest_loop>()(reinterpret_cast<const double*>(origin_view.data), n, to);
  if (!any) return walk.run_slopes<float>(slopes, o);
  if (walk.kind == kLinear) return walk.run_slopes<float>(slopes, o, &rest_view);
  pick<&scale_by_rest_loop>()(reinterpret_cast<const double*>(slopes.data), to, n);
  walk.run_slopes<float>(rest_view, o);
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

  const Tensor c = empty(dims.output(shape, true), DType::kDouble, origin);
  const View slopes(c);
  Elementwise<double> prepare(slopes.shape(), slopes);
  prepare.input(g);
  prepare.input(by);
  prepare.output(slopes);
  prepare.run(compares(kind) ? pick<&slope_loop_of_outputs<false>>() : pick<&slope_loop_of_outputs<true>>(), nullptr);

  const double* c_values = reinterpret_cast<const double*>(slopes.data);
  const int64_t n = slopes.shape().numel();
  // Computes dx in the narrow type. If the range does not hold some c, computes dx in the wider type, too, and takes it
  // for the outputs with such a c. The other outputs keep the narrow gradient: the c of one output must not change
  // their bits.
  const auto run = [&](const Range& range, const View& to, const auto& narrow, const auto& wider) {
    const bool all = pick<&holds_all_loop>()(&range, c_values, n);
    const std::optional<Tensor> other = all ? std::nullopt : std::optional(output_like(shape, x.dtype, input, x));
    if (!all) wider(View(*other));
    narrow(to);
    if (all) return;
    Elementwise<double> replace(shape, to);
    replace.input(slopes);
    replace.input(View(*other));
    replace.input(to);
    replace.output(to);
    replace.run(pick<&replace_loop>(), &range);
  };
  const auto walk = [&](const View& to) { return Walk{x, to, mask, weight, kind}; };
  const auto in_extremes = [&](const View& to) {
    walk(to).run(extreme_slope_loop_of(kind, mask.has_value(), weight.has_value()), {&g, &by}, {&o});
  };
  const auto in_double = [&](const View& to) {
    const auto narrow = [&](const View& to) { walk(to).run_slopes<double>(slopes, o); };
    compares(kind) ? narrow(to) : run(kDoubleRange, to, narrow, in_extremes);
  };
  const auto in_float = [&](const View& to) { run_in_float(walk(to), c, origin, o); };
  if (x.dtype == DType::kDouble || g.dtype == DType::kDouble || cpu::in_double(weight))
    in_double(out);
  else
    run(kFloatRange, out, in_float, in_double);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_statistic_backward", TORCH_BOX(&statistic_backward)); }

}  // namespace safeops::cpu
