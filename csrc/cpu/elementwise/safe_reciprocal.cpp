#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = 1 / x, or the fill value where |x| < eps;  slope = -g / x^2, and 0 where the value is the fill value
template <class C>
struct SafeReciprocal {
  static constexpr double most = std::numeric_limits<double>::infinity();
  C eps, fill;

  explicit SafeReciprocal(const Arguments& given) : eps(given.positive_eps<C>()), fill(static_cast<C>(given.fill)) {}

  bool absent(C x) const { return std::fabs(x) < eps; }
  C stand_in(C, C) const { return fill; }
  C value(C x) const { return 1 / x; }
  C slope(C g, C, C y) const { return (0 - g * y) * y; }
};

SAFEOPS_UNARY(safe_reciprocal, SafeReciprocal)

}  // namespace safeops::cpu
