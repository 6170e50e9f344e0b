// A sum of squares that overflows or underflows only where its root does. It has three sums, each for a range of
// magnitudes (Blue, "A portable Fortran program to find the Euclidean norm of a vector", 1978). Squares of fp32 numbers
// go into `middle`. Device independent; also compiled for GPUs.
#pragma once

#include <cmath>

#include "everywhere.h"

namespace safeops {

struct Squares {
  double small = 0, middle = 0, big = 0;  // sums of (2^600 x)^2 if |x| < 2^-480, (2^-700 x)^2 if |x| > 2^480, else x^2

  SAFEOPS_EVERYWHERE void add(double x) {
    const double size = fabs(x);
    if (size > 0x1p480)
      big += (x * 0x1p-700) * (x * 0x1p-700);
    else if (size < 0x1p-480)
      small += (x * 0x1p600) * (x * 0x1p600);
    else
      middle += x * x;  // also for a NaN
  }

  SAFEOPS_EVERYWHERE void add(const Squares& other) {
    small += other.small;
    middle += other.middle;
    big += other.big;
  }

  SAFEOPS_EVERYWHERE double norm() const {
    if (big != 0) return sqrt(big + middle * 0x1p-700 * 0x1p-700) * 0x1p700;
    if (middle != 0) return sqrt(middle + small * 0x1p-600 * 0x1p-600);
    return sqrt(small) * 0x1p-600;
  }
};

// True if a plain sum of squares in type C may be wrong: below `low` squares that matter may have underflowed; above
// `high`, or if the sum is NaN, squares may have overflowed.
template <class C>
inline bool squares_lost(double sum) {
  constexpr double low = sizeof(C) == 4 ? 0x1p-90 : 0x1p-900, high = sizeof(C) == 4 ? 0x1p120 : 0x1p1000;
  return !(sum >= low && sum <= high);
}

}  // namespace safeops
