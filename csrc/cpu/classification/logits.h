// The values that a loss reads in place of logits x: softcap tanh(x / softcap) / temperature, or x / temperature if
// there is no softcap.
#pragma once

#include <limits>

#include "cpu/engine/math.h"

namespace safeops::cpu {

template <class C>
struct Logits {
  bool capped, changed;  // capped: there is a softcap; changed: the values differ from the logits
  C scale, cap, inverse, per_cap;

  Logits(double temperature, double softcap)
      : capped(softcap != 0), changed(capped || temperature != 1), scale(static_cast<C>(1 / temperature)),
        cap(static_cast<C>(softcap)), inverse(static_cast<C>(capped ? 1 / softcap : 0)),
        per_cap(static_cast<C>(capped ? temperature / softcap : 0)) {}

  static C tanh(C x) {
    const C less = -math::expm1_nonpositive(-2 * std::fabs(x)), value = less / (2 - less);
    return select(x < 0, -value, value);
  }

  // Returns softcap tanh(x / softcap) / temperature. A logit of -inf (a class that does not exist) stays -inf.
  C value(C x) const {
    return select(x == -std::numeric_limits<C>::infinity(), x, tanh(x * inverse) * cap * scale);
  }

  void read(const C* x, int64_t height, int64_t width, int64_t step, C* to) const {
    for (int64_t i = 0; i < height; ++i, x += step, to += width) {
      if (capped) {
        SAFEOPS_SIMD
        for (int64_t k = 0; k < width; ++k) to[k] = value(x[k]);
      } else {
        SAFEOPS_SIMD
        for (int64_t k = 0; k < width; ++k) to[k] = x[k] * scale;
      }
    }
  }

  // Turns d, the gradient with respect to n values from read(), into the gradient with respect to their logits.
  void differentiate(const C* read, int64_t n, C* d) const {
    if (capped) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < n; ++k) {
        const C t = math::at_least(read[k] * per_cap, C(-1));
        d[k] *= scale * (1 - t * t);
      }
    } else if (changed) {
      for (int64_t k = 0; k < n; ++k) d[k] *= scale;
    }
  }
};

}  // namespace safeops::cpu
