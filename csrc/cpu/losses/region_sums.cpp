// The sums that the region losses (dice, Tversky) are made of, for each image n and class c over its kept pixels:
//
//     sums[0] = sum p t    sums[1] = sum p, or p^2    sums[2] = sum t, or t^2    sums[3] = how many pixels are kept
//
// p (N, C, d1, ...): the prediction. t: the target, of p's shape, or 1 where class indices (N, d1, ...) say c, else 0.
// I/O: forward reads p, t, mask once; backward reads them and writes dp, dt.
#include "cpu/engine/row_sums.h"
#include "cpu/losses/regions.h"

namespace safeops::cpu {

namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr int kSums = 4;

// ---- forward

// x, or 0 where it is not kept
template <class C>
void kept_loop(const C* x, const uint8_t* keep, int64_t n, C* to) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) to[i] = select_or_zero(keep[i] != 0, x[i]);
}

// Adds the three sums of a chunk. In double from the products on, because the loss may cancel what they have in common;
// the loop waits for memory all the same.
template <class C, bool kSquared>
void sums_loop(const C* p, const C* t, int64_t n, double* sums) {
  double both = 0, input = 0, target = 0;
  _Pragma("omp simd reduction(+ : both, input, target)")
  for (int64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(p[i]), y = static_cast<double>(t[i]);
    both += x * y;
    input += kSquared ? x * x : x;
    target += kSquared ? y * y : y;
  }
  sums[0] += both, sums[1] += input, sums[2] += target;
}

template <class C>
struct Sum {
  static constexpr bool kWantsAll = false;
  double* partials;  // (units, classes of a unit, kSums)
  int64_t group;
  decltype(pick<&sums_loop<C, false>>()) add;
  decltype(pick<&kept_loop<C>>()) select_kept = pick<&kept_loop<C>>();
  SumGroups<uint8_t, int64_t> count{};
  double sums[kSums] = {};
  alignas(64) C input[kBuffer] = {}, target[kBuffer] = {};

  Sum(bool squared, double* partials_, int64_t group_)
      : partials(partials_), group(group_), add(squared ? pick<&sums_loop<C, true>>() : pick<&sums_loop<C, false>>()) {}

  bool by_index() const { return false; }

  void begin(int64_t, int64_t, int64_t) { std::fill_n(sums, kSums, 0.0); }

  void chunk(const Pixels<C>& x) {
    const C *p = x.p, *t = x.t;
    int64_t kept = x.n;
    if (x.keep) {
      select_kept(p, x.keep, x.n, input);
      select_kept(t, x.keep, x.n, target);
      count.rows(x.keep, 1, x.n, &kept);
      p = input, t = target;
    }
    add(p, t, x.n, sums);
    sums[3] += static_cast<double>(kept);
  }

  void end(int64_t unit, int64_t c) const { std::copy_n(sums, kSums, partials + (unit * group + c) * kSums); }
};

// (kSums, N, C) from the units' partial sums, in the order of the pixels, whatever the threads did.
template <class C>
bool forward(const Regions<C>& r, bool squared, double* out) {
  const std::unique_ptr<double[]> partials(new double[r.images * r.blocks * r.groups * r.group * kSums]);
  const bool good = r.run([&] { return Sum<C>(squared, partials.get(), r.group); });
  const int64_t each = r.images * r.classes;
  for (int64_t i = 0; i < each; ++i) {
    const int64_t n = i / r.classes, c = i % r.classes;
    double sums[kSums] = {};
    for (int64_t b = 0; b < r.blocks; ++b) {
      const int64_t unit = (n * r.blocks + b) * r.groups + c / r.group;
      for (int k = 0; k < kSums; ++k) sums[k] += partials[(unit * r.group + c % r.group) * kSums + k];
    }
    for (int k = 0; k < kSums; ++k) out[k * each + i] = sums[k];
  }
  return good;
}

// ---- backward

// dx = keep ? both other + own (squared: 2 own x) : 0, of the sums' gradients `both` and `own`. In double, because the
// two may cancel; the loop waits for memory all the same.
template <class C, bool kKeep, bool kSquared>
void gradient_loop(const C* x, const C* other, const uint8_t* keep, int64_t n, double both, double own, C* dx) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const double slope = both * static_cast<double>(other[i]) + (kSquared ? own * static_cast<double>(x[i]) : own);
    dx[i] = select_or_zero(kKeep ? keep[i] != 0 : true, static_cast<C>(slope));
  }
}

// The same of class indices, where nothing is squared: two numbers, and no need to read the prediction.
template <class C, bool kKeep>
void index_gradient_loop(const int32_t* index, int32_t c, const uint8_t* keep, int64_t n, C hit, C miss, C* dx) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i)
    dx[i] = select_or_zero(kKeep ? keep[i] != 0 : true, select(index[i] == c, hit, miss));
}

template <class C>
auto pick_gradient(bool keep, bool squared) {
  if (squared) return keep ? pick<&gradient_loop<C, true, true>>() : pick<&gradient_loop<C, false, true>>();
  return keep ? pick<&gradient_loop<C, true, false>>() : pick<&gradient_loop<C, false, false>>();
}

