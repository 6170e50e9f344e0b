// The terms of 1 - SSIM of a window, and their derivatives. luminance and contrast are the two factors of SSIM; a prime
// means 1 minus the factor, no derivative. With s = x + y, d = x - y, and c1, c2 twice the constants C1, C2 of SSIM:
//     luminance' = 2 E[d]^2 / (E[s]^2 + E[d]^2 + c1)      contrast' = 2 var d / (var s + var d + c2)
//     1 - SSIM = 1 - (1 - luminance') (1 - contrast')
// Device independent; also compiled for GPUs.
#pragma once

#include "everywhere.h"

namespace safeops {

// The constants of one tile of the images. level_s and level_d were subtracted from s and d before the means E were
// taken.
template <class C>
struct SimilarityTerms {
  C level_s, level_d, c1, c2;
};

// The derivatives of a loss with respect to a window's moments E[s], E[d], E[s^2], E[d^2].
template <class C>
struct MomentSlopes {
  C s, d, ss, dd;
};

template <class C>
struct Similarity {
  C mean_s, mean_d;                   // E[s] and E[d] of a window, with the level subtracted
  C total_s, total_d;                 // E[s] and E[d] with the level added back
  C luminance_scale, contrast_scale;  // 1 / (E[s]^2 + E[d]^2 + c1), 1 / (var s + var d + c2); finite: c1, c2 >= 2e-30
  C luminance, contrast;              // luminance' and contrast': 1 minus the terms of SSIM

  SAFEOPS_EVERYWHERE static Similarity of(const SimilarityTerms<C>& terms, C s, C d, C squares_s, C squares_d) {
    Similarity x;
    x.mean_s = s, x.mean_d = d;
    const C spread_s = squares_s - s * s, spread_d = squares_d - d * d;
    // Rounding may bring a variance below 0; a NaN stays.
    const C var_s = spread_s < 0 ? C(0) : spread_s, var_d = spread_d < 0 ? C(0) : spread_d;
    x.total_s = s + terms.level_s, x.total_d = d + terms.level_d;
    const C luminance_denominator = x.total_s * x.total_s + x.total_d * x.total_d + terms.c1,
            contrast_denominator = var_s + var_d + terms.c2;
    x.luminance_scale = 1 / luminance_denominator, x.contrast_scale = 1 / contrast_denominator;
    x.luminance = 2 * x.total_d * x.total_d * x.luminance_scale, x.contrast = 2 * var_d * x.contrast_scale;
    return x;
  }

  SAFEOPS_EVERYWHERE C loss() const { return luminance + contrast - luminance * contrast; }

  // Returns the derivatives of loss_factor (1 - SSIM) + contrast_factor contrast' with respect to the moments.
  SAFEOPS_EVERYWHERE MomentSlopes<C> slopes(C loss_factor, C contrast_factor) const {
    const C by_luminance = loss_factor * (1 - contrast), by_contrast = loss_factor * (1 - luminance) + contrast_factor;
    MomentSlopes<C> slope;
    // (1) d contrast'/d(var s) = -contrast' scale, d contrast'/d(var d) = (2 - contrast') scale
    slope.ss = -by_contrast * contrast * contrast_scale, slope.dd = by_contrast * (2 - contrast) * contrast_scale;
    // (2) d luminance'/dE[s] = -2 E[s] luminance' scale, d luminance'/dE[d] = 2 E[d] (2 - luminance') scale
    // (3) var s = E[s^2] - E[s]^2 adds -2 E[s] slope.ss to slope.s; d likewise
    slope.s = -2 * by_luminance * luminance * total_s * luminance_scale - 2 * mean_s * slope.ss;
    slope.d = 2 * by_luminance * total_d * (2 - luminance) * luminance_scale - 2 * mean_d * slope.dd;
    return slope;
  }
};

}  // namespace safeops
