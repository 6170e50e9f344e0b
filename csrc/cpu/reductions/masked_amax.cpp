// The largest or smallest kept element, and 1 / the number of elements equal to it: these share the gradient.
// I/O: forward reads x, mask, weight once.
#include "cpu/reductions/extreme.h"

namespace safeops::cpu {

namespace {

void finish_extreme(const void* op, int64_t, const States& states, int64_t n, const double*, double* const* results) {
  const StatisticFinish f = *static_cast<const StatisticFinish*>(op);
  for (int64_t i = 0; i < n; ++i) {
    const bool none = states.count[i] == 0;
    const double best = f.negate ? -states.value[i] : states.value[i];
    results[0][i] = none ? f.empty_value : best;
    results[1][i] = none ? 0.0 : best;
    results[2][i] = none ? 0.0 : 1.0 / static_cast<double>(states.count[i]);
    if (best > f.most && std::isfinite(best)) results[0][i] = f.most, results[2][i] = 0;
  }
}

void run_extreme(const Statistic& s, Extremum which, bool empty_nan, const Statistics& to) {
  StatisticFinish finish;
  finish.empty_value = empty_value(empty_nan);
  finish.negate = negated(which);
  finish.most = s.most;
  const bool weighted = s.weight.has_value();
  if (s.in_double())
    s.run<double>(Extreme<double>{weighted, false, which}, &finish_extreme, &finish, to);
  else
    s.run<float>(Extreme<float>{weighted, false, which}, &finish_extreme, &finish, to);
}

}  // namespace

Statistics extreme(const Statistic& s, Extremum which, bool empty_nan) {
  const Statistics to = s.results();
  run_extreme(s, which, empty_nan, to);
  return to;
}

std::optional<Tensor> scales_of(const Statistic& s) {
  Statistic wide = s;
  wide.type = DType::kDouble;
  const Tensor maxima = std::get<0>(extreme(wide, Extremum::kMaxAbs, false));
  double* scale = reinterpret_cast<double*>(View(maxima).data);
  bool any = false;
  for (int64_t i = 0, n = s.out.numel(); i < n; ++i) {
    const double maximum = scale[i];
    const bool out = std::isfinite(maximum) && maximum != 0 && (maximum > 0x1p+400 || maximum < 0x1p-400);
    scale[i] = out ? std::ldexp(1.0, std::clamp(-std::ilogb(maximum), -1000, 1000)) : 1.0;
    any = any || out;
  }
  if (!any) return std::nullopt;
  return maxima;
}

SAFEOPS_STATISTIC(masked_amax, return extreme(s, Extremum::kMax, empty_nan);)
SAFEOPS_STATISTIC(masked_amin, return extreme(s, Extremum::kMin, empty_nan);)

}  // namespace safeops::cpu
