// The inner loops of the variance, and the merge of two states.
//
// Deviations are taken from a pivot near the mean, so that little cancels. A row's pivot is the mean so far, and at
// first the mean of its first chunk. A column's pivot is the first kept element of each block. A pivot costs digits in
// proportion to its distance from the mean in standard deviations. Without weights that distance is small. With weights
// it may be large, since a distant pivot may have almost no weight. So weighted rows take the mean of each chunk as the
// pivot, and weighted columns add their elements one by one.
#pragma once

#include "cpu/reductions/statistic_worker.h"

namespace safeops::cpu {

// Computes sums = (sum w d, sum w d^2) with d = x - pivot.
template <class C, int kBytes, bool kKeep, bool kWeight>
void deviations_row(const Elements<C>& e, int64_t n, C pivot, double* sums) {
  using V = typename Register<C, kBytes>::V;
  constexpr int64_t most = 64 * Register<C, kBytes>::kLanes;
  double first = 0, second = 0;
  for (int64_t i = 0; i < n; i += most) {
    V s1[4] = {}, s2[4] = {};
    for_vectors<C, kBytes, kKeep, kWeight>(e.from(i), n - i < most ? n - i : most,
                                         [&](int k, const V& x, const auto& keep, const V& w)
                                             __attribute__((always_inline)) {
                                               V d = x - pivot;
                                               Register<C, kBytes>::select_or_zero(d, keep);
                                               const V wd = kWeight ? V(w * d) : d;
                                               s1[k] += wd;
                                               s2[k] += wd * d;
                                             });
    sum_vectors(s1, first);
    sum_vectors(s2, second);
  }
  sums[0] = first;
  sums[1] = second;
}

// Returns w, or NaN if it is negative: a partial sum of such weights may be 0, and then has no mean to deviate from.
inline double frequency(double w) { return select(w < 0, std::numeric_limits<double>::quiet_NaN(), w); }

// Returns the sum of weights, in double: little may be left of it after the correction is subtracted.
template <class C>
double weight_row(const C* w, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += frequency(static_cast<double>(w[i]));
  return sum;
}

// Computes what deviations_row does, but in double, for elements that float cannot square.
template <class C, bool kKeep, bool kWeight>
void careful_row(const Elements<C>& e, int64_t n, double pivot, double* sums) {
  double first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
  for (int64_t i = 0; i < n; ++i) {
    double d = static_cast<double>(e.x[i]) - pivot;
    if constexpr (kKeep) d = select_or_zero(e.keep[i] != 0, d);
    double wd = d;
    if constexpr (kWeight) wd *= static_cast<double>(e.w[i]);
    first += wd;
    second += wd * d;
  }
  sums[0] = first;
  sums[1] = second;
}

// A column's pivot is NaN until the column has a kept element.
template <class C>
struct MomentColumns {
  C *pivot, *s1, *s2;
};

template <class C, bool kKeep>
void seed_columns(const Elements<C>& e, int64_t n, int64_t period, C* pivot) {
  for_columns(e, n, period, [&](const Elements<C>& row, int64_t p) __attribute__((always_inline)) {
    const C old = pivot[p];
    C value = row.x[p];
    if constexpr (kKeep) value = select(row.keep[p] != 0, value, old);
    pivot[p] = select(old == old, old, value);
  });
}

template <class C, bool kKeep>
void moment_columns(const Elements<C>& e, int64_t n, int64_t period, const MomentColumns<C>& columns) {
  const C* pivot = columns.pivot;
  C *s1 = columns.s1, *s2 = columns.s2;
  for_columns(e, n, period, [&](const Elements<C>& row, int64_t p) __attribute__((always_inline)) {
    C d = row.x[p] - pivot[p];
    if constexpr (kKeep) d = select_or_zero(row.keep[p] != 0, d);
    s1[p] += d;
    s2[p] += d * d;
  });
}

template <class C>
bool any_nan_loop(const C* x, int64_t n) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < n; ++i) any |= x[i] != x[i];
  return any;
}

// Adds elements to their columns one by one, in double, by West's weighted form of Welford's update: nothing cancels in
// it, whatever the weights.
template <class C, bool kWeight>
void join_columns(const Elements<C>& e, int64_t n, int64_t period, double* weight, double* mean, double* m2,
                double* joined) {
  for_columns(e, n, period, [&](const Elements<C>& row, int64_t p) __attribute__((always_inline)) {
    const double one = select(row.keep[p] != 0, 1.0, 0.0);
    double more = one;
    if constexpr (kWeight) more = select_or_zero(row.keep[p] != 0, frequency(static_cast<double>(row.w[p])));
    const double old = weight[p], total = old + more;
    const double shift = select_or_zero(more != 0, static_cast<double>(row.x[p]) - mean[p]);
    // mean += shift w / (sum w),  m2 += shift^2 w (old sum w) / (sum w)
    const double step = shift * select(total != 0, more / select(total != 0, total, 1.0), 0.0);
    weight[p] = total;
    mean[p] += step;
    m2[p] += old * shift * step + (shift - shift);  // an infinite element makes it NaN
    joined[p] += one;
  });
}

// Merges a part of weight n, with the sum s1 and the sum of squares s2 of its deviations from p, into the state
// (w, mean, m2), by Chan's formula:
//     (1) part mean = p + s1 / n,  part m2 = s2 - s1^2 / n
//     (2) shift = part mean - mean,  mean += shift n / (w + n),  m2 += part m2 + shift^2 w n / (w + n)
inline void merge_moments(double& w, double& mean, double& m2, double n, double p, double s1, double s2) {
  const bool any = n != 0;
  const double total = w + n, fraction = select_or_zero(total != 0, n / select(total != 0, total, 1.0));
  const double offset = select_or_zero(any, s1 / select(any, n, 1.0)), part_mean = p + offset;
  const double base = select((w == 0) & any, part_mean, mean), shift = select_or_zero(any, part_mean - base);
  const double step = shift * fraction;
  m2 += (s2 - s1 * offset) + w * shift * step;
  mean = base + step;
  w = total;
}

// Computes the states of columns from their counts, pivots and sums of deviations.
template <class C>
void moments_loop(const int64_t* kept, const C* pivot, const C* s1, const C* s2, int64_t count, const States& state) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < count; ++i) {
    double w = 0, mean = 0, m2 = 0;
    merge_moments(w, mean, m2, static_cast<double>(kept[i]), static_cast<double>(pivot[i]), static_cast<double>(s1[i]),
                  static_cast<double>(s2[i]));
    state.weight[i] = w, state.value[i] = mean, state.second[i] = m2;
  }
}

inline void merge_moments_loop(const States& into, const double* n, const double* p, const double* s1,
                               const double* s2, int64_t count) {
  double *w = into.weight, *mean = into.value, *m2 = into.second;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < count; ++i) merge_moments(w[i], mean[i], m2[i], n[i], p[i], s1[i], s2[i]);
}

}  // namespace safeops::cpu