template <class C>
struct Gradient {
  static constexpr bool kWantsAll = true;
  const Regions<C>& r;
  View grad;  // (kSums, N, C)
  bool squared;
  const Sink<C>*input, *target;  // null where not wanted
  decltype(pick_gradient<C>(true, true)) kept_slopes = pick_gradient<C>(true, squared),
                                         all_slopes = pick_gradient<C>(false, squared);
  decltype(pick<&index_gradient_loop<C, true>>()) kept_indices = pick<&index_gradient_loop<C, true>>(),
                                                  all_indices = pick<&index_gradient_loop<C, false>>();
  double of[3] = {};  // the sums' gradients
  int64_t of_class = 0;
  bool there = true;
  alignas(64) C buffer[kBuffer] = {};

  void begin(int64_t, int64_t n, int64_t c) {
    there = r.there(c), of_class = c;
    for (int k = 0; k < 3; ++k) {
      const double* g = reinterpret_cast<const double*>(grad.data);
      of[k] = g[k * grad.strides[0] + n * grad.strides[1] + c * grad.strides[2]] * (squared && k ? 2 : 1);
    }
  }

  bool by_index() const { return r.indexed && !squared; }

  void chunk(const Pixels<C>& x) {
    if (input) write(*input, x.p, x.t, x, of[1]);
    if (target) write(*target, x.t, x.p, x, of[2]);
  }

  void write(const Sink<C>& sink, const C* own, const C* other, const Pixels<C>& x, double g) {
    C* to = sink.target(x.at, buffer);
    if (!there)
      std::fill_n(to, x.n, C(0));
    else if (by_index())
      (x.keep ? kept_indices : all_indices)(x.index, static_cast<int32_t>(of_class), x.keep, x.n,
                                            static_cast<C>(of[0] + g), static_cast<C>(of[0] * 0 + g), to);
    else
      (x.keep ? kept_slopes : all_slopes)(own, other, x.keep, x.n, of[0], g, to);
    sink.commit(x.at, x.n, buffer);
  }

  void end(int64_t, int64_t) const {}
};

template <class C>
bool backward(const Regions<C>& r, const Tensor& grad, bool squared, const Tensor* dx, const Tensor* dy) {
  Sink<C> input, target;
  if (dx) input.bind(View(*dx), r.shape, r.order);
  if (dy) target.bind(View(*dy), r.shape, r.order);
  return r.run([&] {
    return Gradient<C>{r, View(grad), squared, dx ? &input : nullptr, dy ? &target : nullptr};
  });
}

// ---- the ops

void check(bool good) { STD_TORCH_CHECK(good, "_region_sums: a class index of target is out of range"); }

Tensor region_sums(const Tensor& input, const Tensor& target, const OptionalTensor& mask, const OptionalTensor& exists,
                   const std::optional<int64_t>& ignore_index, bool squared) {
  const View x(input), y(target);
  STD_TORCH_CHECK(x.ndim >= 2, "safeops: input must be (N, C, d1, ...)");
  const int64_t sizes[] = {kSums, x.sizes[0], x.sizes[1]};
  const Tensor sums = empty(Shape(3, sizes), DType::kDouble, input);
  double* out = reinterpret_cast<double*>(View(sums).data);
  const bool wide = x.dtype == DType::kDouble || y.dtype == DType::kDouble;
  check(wide ? forward(Regions<double>(x, y, mask, exists, ignore_index), squared, out)
             : forward(Regions<float>(x, y, mask, exists, ignore_index), squared, out));
  return sums;
}

std::tuple<Tensor, Tensor> region_sums_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                const OptionalTensor& mask, const OptionalTensor& exists,
                                                const std::optional<int64_t>& ignore_index, bool squared,
                                                bool need_input, bool need_target) {
  const View x(input), y(target), g(grad);
  STD_TORCH_CHECK(x.ndim >= 2 && g.dtype == DType::kDouble && g.ndim == 3 && g.sizes[0] == kSums &&
                      g.sizes[1] == x.sizes[0] && g.sizes[2] == x.sizes[1],
                  "_region_sums_backward: grad must be float64 of shape (4, N, C)");
  STD_TORCH_CHECK(!need_target || y.is_floating(), "_region_sums_backward: class indices have no gradient");
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const DType type = y.is_floating() ? y.dtype : DType::kFloat;
  const Tensor dy = need_target ? output_like(y.shape(), type, target, y) : empty_vector(type, target);
  const Tensor *first = need_input ? &dx : nullptr, *second = need_target ? &dy : nullptr;
  const bool wide = x.dtype == DType::kDouble || y.dtype == DType::kDouble;
  if (first || second)
    check(wide ? backward(Regions<double>(x, y, mask, exists, ignore_index), grad, squared, first, second)
               : backward(Regions<float>(x, y, mask, exists, ignore_index), grad, squared, first, second));
  return {dx, dy};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_region_sums", TORCH_BOX(&region_sums));
  m.impl("_region_sums_backward", TORCH_BOX(&region_sums_backward));
}

}  // namespace safeops::cpu
