// What 1 - SSIM of a window is made of, from its moments.
#pragma once

#include "cpu/images/moments.h"

namespace safeops::cpu {

// A row of windows: sums of weighted moments, the weights' own sum, and which windows count.
template <class C>
struct SimilarityRow {
  const C *s, *d, *squares_s, *squares_d, *share;
  const uint8_t* counted;
  C level_s, level_d, c1, c2;

  explicit SimilarityRow(const Moments<C>& m)
      : s(m.means.get()), d(s + m.step), squares_s(d + m.step), squares_d(squares_s + m.step), share(m.share.get()),
        counted(m.counted.get()), c1(m.images.c1), c2(m.images.c2) {
    const Levels<C>& level = m.pixels.level;
    level_s = (level.x + level.y) * m.images.scale, level_d = (level.x - level.y) * m.images.scale;
  }
};

template <class C>
struct Similarity {
  C inverse;               // of the share
  C mean_s, mean_d;        // about the level
  C total_s, total_d;      // as they are
  C bottom, below;         // E[s]^2 + E[d]^2 + c1, var s + var d + c2
  C luminance, contrast;   // 1 less that of SSIM

  template <bool kShare, bool kCounted>
  static Similarity at(const SimilarityRow<C>& r, int64_t i) {
    Similarity x;
    C share = C(1);
    if constexpr (kShare) share = r.share[i];
    if constexpr (kCounted) share = select(r.counted[i] != 0, share, C(1));
    x.inverse = C(1) / share;
    const auto mean = [&](C sum) { return kShare ? sum * x.inverse : sum; };
    x.mean_s = mean(r.s[i]), x.mean_d = mean(r.d[i]);
    // a variance is not below 0, where rounding would bring it; a NaN shows
    const C s = mean(r.squares_s[i]) - x.mean_s * x.mean_s, d = mean(r.squares_d[i]) - x.mean_d * x.mean_d;
    const C var_s = s < 0 ? C(0) : s, var_d = d < 0 ? C(0) : d;
    x.total_s = x.mean_s + r.level_s, x.total_d = x.mean_d + r.level_d;
    x.bottom = x.total_s * x.total_s + x.total_d * x.total_d + r.c1, x.below = var_s + var_d + r.c2;
    x.luminance = 2 * x.total_d * x.total_d / x.bottom, x.contrast = 2 * var_d / x.below;
    return x;
  }
};

}  // namespace safeops::cpu
