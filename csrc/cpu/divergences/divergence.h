// Divergences of the distributions p = softmax(y / T) and q = softmax(x / T), with u = log p and v = log q. Each has
// the slopes of its sum over the classes, p (f - sum p f) to y and q (h - sum q h) to x, both over T.
#pragma once

#include "cpu/engine/math.h"
#include "cpu/classification/classification.h"
#include "cpu/classification/softmax.h"

namespace safeops::cpu {

// The numbers of a row that its backward needs: of both operands the largest logit and log sum exp((x - top) / T);
// then the means sum q h and sum p f. (Logits over T, and their top, would each be rounded: of large ones nothing would
// be left.)
enum DivergenceNumber { kTopX, kSpreadX, kTopY, kSpreadY, kMeanX, kMeanY, kNumbers };

// A class's share of the divergence, and its p f and q h.
template <class C>
struct Terms {
  C value, of_y, of_x;
};

// sum p (u - v); of x the slope is q - p, which is q h less its mean for q h = -p.
struct Kl {
  static constexpr bool one_pass = true;

  template <class C>
  static Terms<C> terms(C u, C v, C p, C, C) {
    const C value = select_or_zero(p != 0, p * (u - v));
    return {value, value, -p};
  }
};

// sum b p log(p / m) + (1 - b) q log(q / m), m = b p + (1 - b) q. Of the larger of p and q the logarithm is -log1p of a
// number from -1 to 0, and that of the other differs from it by their ratio's.
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

// sum |p - q| / 2
struct Tv {
  static constexpr bool one_pass = false;

  template <class C>
  static Terms<C> terms(C, C, C p, C q, C) {
    const C d = p - q, half = select(d > 0, C(0.5), select(d < 0, C(-0.5), C(0) * d));
    return {std::fabs(d) / 2, p * half, -q * half};
  }
};

// The call's options.
template <class C>
struct DivergenceOptions {
  C scale, beta;  // 1 / T
};

// Parameters of a row: its numbers, whether it is kept, and in the backward the upstream gradient over T.
enum { kKept = kNumbers, kGrad };

// The terms of a class, from the numbers of its row.
template <class Kind, class C>
inline Terms<C> terms_of(const DivergenceOptions<C>& op, C x, C y, C top_x, C spread_x, C top_y, C spread_y, C& p,
                         C& q) {
  const C v = (x - top_x) * op.scale - spread_x, u = (y - top_y) * op.scale - spread_y;
  p = exp_term(u), q = exp_term(v);
  return Kind::template terms<C>(u, v, p, q, op.beta);
}

// A call's operands and rows, and which of these are kept.
struct Pair {
  View x, y;
  Shape shape, rows;
  DType dtype;
  std::vector<double> kept;

  Pair(const char* name, const Tensor& input, const Tensor& target, const std::optional<Tensor>& keep);

  // (6, *rows)
  Shape numbers_shape() const;

  void check_numbers(const char* name, const View& numbers) const;

  // Number i of each row, contiguous.
  RowValues<char> number(const View& numbers, int i) const {
    return RowValues<char>(rows, numbers.data + i * rows.numel() * size_of(dtype), dtype);
  }

  RowValues<const double> keep() const { return RowValues<const double>(rows, kept.data(), DType::kDouble); }
};

}  // namespace safeops::cpu
