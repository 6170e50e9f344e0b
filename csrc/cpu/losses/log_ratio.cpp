#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = log x - log y: the difference of the logarithms of two depths, which silog_loss reduces
template <class C>
struct LogRatio {
  C value(C x, C y) const { return math::log(x) - math::log(y); }
  Slopes<C> slopes(C x, C y) const { return {1 / x, -1 / y}; }
};

SAFEOPS_POINTWISE_LOSS(log_ratio, LogRatio)

}  // namespace safeops::cpu
