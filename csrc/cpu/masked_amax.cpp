// The largest kept element; its gradient is shared by those that are it.
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_amax, return extreme(s, Extremum::kMax, empty_nan);)

}  // namespace safeops::cpu
