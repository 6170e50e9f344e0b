// Sums of squares of rows that neither overflow nor underflow, for normalize and cosine similarity.
//
// The state of a row is a scale (a power of two) and sums of products of values that were multiplied by the scale. The
// fast loops take scale 1 and the compute type. A row whose sum has left the safe range is summed again in double, with
// the scale that brings its largest value near 1. Sums of different scales are merged at the smaller scale.
#pragma once

#include <cmath>
#include <limits>

#include "common/squares.h"
#include "cpu/engine/rowwise.h"

namespace safeops::cpu {

// Returns the power of two, from 2^-1000 to 2^1000, whose product with `most` is in [1, 2) or nearest to it.
inline double scale_for(double most) {
  const int64_t exponent = static_cast<int64_t>(bit_cast<uint64_t>(most) >> 52 & 0x7FF) - 1023;
  const int64_t power = std::min<int64_t>(1000, std::max<int64_t>(-1000, -exponent));
  return bit_cast<double>(static_cast<uint64_t>(power + 1023) << 52);
}

template <class C>
inline double scale_of_row(const Piece<C>& p, int input, int64_t row) {
  double most = 0;
  if (!p.interleaved) {  // there may be many rows of zeros, which need no second loop
    const C* x = p.in[input] + row * p.step[input];
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < p.width; ++i) sum += std::fabs(x[i]);
    if (sum == 0) return scale_for(0);
  }
  for (int64_t i = 0; i < p.length(); ++i) {
    const double size = std::fabs(static_cast<double>(p.at(input, row, i)));
    most = size > most ? size : most;
  }
  return scale_for(most);
}

struct Floor {
  double eps;
};

// RowLoops::find_lost for states that are sums of squares.
template <class C, int... kSquares>
bool find_lost(int64_t rows, const double* const* states, C* recompute) {
  double rare = 0;
#pragma omp simd reduction(+ : rare)
  for (int64_t r = 0; r < rows; ++r) {
    const double mark = select_or_zero((squares_lost<C>(states[kSquares][r]) | ...), 1.0);
    recompute[r] = static_cast<C>(mark);
    rare += mark;
  }
  return rare != 0;
}

// Returns a sum of products, after the factors of each product are multiplied by ratio1 and ratio2.
inline double rescaled(double sum, double ratio1, double ratio2) { return sum == 0 ? sum : sum * ratio1 * ratio2; }

// Returns the norm that is saved for the backward: root / scale. A norm that overflows a double is stored negated and
// divided by kBeyond.
inline double saved_norm(double root, double scale) {
  const double norm = root / scale;
  return std::isinf(norm) && !std::isinf(root) ? -(root / (scale * kBeyond)) : norm;
}

inline bool at_most(double saved_norm, double eps) { return saved_norm >= 0 && saved_norm <= eps; }

// Splits a divisor, which may be tiny or huge: x / divisor = (x * scale) * ratio. scale is a power of two that brings
// the divisor near 1, and ratio = 1 / (divisor * scale).
template <class C>
inline void split_divisor(double divisor, C& scale, C& ratio) {
  constexpr int64_t most = sizeof(C) == 4 ? 126 : 1022;
  const int64_t exponent = static_cast<int64_t>(bit_cast<uint64_t>(divisor) >> 52 & 0x7FF) - 1023;
  const int64_t power = std::min(most, std::max(-most, -exponent));
  const double two = bit_cast<double>(static_cast<uint64_t>(power + 1023) << 52);
  scale = static_cast<C>(two);
  ratio = static_cast<C>(1.0 / (divisor * two));
}

// Splits the divisor max(norm, eps). saved: the norm, as saved_norm() returns it.
template <class C>
inline void split_norm(double saved, double eps, C& scale, C& ratio) {
  split_divisor(at_most(saved, eps) ? eps : std::fabs(saved), scale, ratio);
  if (saved < 0) ratio /= static_cast<C>(kBeyond);
}

}  // namespace safeops::cpu
