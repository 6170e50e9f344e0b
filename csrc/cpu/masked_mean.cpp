// mean = sum / denominator. Its gradient is _masked_sum_backward, given the denominator.
#include "masked_sum.h"

namespace safeops::cpu {

namespace {

std::tuple<Tensor, Tensor> masked_mean(const Tensor& input, const std::optional<Tensor>& mask,
                                       const std::optional<Tensor>& weight,
                                       const std::optional<std::vector<int64_t>>& dim, bool keepdim, bool empty_nan,
                                       const std::optional<ScalarType>& dtype) {
  return masked_reduction(true, input, mask, weight, dim, keepdim, empty_nan, dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_masked_mean", TORCH_BOX(&masked_mean)); }

}  // namespace safeops::cpu
