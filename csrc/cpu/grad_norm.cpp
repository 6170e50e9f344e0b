// The norm of all elements of a list of tensors together, in double: 1: sum |x|, 2: sqrt(sum x^2), inf: max |x|.
// I/O: read each tensor once.
#include "common/squares.h"
#include "multi_tensor.h"

namespace safeops::cpu {

namespace {

// n <= kChunk, in double: what is lost is nothing beside the fp32 result.
template <class C, bool kSquare>
double sum_loop(const C* x, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const double wide = x[i];
    sum += kSquare ? wide * wide : std::fabs(wide);
  }
  return sum;
}

// The largest magnitude as bits, above which NaN lies: no NaN is lost.
template <class C>
int64_t largest_loop(const C* x, int64_t n) {
  using T = std::make_signed_t<BitsOf<C>>;
  T largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const T size = bit_cast<T>(x[i]) & std::numeric_limits<T>::max();
    largest = size > largest ? size : largest;
  }
  return static_cast<int64_t>(largest);
}

struct Sum {
  double total = 0;

  template <class C>
  void fold(const C* x, int64_t n) {
    total += pick<&sum_loop<C, false>>()(x, n);
  }
  void merge(const Sum& other) { total += other.total; }
  double result() const { return total; }
};

struct Root {
  Squares squares;

  template <class C>
  void fold(const C* x, int64_t n) {
    const double sum = pick<&sum_loop<C, true>>()(x, n);
    // Of fp64 a square may have left the range: one by one, each where it belongs.
    if (sizeof(C) == 8 && !(sum > 0x1p-900 && sum < 0x1p900))
      for (int64_t i = 0; i < n; ++i) squares.add(static_cast<double>(x[i]));
    else
      squares.middle += sum;
  }
  void merge(const Root& other) { squares.add(other.squares); }
  double result() const { return squares.norm(); }
};

struct Largest {
  double most = 0;

  template <class C>
  void fold(const C* x, int64_t n) {
    const BitsOf<C> bits = static_cast<BitsOf<C>>(pick<&largest_loop<C>>()(x, n));
    merge({static_cast<double>(bit_cast<C>(bits))});
  }
  void merge(const Largest& other) { most = other.most <= most ? most : most != most ? most : other.most; }
  double result() const { return most; }
};

template <class Fold>
double total(const TensorList& list) {
  std::vector<Fold> parts(list.pieces());
  list.each_piece([&](const Member& member, int64_t piece, int64_t start, int64_t stop) {
    Fold part;  // a thread's own: neighbours in `parts` share cache lines
    const auto fold = [&](const auto* x, int64_t, int64_t n) { part.fold(x, n); };
    if (member.view.dtype == DType::kDouble)
      each_chunk<double>(member, start, stop, fold);
    else
      each_chunk<float>(member, start, stop, fold);
    parts[piece] = part;
  });
  Fold all;
  for (const Fold& part : parts) all.merge(part);
  return all.result();
}

Tensor grad_norm(const std::vector<Tensor>& inputs, double ord) {
  STD_TORCH_CHECK(ord == 1 || ord == 2 || ord == HUGE_VAL, "_grad_norm: no kernel for order ", ord);
  const TensorList list(inputs, "_grad_norm");
  const Tensor result = empty(Shape(), DType::kDouble, inputs[0]);
  double* to = reinterpret_cast<double*>(View(result).data);
  *to = ord == 1 ? total<Sum>(list) : ord == 2 ? total<Root>(list) : total<Largest>(list);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_grad_norm", TORCH_BOX(&grad_norm)); }

}  // namespace safeops::cpu
