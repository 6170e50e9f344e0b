#include "cpu/elementwise/binary.h"
#include "cpu/engine/math.h"

namespace safeops::cpu {

// value = the angle of the point (x = b, y = a), 0 at the origin.  da = g b / (a^2 + b^2),  db = -g a / (a^2 + b^2);
// both are exactly 0 at the origin and where an operand is infinite.
template <class C>
struct SafeAtan2 {
  explicit SafeAtan2(const Arguments&) {}

  C value(C a, C b) const { return select_or_zero((a != 0) | (b != 0), math::atan2(a, b)); }

  Slopes<C> slopes(C g_, C a_, C b_) const {
    constexpr C kInf = std::numeric_limits<C>::infinity();
    const bool flat = ((a_ == 0) & (b_ == 0)) | ((std::fabs(a_) == kInf) & (b_ == b_)) |
                      ((std::fabs(b_) == kInf) & (a_ == a_));
    const double g = g_, a = a_, b = b_;
    double da, db;
    if constexpr (sizeof(C) == 4) {  // squares of floats neither overflow nor underflow in double
      const double over = g / (a * a + b * b);
      da = over * b;
      db = over * (0 - a);
    } else {
      const double scale = math::scale_of(math::at_least(std::fabs(a), std::fabs(b)));
      const double y = a * scale, x = b * scale, square = x * x + y * y;
      da = g * (x / square) * scale;
      db = g * (0 - y / square) * scale;
    }
    return {select_or_zero(!flat, static_cast<C>(da)), select_or_zero(!flat, static_cast<C>(db))};
  }
};

SAFEOPS_BINARY(safe_atan2, SafeAtan2)

}  // namespace safeops::cpu
