#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = acos(x) of x clamped to [-1, 1];  slope = -g / sqrt((1 - x)(1 + x)), and 0 for |x| >= 1
template <class C>
struct SafeAcos {
  static constexpr double most = 3.2;

  explicit SafeAcos(const Arguments&) {}

  bool absent(C x) const { return std::fabs(x) >= 1; }
  C stand_in(C, C y) const { return y; }
  C value(C x) const { return math::acos(x); }
  C slope(C g, C x, C) const { return (0 - g) / std::sqrt((1 - x) * (1 + x)); }
};

SAFEOPS_UNARY(safe_acos, SafeAcos)

}  // namespace safeops::cpu
