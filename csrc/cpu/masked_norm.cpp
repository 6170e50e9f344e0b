// `parameter` is the order: 2: sqrt(sum w x^2), 1: sum w |x|, inf: max |x|, -inf: min |x|.
#include "statistic.h"

namespace safeops::cpu {

static Statistics norm(const Statistic& s, double order, bool empty_nan) {
  if (order == 2) return powers(s, true, false, true, empty_nan);
  if (order == 1) return powers(s, false, false, false, empty_nan);
  STD_TORCH_CHECK(std::isinf(order), "_masked_norm: no kernel for this order");
  return extreme(s, order > 0 ? Extremum::kMaxAbs : Extremum::kMinAbs, empty_nan);
}

SAFEOPS_STATISTIC(masked_norm, { return norm(s, parameter, empty_nan); })

// The norm of finite elements is finite: what does not fit is the largest number, with gradient 0.
SAFEOPS_STATISTIC(safe_norm, {
  Statistic saturated = s;
  saturated.most = largest(s.type);
  return norm(saturated, parameter, empty_nan);
})

}  // namespace safeops::cpu
