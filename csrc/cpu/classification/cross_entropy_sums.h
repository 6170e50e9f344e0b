// Accumulates the sums over a row's classes for cross entropy and token_log_probs, piece by piece.
#pragma once

#include "cpu/classification/cross_entropy.h"

namespace safeops::cpu {

namespace {

// States of a row. Class indices use the first three states, probabilities and the entropy the first four, smoothing
// all: if classes are few, merging states is much of the work. Each piece sums x minus the piece's maximum, which keeps
// the digits that L - x needs; then it adds the maximum back to kLogitSum and kTargetLogit.
enum {
  kMax,          // the largest value
  kTotal,        // sum of exp(x - max); if max is inf, the number of infinite logits
  kTargetLogit,  // x_y, or sum of w q x
  kTargetWeight,         // sum of w q
  kLogitSum,          // sum of w x over the classes that are not -inf
  kWeightSum,       // sum of w over the classes that are not -inf
  kClassCount,        // A, the number of classes that are not -inf
  kStates,
  kEntropySum = kTargetWeight,  // for the entropy: sum of exp(x - max) (x - max)
  kBest = kLogitSum,     // for the argmax: the largest logit without softcap and temperature; NaN counts as the largest
  kIndex = kWeightSum  // class of kBest, the first one if there are several
};
enum { kRowWeight = kFirstFree };

template <class C>
int states_of(const CrossEntropy<C>& op) {
  if (op.has_argmax) return kIndex + 1;
  return op.has_uniform ? kStates : op.has_probabilities || op.has_entropy ? kTargetWeight + 1 : kTargetLogit + 1;
}

template <class C>
void prepare(const void*, int64_t rows, const double* const* row_inputs, C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    split_class_index(row_inputs[0][r], r, parameters);
    parameters[kRowWeight][r] = static_cast<C>(row_inputs[1][r]);
  }
}

template <class C>
constexpr C kInfinity = std::numeric_limits<C>::infinity();

// Returns the number of values that are +inf, or NaN if one is NaN.
template <class C>
double count_infinite(const C* x, int64_t n, int64_t step) {
  double count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double value = x[i * step];
    count += value != value ? value : value == kInfinity<double>;
  }
  return count;
}

template <class C>
const C* logits_as_they_are(const CrossEntropy<C>& op, const Piece<C>& p, int64_t& step) {
  const int input = op.logits.changed ? 1 : 0;
  step = p.step[input];
  return p.in[input];
}

// Sets `best` to the largest of n values and returns its first index. NaN counts as the largest.
template <int kBytes, class C>
inline int64_t best_run(const C* x, int64_t n, double& best) {
  const C maximum = max_run<kBytes>(x, n);
  const auto length = static_cast<BitsOf<C>>(n);
  BitsOf<C> at = length, at_nan = length;
#pragma omp simd reduction(min : at, at_nan)
  for (BitsOf<C> i = 0; i < length; ++i) {
    const BitsOf<C> index = x[i] == maximum ? i : length, nan = x[i] != x[i] ? i : length;
    at = index < at ? index : at;
    at_nan = nan < at_nan ? nan : at_nan;
  }
  const bool has_nan = at_nan < length;
  best = has_nan ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(maximum);
  return static_cast<int64_t>(has_nan ? at_nan : at);
}

