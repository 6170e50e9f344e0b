#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = e^x;  slope = g e^x
template <class C>
struct SafeExp {
  static constexpr double most = std::numeric_limits<double>::infinity();

  explicit SafeExp(const Arguments&) {}

  bool absent(C) const { return false; }
  C stand_in(C, C y) const { return y; }
  C value(C x) const { return math::exp(x); }
  C slope(C g, C, C y) const { return g * y; }
};

SAFEOPS_UNARY(safe_exp, SafeExp)

}  // namespace safeops::cpu
