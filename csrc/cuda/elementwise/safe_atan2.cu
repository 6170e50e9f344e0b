// safe_atan2(y, x): the angle of the point (x, y); at the origin it is 0, with slope 0.
#include "binary.cuh"

namespace safeops::cuda {
namespace {

struct SafeAtan2 : Plain {
  template <class C>
  static __device__ C value(const Range<C>&, C y, C x) {
    return y == C(0) && x == C(0) ? C(0) : atan2(y, x);
  }
  static __device__ float value(const Half&, float y, float x) {
    constexpr float kPi = 3.14159265f;
    const bool steep = fabs(y) > fabs(x);
    const float u = fabs(steep ? y : x), v = fabs(steep ? x : y);
    const float t = v == u ? 1 : v / u, z = t * t;  // t is 1 if both are infinite
    // atan(t) for t in [0, 1], by a polynomial with a relative error of 5e-6.
    const float near = t * (0.99999563f + z * (-0.3329946f + z * (0.19563593f + z * (-0.12123908f +
                       z * (0.05747732f + z * -0.01348047f)))));
    const float acute = steep ? kPi / 2 - near : near, angle = signbit(x) ? kPi - acute : acute;
    return y == 0 && x == 0 ? 0 : copysign(angle, y);
  }
  // dy = g x / (x^2 + y^2), dx = -g y / (x^2 + y^2). Of x and y, u has the larger magnitude, v the smaller; t = v / u.
  // Up to sign the gradients are slope = g / (u (1 + t^2)) and slope t, in which no square over- or underflows.
  template <class C>
  static __device__ void slopes(const Range<C>&, C g, C y, C x, C& dy, C& dx) {
    const bool steep = fabs(y) > fabs(x);
    const C u = steep ? y : x, v = steep ? x : y;
    const C t = v / u, part = g / (C(1) + t * t), slope = part / u;
    // Computes other = slope t. If t underflows, it is slope v / u. If slope overflows, part is multiplied by t (or v)
    // before the division by u.
    const bool plain = fabs(t) >= std::numeric_limits<C>::min() || t != t;
    const C factor = plain ? t : v, product = finite(slope) ? slope * factor : (part * factor) / u;
    const C other = plain ? product : product / u;
    // Both gradients are 0 at the origin, and where x or y is infinite (neither NaN): there the angle is constant.
    const bool far = !finite(u) && u == u && v == v;
    const bool flat = (u == C(0) && v == C(0)) || far;
    dy = flat ? C(0) : steep ? other : slope;
    dx = flat ? C(0) : steep ? -slope : -other;
  }
  static __device__ void slopes(const Half&, float g, float y, float x, float& dy, float& dx) {
    const float log_y = rough_log2(fabs(y)), log_x = rough_log2(fabs(x)), longer = log_y > log_x ? log_y : log_x;
    const float squares = 2 * longer + approx_log2(1 + approx_exp2(-2 * fabs(log_x - log_y)));  // log2(x^2 + y^2)
    const float size = rough_log2(fabs(g)) - squares;
    const bool flat = fabs(longer) == INFINITY && y == y && x == x;
    dy = flat ? 0 : with_signs_of(rough_exp2(size + log_x), g, x);
    dx = flat ? 0 : -with_signs_of(rough_exp2(size + log_y), g, y);
  }
};

}  // namespace

SAFEOPS_BINARY(safe_atan2, SafeAtan2)

}  // namespace safeops::cuda