// Reduces a piece of rows: x and q are (rows, classes).
template <class C, int kBytes>
void accumulate_rows(const void* op, const Piece<C>& p, const C* const* parameters, double* const* states) {
  using V = Vector<C, kBytes>;
  const auto& call = *static_cast<const CrossEntropy<C>*>(op);
  alignas(64) C terms[kBuffer], counts[kBuffer];
  const int64_t n = p.width;
  const auto sum = [&](const C* values) {
    return sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(values + i, v); });
  };
  for (int64_t r = 0; r < p.height; ++r) {
    for (int i = 0; i < states_of(call); ++i) states[i][r] = i == kMax ? kMinusInfinity<double> : 0.0;
    if (!is_kept(parameters, r)) continue;
    const C* x = p.in[0] + r * p.step[0];
    const C maximum = max_run<kBytes>(x, n), pivot = pivot_of(maximum);
    states[kMax][r] = maximum;
    if (call.has_argmax) {
      int64_t step;
      const C* line = logits_as_they_are(call, p, step) + r * step;
      states[kIndex][r] = static_cast<double>(p.first + best_run<kBytes>(line, n, states[kBest][r]));
    }
    if (call.has_entropy) {
      for_blocks(n, [&](int64_t i) {
        counts[i] = exp_term(x[i] - pivot);
        terms[i] = select_or_zero(counts[i] != 0, counts[i] * (x[i] - pivot));
      });
      states[kEntropySum][r] = sum(terms);
    }
    states[kTotal][r] =
        maximum == kInfinity<C> ? count_infinite(x, n, 1)
        : call.has_entropy
            ? sum(counts)
            : sum_exponentials<kBytes>(x, n, pivot, [&](int64_t i) { p.prefetch(r * n + i); });
    const C* w = call.weights ? call.weights + p.first : nullptr;
    if (call.has_probabilities) {
      const C* q = p.in[1] + r * p.step[1];
      for_blocks(n, [&](int64_t i) {
        counts[i] = w ? q[i] * w[i] : q[i];
        terms[i] = select(counts[i] == 0, C(0), counts[i] * (x[i] - pivot));
      });
      states[kTargetWeight][r] = sum(counts);
      states[kTargetLogit][r] = sum(terms) + states[kTargetWeight][r] * pivot;
    } else {
      const int64_t target = class_index_of(parameters, r) - p.first;
      if (target >= 0 && target < n) states[kTargetLogit][r] = x[target];
    }
    if (call.has_uniform) {
      if (!w) {  // a finite sum shows that no class is -inf
        const double sum_of_x = sum_run<kBytes, C>(n, [&](int64_t i, V& v) { load_vector(x + i, v), v -= pivot; });
        if (sum_of_x - sum_of_x == 0) {
          states[kWeightSum][r] = states[kClassCount][r] = static_cast<double>(n);
          states[kLogitSum][r] = sum_of_x + static_cast<double>(n) * pivot;
          continue;
        }
      }
      for_blocks(n, [&](int64_t i) {
        counts[i] = select_or_zero(x[i] != kMinusInfinity<C>, C(1));
        terms[i] = select_or_zero(x[i] != kMinusInfinity<C>, x[i] - pivot);
      });
      states[kWeightSum][r] = states[kClassCount][r] = sum(counts);
      if (w) {
        for_blocks(n, [&](int64_t i) { counts[i] = select_or_zero(x[i] != kMinusInfinity<C>, w[i]); });
        states[kWeightSum][r] = sum(counts);
        for_blocks(n, [&](int64_t i) { counts[i] = terms[i] * w[i]; });
      }
      states[kLogitSum][r] = sum(w ? counts : terms) + states[kWeightSum][r] * pivot;
    }
  }
}

// Reduces a piece of rows side by side: x and q are (classes, rows).
template <class C>
void accumulate_columns(const void* op, const Piece<C>& p, const C* const* parameters, double* const* states) {
  const auto& call = *static_cast<const CrossEntropy<C>*>(op);
  alignas(64) C maximum[kChunk], sum[kChunk], weight[kChunk], count[kChunk];
  const int64_t n = p.width;
  const C* x = p.in[0];
  for (int64_t k = 0; k < n; ++k) maximum[k] = x[k];
  for (int64_t i = 1; i < p.height; ++i) {
    const C* xi = x + i * p.step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) maximum[k] = xi[k] > maximum[k] ? xi[k] : maximum[k];
  }
  C infinite = 0;
