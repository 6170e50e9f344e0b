// 1 - SSIM (common/similarity.h) of a row of windows.
#pragma once

#include "common/similarity.h"
#include "cpu/images/moments.h"

namespace safeops::cpu {

// Sums of weighted moments, the weights' own sum, and which windows count.
template <class C>
struct SimilarityRow {
  const C *s, *d, *squares_s, *squares_d, *share;
  const uint8_t* counted;
  SimilarityTerms<C> terms;

  explicit SimilarityRow(const Moments<C>& m)
      : s(m.means.get()), d(s + m.step), squares_s(d + m.step), squares_d(squares_s + m.step), share(m.share.get()),
        counted(m.counted.get()) {
    const Levels<C>& level = m.pixels.level;
    const C x = level.x * m.images.scale, y = level.y * m.images.scale;  // before they are added: twice may be too much
    terms = {x + y, x - y, m.images.c1, m.images.c2};
  }

  // Of the share; of a window that does not count, any number.
  template <bool kShare, bool kCounted>
  C inverse(int64_t i) const {
    if constexpr (!kShare) return C(1);
    return C(1) / (kCounted ? select(counted[i] != 0, share[i], C(1)) : share[i]);
  }

  template <bool kShare>
  Similarity<C> at(int64_t i, C inverse) const {
    const auto mean = [inverse](C sum) { return kShare ? sum * inverse : sum; };
    return Similarity<C>::of(terms, mean(s[i]), mean(d[i]), mean(squares_s[i]), mean(squares_d[i]));
  }
};

}  // namespace safeops::cpu
