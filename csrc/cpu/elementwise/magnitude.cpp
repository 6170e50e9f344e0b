#include "cpu/elementwise/binary.h"
#include "cpu/engine/math.h"

namespace safeops::cpu {

// value r = sqrt(a^2 + b^2), whose squares neither overflow nor underflow.  da = g a / r,  db = g b / r;  both are 0 at
// the origin.
template <class C>
struct Magnitude {
  explicit Magnitude(const Arguments&) {}

  static constexpr C kInf = std::numeric_limits<C>::infinity();
  static bool is_far(C a, C b) { return ((std::fabs(a) == kInf) & (b == b)) | ((std::fabs(b) == kInf) & (a == a)); }
  // Returns a power of two for both operands; 1 for floats, whose squares neither overflow nor underflow in double.
  static double scale(C a, C b) {
    if constexpr (sizeof(C) == 4) return 1;
    return math::scale_of(math::at_least(std::fabs(a), std::fabs(b)));
  }

  C value(C a, C b) const {
    const double s = scale(a, b), x = a * s, y = b * s;
    return is_far(a, b) ? kInf : static_cast<C>(std::sqrt(x * x + y * y) / s);
  }

  Slopes<C> slopes(C g, C a, C b) const {
    const bool far = is_far(a, b), origin = (a == 0) & (b == 0);
    // An infinite operand has slope 1 or -1, its sign; the other operand then has slope 0.
    const C one = std::fabs(a) == kInf ? std::copysign(C(1), a) : C(0);
    const C two = std::fabs(b) == kInf ? std::copysign(C(1), b) : C(0);
    const C first = far ? one : a, second = far ? two : b;
    const double s = scale(first, second), x = first * s, y = second * s, r = std::sqrt(x * x + y * y);
    return {select_or_zero(!origin, static_cast<C>(g * (x / r))), select_or_zero(!origin, static_cast<C>(g * (y / r)))};
  }
};

SAFEOPS_BINARY(magnitude, Magnitude)

}  // namespace safeops::cpu