#pragma omp simd reduction(+ : infinite)
  for (int64_t k = 0; k < n; ++k) {
    states[kMax][k] = maximum[k];
    infinite += select_or_zero(maximum[k] == kInfinity<C>, C(1));
    maximum[k] = pivot_of(maximum[k]);
    sum[k] = 0;
  }
  for (int64_t i = 0; i < p.height; ++i) {
    const C* xi = x + i * p.step[0];
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) sum[k] += exp_term(xi[k] - maximum[k]);
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) {
    states[kTotal][k] = sum[k];
    states[kTargetLogit][k] = 0;
  }
  if (call.has_entropy) {
    for (int64_t k = 0; k < n; ++k) weight[k] = 0;
    for (int64_t i = 0; i < p.height; ++i) {
      const C* xi = x + i * p.step[0];
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C e = exp_term(xi[k] - maximum[k]);
        weight[k] += select_or_zero(e != 0, e * (xi[k] - maximum[k]));
      }
    }
    for (int64_t k = 0; k < n; ++k) states[kEntropySum][k] = weight[k];
  }
  if (call.has_argmax) {
    int64_t step;
    const C* line = logits_as_they_are(call, p, step);
    for (int64_t k = 0; k < n; ++k) weight[k] = line[k], count[k] = 0;
    for (int64_t i = 1; i < p.height; ++i) {
      line += step;
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const bool larger = (!(line[k] <= weight[k])) & (weight[k] == weight[k]);
        weight[k] = select(larger, line[k], weight[k]);
        count[k] = select(larger, static_cast<C>(i), count[k]);
      }
    }
    for (int64_t k = 0; k < n; ++k) {
      states[kBest][k] = weight[k];
      states[kIndex][k] = static_cast<double>(p.first) + count[k];
    }
  }
  if (call.has_uniform) std::fill_n(states[kTargetWeight], n, 0.0);
  for (int64_t k = 0; k < n && infinite != 0; ++k)
    if (maximum[k] == kInfinity<C>) states[kTotal][k] = count_infinite(x + k, p.height, p.step[0]);
  const C* w = call.weights ? call.weights + p.first : nullptr;
  if (call.has_probabilities) {
    for (int64_t k = 0; k < n; ++k) sum[k] = weight[k] = 0;
    for (int64_t i = 0; i < p.height; ++i) {
      const C *xi = x + i * p.step[0], *qi = p.in[1] + i * p.step[1], wi = w ? w[i] : C(1);
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C target_weight = qi[k] * wi;
        weight[k] += target_weight;
        sum[k] += select(target_weight == 0, C(0), target_weight * (xi[k] - maximum[k]));
      }
    }
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      states[kTargetWeight][k] = weight[k];
      states[kTargetLogit][k] = sum[k] + static_cast<double>(weight[k]) * maximum[k];
    }
  } else {
    alignas(64) int32_t target_line[kChunk];
    target_lines(p, parameters, target_line);
    for (int64_t k = 0; k < n; ++k)
      states[kTargetLogit][k] = select_or_zero(target_line[k] >= 0, x[std::max(target_line[k], 0) * p.step[0] + k]);
  }
  if (!call.has_uniform) return;
  for (int64_t k = 0; k < n; ++k) sum[k] = weight[k] = count[k] = 0;
  for (int64_t i = 0; i < p.height; ++i) {
    const C *xi = x + i * p.step[0], wi = w ? w[i] : C(1);
    SAFEOPS_SIMD
    for (int64_t k = 0; k < n; ++k) {
      count[k] += select_or_zero(xi[k] != kMinusInfinity<C>, C(1));
      weight[k] += select_or_zero(xi[k] != kMinusInfinity<C>, wi);
      sum[k] += select_or_zero(xi[k] != kMinusInfinity<C>, (xi[k] - maximum[k]) * wi);
    }
  }
  SAFEOPS_SIMD
  for (int64_t k = 0; k < n; ++k) {
    states[kClassCount][k] = count[k];
    states[kWeightSum][k] = weight[k];
    states[kLogitSum][k] = sum[k] + static_cast<double>(weight[k]) * maximum[k];
  }
}

template <class C, int kHowMany>
void merge(int64_t rows, double* const* into, const double* const* from) {
  merge_exponentials<C>(rows, into[kMax], into[kTotal], from[kMax], from[kTotal]);
  for (int i = kTargetLogit; i < kHowMany; ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) into[i][r] += from[i][r];
  }
}

// Merges two states with M the larger maximum: a state (maximum a, total t, moment m) adds exp(a - M) (m + (a - M) t)
// to the moment.
template <class C>
void merge_moments(int64_t rows, double* const* into, const double* const* from) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double a = into[kMax][r], b = from[kMax][r], most = a > b ? a : b;
    const double total = into[kTotal][r], other = from[kTotal][r];
    const double moment = into[kEntropySum][r] + select_or_zero(total != 0 && a != most, (a - most) * total);
    const double other_moment = from[kEntropySum][r] + select_or_zero(other != 0 && b != most, (b - most) * other);
    into[kEntropySum][r] = moment * ratio_of<C>(a, most) + other_moment * ratio_of<C>(b, most);
  }
  merge<C, kTargetLogit + 1>(rows, into, from);
}

template <class C>
void merge_best(int64_t rows, double* const* into, const double* const* from) {
  merge_moments<C>(rows, into, from);
  for (int64_t r = 0; r < rows; ++r) {
    const double a = into[kBest][r], b = from[kBest][r];
    const bool as_large = a == b || (a != a && b != b), larger = a == a && !(b <= a);
    if (as_large ? from[kIndex][r] < into[kIndex][r] : larger)
      into[kBest][r] = b, into[kIndex][r] = from[kIndex][r];
  }
}

}  // namespace

}  // namespace safeops::cpu
