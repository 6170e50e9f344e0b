// How the sums of images, or of their windows, come to one number. Device independent; also run on a GPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "everywhere.h"

namespace safeops {

struct Reducer {
  // as REDUCTION in safeops/core/loss_reduction.py; kPlanes: no number but sums of each plane
  enum Kind : int64_t { kNone, kMean, kSum, kPlanes };
  int64_t kind;
  bool empty_nan;

  // The sum, or the mean, of what `count` are that exist.
  SAFEOPS_EVERYWHERE double value(double sum, double count) const {
    if (count == 0) return empty_nan ? NAN : 0.0;
    return kind == kMean ? sum / count : sum;
  }
  // Its slope by each of them.
  SAFEOPS_EVERYWHERE double share(double count) const { return kind == kMean ? 1 / count : 1; }
};

}  // namespace safeops
