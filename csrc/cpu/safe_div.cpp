// q = a / b where b is not (nearly) zero, else a fill value; a quotient too large for the output dtype saturates.
// I/O: forward reads a, b and writes q; backward reads g, a, b and writes da, db.
#include <cmath>
#include <limits>

#include "elementwise.h"

namespace safeops::cpu {

namespace {

template <class C>
struct SafeDiv {
  C floor, fill, largest, overflow;  // |b| <= floor is nothing; |q| >= overflow would round to inf in the output dtype

  SafeDiv(double eps, double fill_, DType dtype)
      : floor(std::nextafter(static_cast<C>(eps), C(0))),  // the last number below eps; 0 for eps = 0
        fill(static_cast<C>(saturate(fill_, dtype))),
        largest(static_cast<C>(cpu::largest(dtype))),
        overflow(static_cast<C>(overflow_from(dtype))) {}

  bool keep(C b) const { return !(std::fabs(b) <= floor); }  // a NaN b is kept

  bool saturated(C a, C q) const {
    return (std::fabs(q) >= overflow) & (std::fabs(a) < std::numeric_limits<C>::infinity());
  }
};

// Every loop is written twice. The first does no more than the divisions, and counts what it cannot do: quotients that
// saturate, slopes that leave the normal numbers. Only the rare chunk where it counted any goes through the careful
// one. Outputs are buffers or memory of our own: writing twice is writing once.

template <class C>
C forward_chunk(const SafeDiv<C>& f, const Chunk<C>& chunk) {
  const C *a = chunk.in[0], *b = chunk.in[1];
  C* out = chunk.out[0];
  C rare = 0;  // a sum: gcc does not vectorise a bitwise reduction here
#pragma omp simd reduction(+ : rare)
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = f.keep(b[i]);
    const C q = kept_or_zero(keep, a[i]) / select(keep, b[i], C(1));
    rare += kept_or_zero(std::fabs(q) >= f.overflow, C(1));
    out[i] = select(keep, q, f.fill);
  }
  return rare;
}

template <class C>
void forward_loop(const void* op, const Chunk<C>& chunk) {
  const SafeDiv<C> f = *static_cast<const SafeDiv<C>*>(op);
  if (forward_chunk(f, chunk) == 0) return;
  const C *a = chunk.in[0], *b = chunk.in[1];
  C* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const C q = a[i] / b[i];
    const C shown = select(f.saturated(a[i], q), std::copysign(f.largest, q), q);
    out[i] = select(f.keep(b[i]), shown, f.fill);
  }
}

// q = a/b:  da = g/b,  db = -(g/b) q;  both exactly 0 where the output was a stand-in.
template <class C, bool kInput, bool kOther>
C backward_chunk(const SafeDiv<C>& f, const Chunk<C>& chunk) {
  const C *g = chunk.in[0], *a = chunk.in[1], *b = chunk.in[2];
  C *da = chunk.out[0], *db = chunk.out[1];
  C rare = 0;
#pragma omp simd reduction(+ : rare)
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = f.keep(b[i]);
    const C upstream = kept_or_zero(keep, g[i]), divisor = select(keep, b[i], C(1));
    const C q = kept_or_zero(keep, a[i]) / divisor, slope = upstream / divisor;
    rare += kept_or_zero(std::fabs(q) >= f.overflow, C(1));
    if constexpr (kInput) da[i] = slope;
    if constexpr (kOther) {
      const C size = std::fabs(slope);
      rare += kept_or_zero(size > std::numeric_limits<C>::max(), C(1)) +
              kept_or_zero(size < std::numeric_limits<C>::min(), std::fabs(upstream));
      db[i] = (0 - slope) * q;
    }
  }
  return rare;
}

