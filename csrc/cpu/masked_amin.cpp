// The smallest kept element; its gradient is shared by those that are it.
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_amin, return extreme(s, Extremum::kMin, empty_nan);)

}  // namespace safeops::cpu
