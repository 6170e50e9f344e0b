#include "cpu/engine/exp.h"
#include "cpu/engine/math.h"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

// value = (e^d - 1 - d + u^2) / 2, d = y - prior_log_var, u = (x - prior_mean) / e^(prior_log_var / 2). u is scaled
// before it is squared, since (x - prior_mean)^2 may overflow.
template <class C>
struct GaussianKl {
  C prior_mean, prior_log_var, scale;
  GaussianKl(double prior_mean, double prior_log_var)
      : prior_mean(static_cast<C>(prior_mean)),
        prior_log_var(static_cast<C>(prior_log_var)),
        scale(static_cast<C>(std::exp(-prior_log_var / 2))) {}

  C value(C x, C y) const {
    const C d = y - prior_log_var, e = exp_(d), u = (x - prior_mean) * scale;
    const C far = e - 1 - select(e == math::kInf, C(0), d);  // inf - d would be NaN for d = inf
    return (select(is_near(d), excess(d), far) + u * u) / 2;
  }

  Slopes<C> slopes(C x, C y) const {
    const C d = y - prior_log_var;
    return {(x - prior_mean) * scale * scale, select(is_near(d), d + excess(d), exp_(d) - 1) / 2};
  }

 private:
  static bool is_near(C d) { return std::fabs(d) < C(0.5); }

  // Returns e^d - 1 - d from its series, in which nothing cancels, for small |d|.
  static C excess(C d) {
    return d * d * math::polynomial(d, C(1) / 2, C(1) / 6, C(1) / 24, C(1) / 120, C(1) / 720, C(1) / 5040, C(1) / 40320,
                                    rest(d));
  }
  static float rest(float) { return 1.0f / 362880; }
  static double rest(double d) {
    return math::polynomial(d, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800,
                            1.0 / 87178291200, 1.0 / 1307674368000);
  }
};

SAFEOPS_POINTWISE_LOSS(gaussian_kl_div, GaussianKl, double, double)

}  // namespace safeops::cpu
