// A sum of squares that neither overflows nor underflows where its root does not: three sums, each in a range of its
// own (Blue, "A portable Fortran program to find the Euclidean norm of a vector", 1978). Squares of what fp32 holds are
// all in the middle one. Device independent; also run on a GPU.
#pragma once

#include <cmath>

#include "everywhere.h"

namespace safeops {

struct Squares {
  double small = 0, middle = 0, big = 0;  // of |x| 2^600 below 2^-480, |x|, |x| 2^-700 above 2^480

  SAFEOPS_EVERYWHERE void add(double x) {
    const double size = fabs(x);
    if (size > 0x1p480)
      big += (x * 0x1p-700) * (x * 0x1p-700);
    else if (size < 0x1p-480)
      small += (x * 0x1p600) * (x * 0x1p600);
    else
      middle += x * x;  // NaN too
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

// Whether squares that were summed as they are, in type C, may be lost: below the range some may have vanished beside
// the sum; above it, and where the sum is NaN, some may have overflowed.
template <class C>
inline bool squares_lost(double sum) {
  constexpr double low = sizeof(C) == 4 ? 0x1p-90 : 0x1p-900, high = sizeof(C) == 4 ? 0x1p120 : 0x1p1000;
  return !(sum >= low && sum <= high);
}

}  // namespace safeops
