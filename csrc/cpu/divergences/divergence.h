// Divergences of the distributions p = softmax(y / T) and q = softmax(x / T), with u = log p and v = log q. A
// divergence is a sum over the classes. Its gradient is p (f - sum p f) / T for y and q (h - sum q h) / T for x; each
// kind has its own f and h.
#pragma once

#include "cpu/engine/math.h"
#include "cpu/classification/classification.h"
#include "cpu/classification/softmax.h"

namespace safeops::cpu {

// row_stats, which the backward needs: for x and for y the maximum and log_total = log sum exp((x - maximum) / T); then
// the means sum q h and sum p f. (x - maximum is divided by T, not the logits: each quotient would be rounded, and for
// large logits the difference would be lost.)
enum DivergenceNumber { kMaximumX, kLogTotalX, kMaximumY, kLogTotalY, kMeanX, kMeanY, kRowStatCount };

// The term of a class: value is its part of the divergence, of_y is p f, of_x is q h.
template <class C>
struct Terms {
  C value, of_y, of_x;
};

// sum p (u - v).  f = u - v.  q h = -p, which sums to -1, so that the gradient for x is q - p.
struct Kl {
  static constexpr bool one_pass = true;

  template <class C>
  static Terms<C> terms(C u, C v, C p, C, C) {
    const C value = select_or_zero(p != 0, p * (u - v));
    return {value, value, -p};
  }
};

// sum b p log(p / m) + (1 - b) q log(q / m), m = b p + (1 - b) q.  f = b log(p / m),  h = (1 - b) log(q / m).
// If p >= q:
//     (1) log(p / m) = -log1p((1 - b) (q / p - 1)), whose argument is in [-1, 0]
//     (2) log(q / m) = log(p / m) + log(q / p)
// If q > p, p and q change places, and so do b and 1 - b.
struct Js {
  static constexpr bool one_pass = false;

  template <class C>
  static Terms<C> terms(C u, C v, C p, C q, C b) {
    const C d = v - u, below = select(d > 0, -d, d);
    const C log = math::log1p(select(d > 0, b, 1 - b) * math::expm1_nonpositive(below));
    const C of_y = select_or_zero(p != 0, b * p * (select(d > 0, below, C(0)) - log));
    const C of_x = select_or_zero(q != 0, (1 - b) * q * (select(d > 0, C(0), below) - log));
    return {of_y + of_x, of_y, of_x};
  }
};

// sum |p - q| / 2.  f = sign(p - q) / 2,  h = -f;  terms() returns p f and q h.
struct Tv {
  static constexpr bool one_pass = false;

  template <class C>
  static Terms<C> terms(C, C, C p, C q, C) {
    const C d = p - q, half = select(d > 0, C(0.5), select(d < 0, C(-0.5), C(0) * d));
    return {std::fabs(d) / 2, p * half, -q * half};
  }
};

// The options of a call.
template <class C>
struct DivergenceOptions {
  C scale, beta;  // scale: 1 / T
};

// Parameters of a row: its row_stats, whether it is kept, and in the backward the upstream gradient over T.
enum { kKept = kRowStatCount, kGrad };

// Returns the terms of a class, from the maximum and log_total of its row; sets p and q.
template <class Kind, class C>
inline Terms<C> terms_of(const DivergenceOptions<C>& op, C x, C y, C maximum_x, C log_total_x, C maximum_y,
                         C log_total_y, C& p, C& q) {
  const C v = (x - maximum_x) * op.scale - log_total_x, u = (y - maximum_y) * op.scale - log_total_y;
  p = exp_term(u), q = exp_term(v);
  return Kind::template terms<C>(u, v, p, q, op.beta);
}

// The operands of a call, and the shape of their rows. kept: 1 for a row that is kept, else 0.
struct Pair {
  View x, y;
  Shape shape, rows;
  DType dtype;
  std::vector<double> kept;

  Pair(const char* name, const Tensor& input, const Tensor& target, const std::optional<Tensor>& keep);

  // Returns the shape of row_stats, (6, *rows).
  Shape row_stats_shape() const;

  void check_row_stats(const char* name, const View& row_stats) const;

  // Returns statistic i of row_stats (6, *rows), one per row.
  RowValues<char> number(const View& row_stats, int i) const {
    return RowValues<char>(rows, row_stats.data + i * rows.numel() * size_of(dtype), dtype);
  }

  RowValues<const double> keep() const { return RowValues<const double>(rows, kept.data(), DType::kDouble); }
};

}  // namespace safeops::cpu
