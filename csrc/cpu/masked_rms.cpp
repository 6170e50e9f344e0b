// sqrt(sum w x^2 / sum w)
#include "statistic.h"

namespace safeops::cpu {

SAFEOPS_STATISTIC(masked_rms, return powers(s, true, true, true, empty_nan);)

}  // namespace safeops::cpu
