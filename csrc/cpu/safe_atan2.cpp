#include "binary.h"
#include "math.h"

namespace safeops::cpu {

// The angle of (x = b, y = a), 0 at the origin.  da = g b / (a^2 + b^2),  db = -g a / (a^2 + b^2), and exactly 0 at the
// origin and infinitely far from it.
template <class C>
struct SafeAtan2 {
  explicit SafeAtan2(const Arguments&) {}

  C value(C a, C b) const { return kept_or_zero((a != 0) | (b != 0), math::atan2(a, b)); }

  Slopes<C> slopes(C g_, C a_, C b_) const {
    const double g = g_, a = a_, b = b_;  // squares of floats neither overflow nor vanish in double
    const double longer = math::at_least(std::fabs(a), std::fabs(b));
    const bool number = (a == a) & (b == b), flat = number & ((longer == 0) | (longer == math::kInf));
    double scale = 1;
    if constexpr (sizeof(C) == 8) scale = math::scale_of(longer);
    const double y = a * scale, x = b * scale, square = x * x + y * y;
    const double da = g * (x / square) * scale, db = g * (0 - y / square) * scale;
    return {static_cast<C>(kept_or_zero(!flat, da)), static_cast<C>(kept_or_zero(!flat, db))};
  }
};

SAFEOPS_BINARY(safe_atan2, SafeAtan2)

}  // namespace safeops::cpu
