// The root of masked_var.
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_std, return moments(s, true, parameter, empty_nan);)

}  // namespace safeops::cpu
