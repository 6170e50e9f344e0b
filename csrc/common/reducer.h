// The reduction of images, or of their windows, to one number. Device independent; also compiled for GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#include "everywhere.h"

namespace safeops {

struct Reducer {
  // as REDUCTION in safeops/core/loss_reduction.py; kPlanes keeps one sum per plane
  enum Kind : int64_t { kNone, kMean, kSum, kPlanes };
  int64_t kind;
  bool empty_nan;

  // sum or sum / count; an empty mean is NaN or 0.
  SAFEOPS_EVERYWHERE double value(double sum, double count) const {
    if (count == 0) return empty_nan ? NAN : 0.0;
    return kind == kMean ? sum / count : sum;
  }
  // d(value)/d(one summand).
  SAFEOPS_EVERYWHERE double slope(double count) const { return kind == kMean ? 1 / count : 1; }
};

}  // namespace safeops
