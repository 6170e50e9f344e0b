#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = acosh(max(x, 1));  slope = g / sqrt((x - 1)(x + 1)), and 0 for x <= 1
template <class C>
struct SafeAcosh {
  static constexpr double most = 800;

  explicit SafeAcosh(const Arguments&) {}

  bool absent(C x) const { return x <= 1; }
  C stand_in(C, C) const { return 0; }
  // acosh(x) = 2 asinh(sqrt(h)) with h = (x - 1)/2, and asinh(s) = log(1 + s + s^2/(1 + sqrt(1 + s^2)))
  C value(C x) const {
    const C h = (x - 1) * C(0.5);
    const C y = 2 * math::log1p(std::sqrt(h) + h / (1 + std::sqrt(1 + h)));
    return select(x < std::numeric_limits<C>::infinity(), y, x);
  }
  // Two roots, since (x - 1)(x + 1) may overflow.
  C slope(C g, C x, C) const { return g / (std::sqrt(x - 1) * std::sqrt(x + 1)); }
};

SAFEOPS_UNARY(safe_acosh, SafeAcosh)

}  // namespace safeops::cpu
