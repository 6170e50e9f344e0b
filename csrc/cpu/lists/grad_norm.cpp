// The norm of all elements of a list of tensors together, in double. Order 1: sum |x|, 2: sqrt(sum x^2), inf: max |x|.
// I/O: read each tensor once.
#include "common/squares.h"
#include "cpu/engine/vectors.h"
#include "cpu/lists/multi_tensor.h"

namespace safeops::cpu {

namespace {

// Returns sum x^2 or sum |x| in double, in which squares of fp32 numbers neither overflow nor underflow. Four separate
// sums hide the latency.
template <class C, int kBytes, bool kSquare>
double sum_loop(const C* x, int64_t n) {
  constexpr int64_t lanes = kBytes / sizeof(double);
  using V = Vector<double, kBytes>;
  using I = Vector<int64_t, kBytes>;
  V sum[4] = {};
  const auto add = [](V& to, const C* from) __attribute__((always_inline)) {
    Vector<C, lanes * sizeof(C)> stored;
    load_vector(from, stored);
    V wide = __builtin_convertvector(stored, V);
    if constexpr (kSquare)
      to += wide * wide;
    else
      to += reinterpret_cast<V>(reinterpret_cast<I>(wide) & std::numeric_limits<int64_t>::max());
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    add(sum[0], x + i);
    add(sum[1], x + i + lanes);
    add(sum[2], x + i + 2 * lanes);
    add(sum[3], x + i + 3 * lanes);
  }
  double total = 0;
  for (; i < n; ++i) total += kSquare ? static_cast<double>(x[i]) * x[i] : std::fabs(static_cast<double>(x[i]));
  sum_vectors(sum, total);
  return total;
}

template <class C, bool kSquare>
double sum_of(const C* x, int64_t n) {
  return pick_width<&sum_loop<C, 64, kSquare>, &sum_loop<C, 32, kSquare>, &sum_loop<C, 16, kSquare>>()(x, n);
}

// Returns the bits of the largest magnitude. NaN has larger bits than inf, so no NaN is lost.
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
  void add(const C* x, int64_t n) {
    total += sum_of<C, false>(x, n);
  }
  void merge(const Sum& other) { total += other.total; }
  double result() const { return total; }
};

struct Squared {
  template <class R>
  static void apply(typename R::V& x) {
    x = x * x;
  }
};

struct Root {
  Squares squares;

  // Adds sum x^2, computed in fp32 with at most 16 additions to a lane, or in double if squares may have over- or
  // underflowed.
  void add(const float* x, int64_t n) {
    const auto rows = pick_width<&sum_row<float, 64, false, false, Squared>, &sum_row<float, 32, false, false, Squared>,
                                 &sum_row<float, 16, false, false, Squared>>();
    const double sum = rows({x, nullptr, nullptr}, n);
    squares.middle += squares_lost<float>(sum) ? sum_of<float, true>(x, n) : sum;
  }
  void add(const double* x, int64_t n) {
    const double sum = sum_of<double, true>(x, n);
    if (squares_lost<double>(sum))
      for (int64_t i = 0; i < n; ++i) squares.add(x[i]);
    else
      squares.middle += sum;
  }
  void merge(const Root& other) { squares.add(other.squares); }
  double result() const { return squares.norm(); }
};

struct Largest {
  double most = 0;

  template <class C>
  void add(const C* x, int64_t n) {
    const BitsOf<C> bits = static_cast<BitsOf<C>>(pick<&largest_loop<C>>()(x, n));
    merge({static_cast<double>(bit_cast<C>(bits))});
  }
  void merge(const Largest& other) { most = other.most <= most ? most : most != most ? most : other.most; }
  double result() const { return most; }
};

template <class Norm>
double total(const TensorList& list) {
  std::vector<Norm> parts(list.pieces());
  list.each_piece([&](const Member& member, int64_t piece, int64_t start, int64_t stop) {
    Norm part;  // a local variable: neighbours in `parts` share cache lines with other threads
    const auto add = [&](const auto* x, int64_t, int64_t n) { part.add(x, n); };
    if (member.view.dtype == DType::kDouble)
      each_chunk<double>(member, start, stop, add);
    else
      each_chunk<float>(member, start, stop, add);
    parts[piece] = part;
  });
  Norm all;
  for (const Norm& part : parts) all.merge(part);
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
