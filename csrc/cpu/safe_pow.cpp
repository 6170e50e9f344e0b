#include "binary.h"
#include "math.h"

namespace safeops::cpu {

// a^b; 0 where there is no such real number, saturated where it does not fit; no slopes there, nor where the one at
// a = 0 would be infinite.  da = g b a^(b-1),  db = g a^b log a for a > 0, else 0.
template <class C>
struct SafePow {
  double largest, overflow;

  explicit SafePow(const Arguments& given)
      : largest(cpu::largest(given.out)), overflow(overflow_from(given.out)) {}

  bool saturated(double value, double a, double b) const {
    return (std::fabs(value) >= overflow) & (std::fabs(a) < math::kInf) & (std::fabs(b) < math::kInf);
  }

  C value(C a, C b) const {
    const math::Power power(a, b);
    const double y = power.value;
    const double shown = select(saturated(y, a, b), std::copysign(largest, y), y);
    return static_cast<C>(kept_or_zero(power.real, shown));
  }

  Slopes<C> slopes(C g_, C a_, C b_) const {
    const math::Power power(a_, b_);
    const double g = g_, a = a_, b = b_;
    const bool live = power.real & !saturated(power.value, a, b) & !((a == 0) & (b < 1));
    // g b may be inf beside a^(b-1) = 0: then 0, unless b itself is
    double da = kept_or_zero((power.below != 0) | !(std::fabs(b) < math::kInf), g * b * power.below);
    // a^(b-1) may overflow where g times it does not.
    if constexpr (sizeof(C) == 8)
      da = select((std::fabs(power.below) == math::kInf) & (a != 0) & (std::fabs(a) < math::kInf),
                  g * b * power.value / a, da);
    const double db = g * power.log * power.value;
    return {static_cast<C>(kept_or_zero(live & (b != 0), da)), static_cast<C>(kept_or_zero(live & !(a <= 0), db))};
  }
};

SAFEOPS_BINARY(safe_pow, SafePow)

}  // namespace safeops::cpu
