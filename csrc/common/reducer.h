// How the losses of images, or of their windows, are reduced to one number. Device independent; also compiled for GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#include "everywhere.h"

namespace safeops {

struct Reducer {
  // The numbers are those of REDUCTION in safeops/core/loss_reduction.py. kPlanes keeps one sum per plane, i.e. per
  // channel of an image.
  enum Kind : int64_t { kNone, kMean, kSum, kPlanes };
  int64_t kind;
  bool empty_nan;

  // Returns sum, or sum / count for a mean; NaN or 0 if count is 0.
  SAFEOPS_EVERYWHERE double value(double sum, double count) const {
    if (count == 0) return empty_nan ? NAN : 0.0;
    return kind == kMean ? sum / count : sum;
  }
  // The derivative of value() with respect to one summand.
  SAFEOPS_EVERYWHERE double slope(double count) const { return kind == kMean ? 1 / count : 1; }
};

}  // namespace safeops
