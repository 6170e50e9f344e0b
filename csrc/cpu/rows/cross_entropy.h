// loss = (1 - s) w_y (L - x_y) + s / A sum_c w_c (L - x_c) + z L^2 of each row, y its class, L = log sum exp x, A how
// many classes are not of -inf. Of probabilities q the first term is (1 - s) sum_c w_c q_c (L - x_c).
//
// What the two directions share.
#pragma once

#include "cpu/rows/classification.h"
#include "cpu/rows/softmax.h"

namespace safeops::cpu {

// The call, beside its tensors.
template <class C>
struct CrossEntropy {
  bool shares;              // each row has probabilities, the second input
  double smoothing, z;      // label_smoothing, z_loss
  const C* weights;         // of the classes, or null
  bool row_weights;         // each row has a weight: that of its class
  bool has_factor, has_even;  // which numbers of a row there are beside those of logsumexp

  CrossEntropy(bool shares_, const C* weights_, bool weighted, double smoothing_, double z_)
      : shares(shares_), smoothing(smoothing_), z(z_), weights(weights_), row_weights(weighted && !shares_) {
    has_even = smoothing != 0;
    has_factor = shares || (weighted && has_even);
  }

  // The largest logit, what logsumexp is above it (beside a large one it would be lost), factor, even.
  int numbers() const { return 2 + has_factor + has_even; }
};

// The class weights in the compute dtype.
template <class C>
std::vector<C> narrowed(const std::vector<double>& weights) {
  return std::vector<C>(weights.begin(), weights.end());
}

// Of the tensor of a row's numbers (how many, *rows): the i-th.
inline RowNumbers<char> numbers_at(const ClassRows& rows, const View& numbers, int i) {
  return RowNumbers<char>(rows.shape, numbers.data + i * rows.count * size_of(numbers.dtype), numbers.dtype);
}

}  // namespace safeops::cpu
