#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// d^2 / 2 below delta, delta (|d| - delta/2) from there on.
template <class C>
struct Huber {
  C delta;
  explicit Huber(double delta) : delta(static_cast<C>(delta)) {}

  C value(C d) const {
    const C a = std::fabs(d), q = a < delta ? a : delta;
    return q * q / 2 + delta * (a - q);
  }

  C slope(C d) const { return d > delta ? delta : d < -delta ? -delta : d; }  // NaN stays NaN
};

SAFEOPS_POINTWISE_LOSS(huber_loss, Huber, double)

}  // namespace safeops::cpu
