// `parameter` is the order: 2: sqrt(sum w x^2), 1: sum w |x|, inf: max |x|, -inf: min |x|.
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_norm, {
  if (parameter == 2) return powers(s, true, false, true, empty_nan);
  if (parameter == 1) return powers(s, false, false, false, empty_nan);
  STD_TORCH_CHECK(std::isinf(parameter), "_masked_norm: no kernel for this order");
  return extreme(s, parameter > 0 ? Extremum::kMaxAbs : Extremum::kMinAbs, empty_nan);
})

}  // namespace safeops::cpu
