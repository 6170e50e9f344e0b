// sum w x^2
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_sum_of_squares, return powers(s, true, false, false, empty_nan);)

}  // namespace safeops::cpu
