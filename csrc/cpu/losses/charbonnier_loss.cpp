#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = sqrt(d^2 + eps^2), d = x - y. If d^2 or eps^2 would overflow or underflow, d and eps are first multiplied by
// a power of two, which costs less than dividing by the larger of d and eps.
template <class C>
struct Charbonnier {
  C eps;
  explicit Charbonnier(double eps) : eps(static_cast<C>(eps)) {}

  C value(C x, C y) const {
    const C a = std::fabs(x - y);
    return root(a) * select(large(a), 1 / kDown, select(small(a), 1 / kUp, C(1)));
  }

  C slope(C x, C y) const {
    const C d = x - y, a = std::fabs(d);
    const C slope = d * scale(a) / root(a);
    return select(a == std::numeric_limits<C>::infinity(), std::copysign(C(1), d), slope);
  }

 private:
  static constexpr bool kFloat = sizeof(C) == sizeof(float);
  static constexpr C kLarge = static_cast<C>(kFloat ? 0x1p60 : 0x1p500), kDown = 1 / (kLarge * 1024);
  static constexpr C kSmall = 1 / kLarge, kUp = static_cast<C>(kFloat ? 0x1p100 : 0x1p640);

  bool large(C a) const { return a > kLarge || eps > kLarge; }
  bool small(C a) const { return a < kSmall && eps < kSmall; }
  C scale(C a) const { return select(large(a), kDown, select(small(a), kUp, C(1))); }

  C root(C a) const {
    const C s = scale(a), d = a * s, e = eps * s;
    return std::sqrt(d * d + e * e);
  }
};

SAFEOPS_POINTWISE_LOSS(charbonnier_loss, Charbonnier, double)

}  // namespace safeops::cpu
