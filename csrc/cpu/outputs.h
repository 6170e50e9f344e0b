// The last step of a reduction: totals -> values and denominators, in any layout.
#pragma once

#include <limits>

#include "lanes.h"
#include "reduction.h"

namespace safeops::cpu {

// Totals of n outputs -> values and denominators.
inline void results_loop(const Finish& finish, int64_t reduced, const Totals& totals, int64_t n, double* value,
                  double* denominator) {
  const double all = finish.divisor ? *finish.divisor : static_cast<double>(reduced);
  const double* given = finish.weighted ? totals.weight : nullptr;
  const int64_t* counts = finish.counted ? totals.count : nullptr;
  if (finish.divisor || (!given && !counts))
    for (int64_t i = 0; i < n; ++i) denominator[i] = all;
  else if (given)
    std::copy_n(given, n, denominator);
  else
    for (int64_t i = 0; i < n; ++i) denominator[i] = static_cast<double>(counts[i]);

  if (finish.mean)
    for (int64_t i = 0; i < n; ++i) value[i] = totals.value[i] / denominator[i];
  else
    std::copy_n(totals.value, n, value);

  const double nothing = finish.empty_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  if (counts)
    for (int64_t i = 0; i < n; ++i) value[i] = select(counts[i] == 0, nothing, value[i]);
  else if (reduced == 0)
    for (int64_t i = 0; i < n; ++i) value[i] = nothing;
}

struct Outputs {
  const Finish& finish;
  int64_t reduced;
  Sink<double> value, denominator;

  // Totals of outputs [start, start + n) of the kept walk -> value and denominator.
  void write(int64_t start, int64_t n, const Totals& totals) const {
    const auto results = pick<&results_loop>();
    double values[kChunk], denominators[kChunk];
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t at = start + done, m = std::min(kChunk, n - done);
      results(finish, reduced, totals.from(done), m, value.target(at, values), denominator.target(at, denominators));
      value.commit(at, m, values);
      denominator.commit(at, m, denominators);
    }
  }
};

}  // namespace safeops::cpu
