#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = sqrt(max(x, 0));  slope = g / (2 sqrt x), and 0 for x < eps
template <class C>
struct SafeSqrt {
  static constexpr double most = sizeof(C) == 4 ? 1.9e19 : 1.4e154;
  C eps;

  explicit SafeSqrt(const Arguments& arguments) : eps(arguments.positive_eps<C>()) {}

  bool absent(C x) const { return x < eps; }
  C stand_in(C x, C y) const { return select_or_zero(x > 0, y); }
  C value(C x) const { return std::sqrt(x); }
  C slope(C g, C, C y) const { return g / (2 * y); }
};

SAFEOPS_UNARY(safe_sqrt, SafeSqrt)

}  // namespace safeops::cpu