// db is -g (q/b) where g/b over- or underflows and the product may not.
template <class C, bool kInput, bool kOther>
void backward_loop(const void* op, const Chunk<C>& chunk) {
  const SafeDiv<C> f = *static_cast<const SafeDiv<C>*>(op);
  if (backward_chunk<C, kInput, kOther>(f, chunk) == 0) return;
  const C *g = chunk.in[0], *a = chunk.in[1], *b = chunk.in[2];
  C *da = chunk.out[0], *db = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const C q = a[i] / b[i], slope = g[i] / b[i], size = std::fabs(slope);
    const bool live = f.keep(b[i]) & !f.saturated(a[i], q);
    if constexpr (kInput) da[i] = kept_or_zero(live, slope);
    if constexpr (kOther) {
      const bool lost =
          (size > std::numeric_limits<C>::max()) | ((size < std::numeric_limits<C>::min()) & (g[i] != 0));
      db[i] = kept_or_zero(live, -select(lost, g[i] * (q / b[i]), slope * q));
    }
  }
}

template <class C>
void divide(const Shape& shape, const View& out, const View& a, const View& b, double eps, double fill_value) {
  const SafeDiv<C> op(eps, fill_value, out.dtype);
  Elementwise<C> loop(shape, out);
  loop.input(a);
  loop.input(b);
  loop.output(out);
  loop.run(pick<&forward_loop<C>>(), &op);
}

// A floor nobody named: the smallest normal number of the compute type.
double floor_of(const std::optional<double>& eps, bool in_double) {
  if (eps) return *eps;
  return in_double ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
}

Tensor safe_div(const Tensor& input, const Tensor& other, const std::optional<double>& eps, double fill_value,
                const std::optional<ScalarType>& dtype) {
  const View a(input), b(other);
  const Shape shape = broadcast(a.shape(), b.shape());
  STD_TORCH_CHECK(dtype || a.dtype == b.dtype, "_safe_div: dtype is needed where the operands' dtypes differ");
  const DType type = floating(dtype, a.dtype);
  const Tensor result = output_like(shape, type, input, a);
  const View out(result);
  const bool in_double = a.dtype == DType::kDouble || b.dtype == DType::kDouble || type == DType::kDouble;
  const auto run = in_double ? divide<double> : divide<float>;
  run(shape, out, a, b, floor_of(eps, in_double), fill_value);
  return result;
}

template <class C>
void divide_backward(const Shape& shape, const Tensor* da, const Tensor* db, const View& g, const View& a,
                     const View& b, double eps) {
  const SafeDiv<C> op(eps, 0.0, g.dtype);  // the gradient's dtype is the output's: what saturated there has none
  const View first(da ? *da : *db), second(db ? *db : *da);
  Elementwise<C> loop(shape, first);
  loop.input(g);
  loop.input(a);
  loop.input(b);
  loop.output(first, da != nullptr);
  loop.output(second, db != nullptr);
  loop.run(da && db ? pick<&backward_loop<C, true, true>>()
           : da     ? pick<&backward_loop<C, true, false>>()
                    : pick<&backward_loop<C, false, true>>(),
           &op);
}

std::tuple<Tensor, Tensor> safe_div_backward(const Tensor& grad, const Tensor& input, const Tensor& other,
                                             const std::optional<double>& eps, bool need_input, bool need_other,
                                             const std::optional<ScalarType>& input_dtype,
                                             const std::optional<ScalarType>& other_dtype) {
  const View g(grad), a(input), b(other);
  STD_TORCH_CHECK(g.is_floating(), "_safe_div_backward: grad must be floating point");
  const Shape shape = broadcast(a.shape(), b.shape());
  const DType da_type = floating(input_dtype, a.dtype), db_type = floating(other_dtype, b.dtype);
  const Tensor da = need_input ? output_like(shape, da_type, input, a) : empty_vector(da_type, input);
  const Tensor db = need_other ? output_like(shape, db_type, other, b) : empty_vector(db_type, other);
  const Tensor *first = need_input ? &da : nullptr, *second = need_other ? &db : nullptr;
  const bool in_double = g.dtype == DType::kDouble || a.dtype == DType::kDouble || b.dtype == DType::kDouble ||
                         (need_input && da_type == DType::kDouble) || (need_other && db_type == DType::kDouble);
  if (!first && !second) return {da, db};
  const auto run = in_double ? divide_backward<double> : divide_backward<float>;
  run(shape, first, second, g, a, b, floor_of(eps, in_double));
  return {da, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_safe_div", TORCH_BOX(&safe_div));
  m.impl("_safe_div_backward", TORCH_BOX(&safe_div_backward));
}

}  // namespace safeops::cpu
