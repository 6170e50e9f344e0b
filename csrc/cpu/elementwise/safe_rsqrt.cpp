#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = 1 / sqrt(max(x, eps));  slope = -(g / 2) / sqrt(x) / x, and 0 for x < eps
template <class C>
struct SafeRsqrt {
  static constexpr double most = sizeof(C) == 4 ? 2.7e22 : 4.5e161;
  C eps, highest;

  explicit SafeRsqrt(const Arguments& arguments)
      : eps(arguments.positive_eps<C>()),
        highest(static_cast<C>(saturate(1 / std::sqrt(double(eps)), arguments.out))) {}

  bool absent(C x) const { return x < eps; }
  C stand_in(C, C) const { return highest; }
  C value(C x) const { return 1 / std::sqrt(x); }
  C slope(C g, C x, C y) const { return g * (C(-0.5) * y) / x; }
};

SAFEOPS_UNARY(safe_rsqrt, SafeRsqrt)

}  // namespace safeops::cpu
