// sum w (x - mean)^2 / (sum w - correction); `parameter` is the correction.
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_var, return moments(s, false, parameter, empty_nan);)

}  // namespace safeops::cpu
