// The driver of the binary functions. A function is a struct
//
//     template <class C> struct SafeAtan2 {
//       explicit SafeAtan2(const Arguments& arguments);
//       C value(C a, C b) const;
//       Slopes<C> slopes(C g, C a, C b) const;    // g times the two derivatives
//     };
//     SAFEOPS_BINARY(safe_atan2, SafeAtan2)
//
// A function with a faster loop than the one over value() or slopes() specialises BinaryLoops (safe_div.cpp).
// I/O: forward reads a, b and writes y; backward reads g, a, b and writes da, db.
#pragma once

#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

template <template <class> class Function, class C>
struct BinaryLoops {
  static void value(const void* op, const Chunk<C>& chunk) {
    const Function<C> f = *static_cast<const Function<C>*>(op);
    const C *a = chunk.in[0], *b = chunk.in[1];
    C* out = chunk.out[0];
    SAFEOPS_SIMD
    for (int64_t i = 0; i < chunk.n; ++i) out[i] = f.value(a[i], b[i]);
  }

  // kInput, kOther: the gradient of a, or of b, is wanted. The compiler removes code that only an unwanted gradient
  // needs.
  template <bool kInput, bool kOther>
  static void slopes(const void* op, const Chunk<C>& chunk) {
    const Function<C> f = *static_cast<const Function<C>*>(op);
    const C *g = chunk.in[0], *a = chunk.in[1], *b = chunk.in[2];
    C *da = chunk.out[0], *db = chunk.out[1];
    SAFEOPS_SIMD
    for (int64_t i = 0; i < chunk.n; ++i) {
      const Slopes<C> d = f.slopes(g[i], a[i], b[i]);
      if constexpr (kInput) da[i] = d.first;
      if constexpr (kOther) db[i] = d.second;
    }
  }
};

template <template <class> class Function>
struct Binary {
  template <class C>
  static void run(const Shape& shape, const View& out, const View& a, const View& b, const Arguments& arguments) {
    const Function<C> op(arguments);
    Elementwise<C> loop(shape, out);
    loop.input(a);
    loop.input(b);
    loop.output(out);
    loop.run(pick<&BinaryLoops<Function, C>::value>(), &op);
  }

  static Tensor forward(const Tensor& input, const std::optional<Tensor>& other, const std::optional<double>& eps,
                        double fill_value, const std::optional<ScalarType>& dtype, std::optional<double> number) {
    const View a(input), b = second(other, number);
    const Shape shape = broadcast(a.shape(), b.shape());
    const DType other_type = other ? b.dtype : a.dtype, type = floating(dtype, a.dtype);
    STD_TORCH_CHECK(dtype || a.dtype == other_type, "safeops: dtype is needed where the operands' dtypes differ");
    const Tensor result = output_like(shape, type, input, a);
    const bool in_double = a.dtype == DType::kDouble || other_type == DType::kDouble || type == DType::kDouble;
    const auto call = in_double ? run<double> : run<float>;
    call(shape, View(result), a, b, Arguments(eps, fill_value, type, in_double));
    return result;
  }

  // Returns the second operand: a tensor, or a number that broadcasts.
  static View second(const std::optional<Tensor>& other, std::optional<double>& number) {
    STD_TORCH_CHECK(other.has_value() != number.has_value(), "safeops: either other or number is needed");
    return other ? View(*other) : View(&*number, DType::kDouble);
  }

  template <class C>
  static void run_backward(const Shape& shape, const Tensor* da, const Tensor* db, const View& g, const View& a,
                           const View& b, const Arguments& arguments) {
    using Loops = BinaryLoops<Function, C>;
    const Function<C> op(arguments);
    const View first(da ? *da : *db), second(db ? *db : *da);
    Elementwise<C> loop(shape, first);
    loop.input(g);
    loop.input(a);
    loop.input(b);
    loop.output(first, da != nullptr);
    loop.output(second, db != nullptr);
    loop.run(da && db ? pick<&Loops::template slopes<true, true>>()
             : da     ? pick<&Loops::template slopes<true, false>>()
                      : pick<&Loops::template slopes<false, true>>(),
             &op);
  }

  // grad has the output's dtype: elements whose value saturates in this dtype have slope 0.
  static std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& input,
                                             const std::optional<Tensor>& other, const std::optional<double>& eps,
                                             bool need_input, bool need_other,
                                             const std::optional<ScalarType>& input_dtype,
                                             const std::optional<ScalarType>& other_dtype,
                                             std::optional<double> number) {
    const View g(grad), a(input), b = second(other, number);
    STD_TORCH_CHECK(g.is_floating(), "safeops: grad must be floating point");
    need_other = need_other && other;
    const Shape shape = broadcast(a.shape(), b.shape());
    const DType other_type = other ? b.dtype : a.dtype, da_type = floating(input_dtype, a.dtype),
                db_type = floating(other_dtype, other_type);
    const Tensor da = need_input ? output_like(shape, da_type, input, a) : empty_vector(da_type, input);
    const Tensor db = need_other ? output_like(shape, db_type, *other, b) : empty_vector(db_type, input);
    const Tensor *first = need_input ? &da : nullptr, *last = need_other ? &db : nullptr;
    const bool in_double = g.dtype == DType::kDouble || a.dtype == DType::kDouble || other_type == DType::kDouble ||
                           (need_input && da_type == DType::kDouble) || (need_other && db_type == DType::kDouble);
    if (!first && !last) return {da, db};
    const auto call = in_double ? run_backward<double> : run_backward<float>;
    call(shape, first, last, g, a, b, Arguments(eps, 0.0, g.dtype, in_double));
    return {da, db};
  }
};

}  // namespace safeops::cpu

#define SAFEOPS_BINARY(name, Function)                                     \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {                             \
    m.impl("_" #name, TORCH_BOX(&Binary<Function>::forward));              \
    m.impl("_" #name "_backward", TORCH_BOX(&Binary<Function>::backward)); \
  }
