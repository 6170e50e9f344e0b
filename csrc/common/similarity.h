// What 1 - SSIM of a window is made of, and its slopes. With s = x + y and d = x - y:
//     luminance' = 2 E[d]^2 / (E[s]^2 + E[d]^2 + c1)      contrast' = 2 var d / (var s + var d + c2)
//     1 - SSIM = 1 - (1 - luminance') (1 - contrast')
// Device independent; also run on a GPU.
#pragma once

#include "everywhere.h"

namespace safeops {

// What a window's weighted means depend on beside its pixels: s and d are taken about the level of their tile.
template <class C>
struct SimilarityTerms {
  C level_s, level_d, c1, c2;
};

// By E s, E d, E s^2, E d^2.
template <class C>
struct MomentSlopes {
  C s, d, ss, dd;
};

template <class C>
struct Similarity {
  C mean_s, mean_d;         // about the level
  C total_s, total_d;       // as they are
  C per_bottom, per_below;  // 1 / (E[s]^2 + E[d]^2 + c1), 1 / (var s + var d + c2): finite, as no c is below 2e-30
  C luminance, contrast;    // 1 less that of SSIM

  SAFEOPS_EVERYWHERE static Similarity of(const SimilarityTerms<C>& terms, C s, C d, C squares_s, C squares_d) {
    Similarity x;
    x.mean_s = s, x.mean_d = d;
    const C spread_s = squares_s - s * s, spread_d = squares_d - d * d;
    // a variance is not below 0, where rounding would bring it; a NaN shows
    const C var_s = spread_s < 0 ? C(0) : spread_s, var_d = spread_d < 0 ? C(0) : spread_d;
    x.total_s = s + terms.level_s, x.total_d = d + terms.level_d;
    const C bottom = x.total_s * x.total_s + x.total_d * x.total_d + terms.c1, below = var_s + var_d + terms.c2;
    x.per_bottom = 1 / bottom, x.per_below = 1 / below;
    x.luminance = 2 * x.total_d * x.total_d * x.per_bottom, x.contrast = 2 * var_d * x.per_below;
    return x;
  }

  SAFEOPS_EVERYWHERE C loss() const { return luminance + contrast - luminance * contrast; }

  // Of of_loss (1 - SSIM) + of_contrast contrast'.
  SAFEOPS_EVERYWHERE MomentSlopes<C> slopes(C of_loss, C of_contrast) const {
    const C by_luminance = of_loss * (1 - contrast), by_contrast = of_loss * (1 - luminance) + of_contrast;
    MomentSlopes<C> slope;
    slope.ss = -by_contrast * contrast * per_below, slope.dd = by_contrast * (2 - contrast) * per_below;
    slope.s = -2 * by_luminance * luminance * total_s * per_bottom - 2 * mean_s * slope.ss;
    slope.d = 2 * by_luminance * total_d * (2 - luminance) * per_bottom - 2 * mean_d * slope.dd;
    return slope;
  }
};

}  // namespace safeops
