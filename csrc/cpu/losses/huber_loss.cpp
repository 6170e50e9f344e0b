#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = d^2 / 2 where |d| < delta, else delta (|d| - delta/2);  d = x - y
template <class C>
struct Huber {
  C delta;
  explicit Huber(double delta) : delta(static_cast<C>(delta)) {}

  C value(C x, C y) const {
    const C a = std::fabs(x - y), q = a < delta ? a : delta;
    return q * q / 2 + delta * (a - q);
  }

  C slope(C x, C y) const {
    const C d = x - y;
    return d > delta ? delta : d < -delta ? -delta : d;  // NaN stays NaN
  }
};

SAFEOPS_POINTWISE_LOSS(huber_loss, Huber, double)

}  // namespace safeops::cpu
