#include "cpu/elementwise/binary.h"
#include "cpu/engine/math.h"

namespace safeops::cpu {

// value = a log b, but 0 where a is 0, for any b.  da = g log b,  db = g a/b;  both are 0 where a is 0 and log b is not
// finite.
template <class C>
struct Xlogy {
  explicit Xlogy(const Arguments&) {}

  C value(C a, C b) const { return select_or_zero(a != 0, a * math::log(b)); }

  Slopes<C> slopes(C g, C a, C b) const {
    const bool live = (a != 0) | ((b > 0) & (b < math::kInf));
    return {select_or_zero(live, g * math::log(b)), select_or_zero(live, quotient(g, a, b))};
  }

  // Returns g a / b. The product g a may overflow or underflow where the result does not.
  static float quotient(float g, float a, float b) {
    return static_cast<float>(static_cast<double>(g) * static_cast<double>(a) / static_cast<double>(b));
  }
  static double quotient(double g, double a, double b) {
    const double size = std::fabs(g * a);
    double scale = select(size < std::numeric_limits<double>::min(), 0x1p+600, 1.0);
    scale = select(size > std::numeric_limits<double>::max(), 0x1p-600, scale);
    scale = select((g == 0) | (a == 0), 1.0, scale);
    return g * scale * a / b * (1 / scale);
  }
};

SAFEOPS_BINARY(xlogy, Xlogy)

}  // namespace safeops::cpu
