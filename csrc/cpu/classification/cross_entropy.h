// The loss of a row x with class y, where L = log sum exp x, w are the class weights, s is label_smoothing, z is
// z_loss, and sum_c is over the A classes whose logit is not -inf:
//     loss = (1 - s) w_y (L - x_y) + (s / A) sum_c w_c (L - x_c) + z L^2
// For probabilities q the first term is (1 - s) sum_c w_c q_c (L - x_c). This file is shared by forward and backward,
// and by token_log_probs.
#pragma once

#include "cpu/classification/classification.h"
#include "cpu/classification/logits.h"
#include "cpu/classification/softmax.h"

namespace safeops::cpu {

// The options of a call.
template <class C>
struct CrossEntropy {
  bool has_probabilities;      // each row has probabilities q, the second input
  double smoothing, z;         // label_smoothing, z_loss
  const C* weights;            // the weight of each class, or null
  bool row_weights;            // each row has a weight, that of its class
  bool has_factor, has_uniform;  // row_stats has `factor`, `uniform`, after the two parts of logsumexp
  bool has_entropy = false;    // for token_log_probs: the entropy is wanted, and none of the options above
  bool has_argmax = false;     // also the class of the largest logit; input 1: the logits, if `logits` changes input 0
  Logits<C> logits;

  CrossEntropy(bool has_probabilities_, const C* weights_, bool weighted, double smoothing_, double z_,
               const Logits<C>& logits_ = Logits<C>(1, 0))
      : has_probabilities(has_probabilities_), smoothing(smoothing_), z(z_), weights(weights_),
        row_weights(weighted && !has_probabilities_), logits(logits_) {
    has_uniform = smoothing != 0;
    has_factor = has_probabilities || (weighted && has_uniform);
  }

  // row_stats: the largest logit, L minus the largest logit (L itself would lose digits if that is large), and, where
  // needed, factor and uniform (cross_entropy_backward.cpp).
  int stats_count() const { return 2 + has_factor + has_uniform; }
};

template <class C>
void read_logits(const void* op, const C* x, int64_t height, int64_t width, int64_t step, C* to) {
  static_cast<const CrossEntropy<C>*>(op)->logits.read(x, height, width, step, to);
}

// Turns the gradient of the values that read() computed, for a piece of interleaved rows, into the gradient of the
// logits. Rows with live < 0 are not kept: their gradient stays 0.
template <class C>
void differentiate_columns(const Logits<C>& logits, const Piece<C>& p, const C* live) {
  if (!logits.changed) return;
  for (int64_t i = 0; i < p.height; ++i) {
    C* dx = p.out[0] + i * p.out_step[0];
    logits.differentiate(p.in[0] + i * p.step[0], p.width, dx);
    SAFEOPS_SIMD
    for (int64_t k = 0; k < p.width; ++k) dx[k] = select_or_zero(live[k] >= 0, dx[k]);
  }
}

// Returns the class weights in the compute dtype.
template <class C>
std::vector<C> narrowed(const std::vector<double>& weights) {
  return std::vector<C>(weights.begin(), weights.end());
}

// Returns statistic i of row_stats (stats_count, *rows).
inline RowValues<char> row_stat(const ClassRows& rows, const View& row_stats, int i) {
  return RowValues<char>(rows.shape, row_stats.data + i * rows.count * size_of(row_stats.dtype), row_stats.dtype);
}

}  // namespace safeops::cpu
