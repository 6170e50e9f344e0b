// The sums over the classes of a row that its cross entropy is made of, piece by piece.
#pragma once

#include "cpu/rows/cross_entropy.h"

namespace safeops::cpu {

namespace {

// States: of indices the first three, of probabilities four, with smoothing all: of few classes, merging them is much
// of the work. Sums of x are taken about the largest of their piece, so that they do not cancel against A L: in `kSum`
// and `kOwn` they are those of x itself again.
enum {
  kTop,     // the largest value
  kTotal,   // sum of exp(x - it); where it is inf, how many are
  kOwn,     // x_y, or sum of w q x
  kMass,    // sum of w q
  kSum,     // sum of w x over the classes that are not -inf
  kWeight,  // sum of their w
  kCount,   // A
  kStates
};
enum { kRowWeight = kFirstFree };

template <class C>
int states_of(const CrossEntropy<C>& op) {
  return op.has_even ? kStates : op.shares ? kMass + 1 : kOwn + 1;
}

template <class C>
void prepare(const void*, int64_t rows, const double* const* given, C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    split_place(given[0][r], r, parameters);
    parameters[kRowWeight][r] = static_cast<C>(given[1][r]);
  }
}

template <class C>
constexpr C kInfinity = std::numeric_limits<C>::infinity();

// How many of n values are +inf; NaN if one is NaN.
template <class C>
double count_infinite(const C* x, int64_t n, int64_t step) {
  double count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double value = x[i * step];
    count += value != value ? value : value == kInfinity<double>;
  }
  return count;
}

template <class C, int kBytes>
void accumulate_rows(const void* op, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  const auto& of = *static_cast<const CrossEntropy<C>*>(op);
  alignas(64) C terms[kBuffer], counts[kBuffer];
  const int64_t n = p.width;
  const auto sum = [&](const C* of_terms) {
    return sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(of_terms + i, v); });
  };
  for (int64_t r = 0; r < p.height; ++r) {
    for (int i = 0; i < states_of(of); ++i) states[i][r] = i == kTop ? kNothing<double> : 0.0;
    if (!is_kept(parameters, r)) continue;
    const C* x = p.in[0] + r * p.step[0];
    const C top = max_run<kBytes>(x, n), pivot = pivot_of(top);
    states[kTop][r] = top;
    states[kTotal][r] =
        top == kInfinity<C>
            ? count_infinite(x, n, 1)
            : sum_exponentials<kBytes>(x, n, pivot, [&](int64_t i) { p.prefetch(r * n + i); });
    const C* w = of.weights ? of.weights + p.first : nullptr;
    if (of.shares) {
      const C* q = p.in[1] + r * p.step[1];
      for_blocks(n, [&](int64_t i) {
        counts[i] = w ? q[i] * w[i] : q[i];
        terms[i] = select(counts[i] == 0, C(0), counts[i] * (x[i] - pivot));
      });
      states[kMass][r] = sum(counts);
      states[kOwn][r] = sum(terms) + states[kMass][r] * pivot;
    } else {
      const int64_t own = place_of(parameters, r) - p.first;
      if (own >= 0 && own < n) states[kOwn][r] = x[own];
    }
    if (of.has_even) {
      if (!w) {  // a finite sum: every class exists
        const double all = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(x + i, v), v -= pivot; });
        if (all - all == 0) {
          states[kWeight][r] = states[kCount][r] = static_cast<double>(n);
          states[kSum][r] = all + static_cast<double>(n) * pivot;
          continue;
        }
      }
      for_blocks(n, [&](int64_t i) {
        counts[i] = select_or_zero(x[i] != kNothing<C>, C(1));
        terms[i] = select_or_zero(x[i] != kNothing<C>, x[i] - pivot);
      });
      states[kWeight][r] = states[kCount][r] = sum(counts);
      if (w) {
        for_blocks(n, [&](int64_t i) { counts[i] = select_or_zero(x[i] != kNothing<C>, w[i]); });
        states[kWeight][r] = sum(counts);
        for_blocks(n, [&](int64_t i) { counts[i] = terms[i] * w[i]; });
      }
      states[kSum][r] = sum(w ? counts : terms) + states[kWeight][r] * pivot;
    }
  }
}

template <class C>
void accumulate_columns(const void* op, const Piece<C>& p, const C* const* parameters, double* const* states) {
  const auto& of = *static_cast<const CrossEntropy<C>*>(op);
  alignas(64) C top[kChunk], sum[kChunk], weight[kChunk], count[kChunk];
  const int64_t n = p.width;
  const C* x = p.in[0];
  for (int64_t k = 0; k < n; ++k) top[k] = x[k];
  for (int64_t i = 1; i < p.height; ++i) {
    const C* xi = x + i * p.step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) top[k] = xi[k] > top[k] ? xi[k] : top[k];
  }
  C infinite = 0;
#pragma omp simd reduction(+ : infinite)
  for (int64_t k = 0; k < n; ++k) {
    states[kTop][k] = top[k];
    infinite += select_or_zero(top[k] == kInfinity<C>, C(1));
    top[k] = pivot_of(top[k]);
    sum[k] = 0;
  }
  for (int64_t i = 0; i < p.height; ++i) {
    const C* xi = x + i * p.step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) sum[k] += exp_term(xi[k] - top[k]);
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) {
    states[kTotal][k] = sum[k];
    states[kOwn][k] = 0;
  }
  if (of.has_even) std::fill_n(states[kMass], n, 0.0);
  for (int64_t k = 0; k < n && infinite != 0; ++k)
    if (top[k] == kInfinity<C>) states[kTotal][k] = count_infinite(x + k, p.height, p.step[0]);
  const C* w = of.weights ? of.weights + p.first : nullptr;
  if (of.shares) {
    for (int64_t k = 0; k < n; ++k) sum[k] = weight[k] = 0;
    for (int64_t i = 0; i < p.height; ++i) {
      const C *xi = x + i * p.step[0], *qi = p.in[1] + i * p.step[1], wi = w ? w[i] : C(1);
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C share = qi[k] * wi;
        weight[k] += share;
        sum[k] += select(share == 0, C(0), share * (xi[k] - top[k]));
      }
    }
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      states[kMass][k] = weight[k];
      states[kOwn][k] = sum[k] + static_cast<double>(weight[k]) * top[k];
    }
  } else {
    alignas(64) int32_t own[kChunk];
    own_lines(p, parameters, own);
    for (int64_t k = 0; k < n; ++k)
      states[kOwn][k] = select_or_zero(own[k] >= 0, x[std::max(own[k], 0) * p.step[0] + k]);
  }
  if (!of.has_even) return;
  for (int64_t k = 0; k < n; ++k) sum[k] = weight[k] = count[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *xi = x + i * p.step[0], wi = w ? w[i] : C(1);
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      count[k] += select_or_zero(xi[k] != kNothing<C>, C(1));
      weight[k] += select_or_zero(xi[k] != kNothing<C>, wi);
      sum[k] += select_or_zero(xi[k] != kNothing<C>, (xi[k] - top[k]) * wi);
    }
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) {
    states[kCount][k] = count[k];
    states[kWeight][k] = weight[k];
    states[kSum][k] = sum[k] + static_cast<double>(weight[k]) * top[k];
  }
}

template <class C, int kHowMany>
void merge(int64_t rows, double* const* into, const double* const* from) {
  merge_exponentials<C>(rows, into[kTop], into[kTotal], from[kTop], from[kTotal]);
  for (int i = kOwn; i < kHowMany; ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) into[i][r] += from[i][r];
  }
}

}  // namespace

}  // namespace safeops::cpu
