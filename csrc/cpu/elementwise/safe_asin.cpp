#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = asin(x) of x clamped to [-1, 1];  slope = g / sqrt((1 - x)(1 + x)), and 0 for |x| >= 1
template <class C>
struct SafeAsin {
  static constexpr double most = 1.6;

  explicit SafeAsin(const Arguments&) {}

  bool absent(C x) const { return std::fabs(x) >= 1; }
  C stand_in(C x, C) const { return std::copysign(math::Traits<C>::kHalfPi, x); }
  C value(C x) const { return math::asin(x); }
  C slope(C g, C x, C) const { return g / std::sqrt((1 - x) * (1 + x)); }
};

SAFEOPS_UNARY(safe_asin, SafeAsin)

}  // namespace safeops::cpu
