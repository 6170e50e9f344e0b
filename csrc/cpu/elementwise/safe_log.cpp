#include "cpu/engine/math.h"
#include "cpu/elementwise/unary.h"

namespace safeops::cpu {

// value = log(max(x, eps));  slope = g / x, and 0 for x < eps
template <class C>
struct SafeLog {
  static constexpr double most = 800;
  C eps, lowest;

  explicit SafeLog(const Arguments& arguments) : eps(arguments.positive_eps<C>()), lowest(std::log(eps)) {}

  bool absent(C x) const { return x < eps; }
  C stand_in(C, C) const { return lowest; }
  C value(C x) const { return math::log_positive(x); }
  C slope(C g, C x, C) const { return g / x; }
};

SAFEOPS_UNARY(safe_log, SafeLog)

}  // namespace safeops::cpu
