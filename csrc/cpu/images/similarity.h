// 1 - SSIM (common/similarity.h) of each window in a row.
#pragma once

#include "common/similarity.h"
#include "cpu/images/moments.h"

namespace safeops::cpu {

// A row of windows: weighted sums of its moments; sums of the kept weights; counted: 1 for a window that counts, else
// 0.
template <class C>
struct SimilarityRow {
  const C *s, *d, *squares_s, *squares_d, *weight_sum;
  const uint8_t* counted;
  SimilarityTerms<C> terms;

  explicit SimilarityRow(const Moments<C>& m)
      : s(m.means.get()), d(s + m.step), squares_s(d + m.step), squares_d(squares_s + m.step),
        weight_sum(m.weight_sum.get()),
        counted(m.counted.get()) {
    const Levels<C>& level = m.pixels.level;
    const C x = level.x * m.images.scale, y = level.y * m.images.scale;  // scaled first: twice the level may overflow
    terms = {x + y, x - y, m.images.c1, m.images.c2};
  }

  // Returns 1 / weight_sum, or 1 for a window that does not count.
  template <bool kDivide, bool kCounted>
  C inverse(int64_t i) const {
    if constexpr (!kDivide) return C(1);
    return C(1) / (kCounted ? select(counted[i] != 0, weight_sum[i], C(1)) : weight_sum[i]);
  }

  template <bool kDivide>
  Similarity<C> at(int64_t i, C inverse) const {
    const auto mean = [inverse](C sum) { return kDivide ? sum * inverse : sum; };
    return Similarity<C>::of(terms, mean(s[i]), mean(d[i]), mean(squares_s[i]), mean(squares_d[i]));
  }
};

}  // namespace safeops::cpu
