// The masked sum and mean: the identity term under the one reduction.
#pragma once

#include <vector>

#include "terms.h"

namespace safeops::cpu {

// (sum or mean, denominator) over the kept elements; the denominator is their count, or the sum of their weights.
std::tuple<Tensor, Tensor> masked_reduction(bool mean, const Tensor& input, const std::optional<Tensor>& mask,
                                            const std::optional<Tensor>& weight,
                                            const std::optional<std::vector<int64_t>>& dim, bool keepdim,
                                            bool empty_nan, const std::optional<ScalarType>& dtype);

}  // namespace safeops::cpu
