// Shared by the raw ops of all statistics: arguments, results, and the dispatch on the compute type.
//
//     _<op>(input, mask, weight, dim, keepdim, empty_nan, dtype, parameter) -> (value, origin, scale)
//
// _statistic_backward computes dx = g scale w derivative(x, origin), with origin and scale as the forward returns them.
// I/O: forward reads x, mask, weight once.
#pragma once

#include <atomic>
#include <limits>
#include <vector>

#include "cpu/engine/reduction_driver.h"
#include "cpu/engine/weighted_sum.h"

namespace safeops::cpu {

using OptionalTensor = std::optional<Tensor>;
using Dims = std::optional<std::vector<int64_t>>;
using Statistics = std::tuple<Tensor, Tensor, Tensor>;

inline ReducedDims reduced_dims(const Shape& shape, const Dims& dim) {
  return ReducedDims(shape, dim ? dim->data() : nullptr, dim ? static_cast<int64_t>(dim->size()) : -1);
}

// The arguments of a statistic, and the shapes and dtypes that follow from them.
struct Statistic {
  const Tensor& input;
  const OptionalTensor &mask, &weight;
  const Dims& dim;
  bool keepdim;
  std::optional<ScalarType> dtype;
  View x{input};
  Shape shape = x.shape();
  ReducedDims dims = reduced_dims(shape, dim);
  Shape out = dims.output(shape, keepdim);
  DType type = floating(dtype, wide(x.dtype, x.dtype));
  double most = std::numeric_limits<double>::infinity();  // larger finite results become this (safe_norm)

  bool in_double() const {
    return x.dtype == DType::kDouble || type == DType::kDouble || cpu::in_double(weight);
  }

  Statistics results() const {
    return {empty(out, type, input), empty(out, DType::kDouble, input), empty(out, DType::kDouble, input)};
  }

  // scale_down: a float64 tensor of the outputs' shape. Each element is multiplied by its output's entry before it is
  // accumulated.
  template <class C, class Accumulator>
  void run(const Accumulator& accumulator, Results results, const void* finish, const Statistics& to,
           const Tensor* scale_down = nullptr) const {
    Reduction<C> r(shape, dims, x);
    if (weight) r.input(View(*weight));
    r.input(x);
    if (mask) r.mask(View(*mask));
    Outputs outputs(r, results, finish);
    outputs.add(r.seen(std::get<0>(to)));
    outputs.add(r.seen(std::get<1>(to)));
    outputs.add(r.seen(std::get<2>(to)));
    if (scale_down) {
      const Unreduced seen = r.seen(*scale_down);
      r.input(seen.view);
      outputs.add_unscale(seen);
    }
    ReductionDriver<C, Accumulator>{r, accumulator, outputs}.run();
  }
};

// Options of the last step, from states to results.
struct StatisticFinish {
  double empty_value = 0;     // the value where nothing is kept
  double correction = 0, focus = 1;
  bool weighted = false, mean = false, root = false;
  bool negate = false;        // the result is minus the maximum
  double slope = 1;           // a factor of the derivative
  double most = std::numeric_limits<double>::infinity();
  std::atomic<bool>* lost = nullptr;  // set where squares of doubles may have over- or underflowed
};

// Returns unscale / root as the scale for the backward: the inverse of the root before scaling. If the quotient
// overflows, it is stored negated and divided by kBeyond (see is_beyond).
inline double inverse_of(double root, double unscale) {
  if (root == 0) return 0;
  const double scale = unscale / root;
  return scale > std::numeric_limits<double>::max() ? -(unscale / kBeyond / root) : scale;
}

inline double empty_value(bool empty_nan) { return empty_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0; }

// The quantity whose maximum is sought: x, -x, |x| or -|x|.
enum class Extremum : int { kMax, kMin, kMaxAbs, kMinAbs };

Statistics extreme(const Statistic& s, Extremum which, bool empty_nan);
Statistics moments(const Statistic& s, bool root, double correction, bool empty_nan, double focus = 1);
// Statistics from powers: sum w |x|; or sum w x^2, its root, or the root of its mean.
Statistics powers(const Statistic& s, bool square, bool mean, bool root, bool empty_nan);

// Returns a power of two for each output (float64, the outputs' shape): one that brings the output's largest element
// near 1, or 1 if all its elements can be squared as they are. nullopt: all powers are 1.
std::optional<Tensor> scales_of(const Statistic& s);

// Runs an accumulator that squares in double, whose range not all squares fit. If the sum of an output shows that
// squares may have over- or underflowed, all outputs are accumulated again, with elements scaled by scales_of(s).
template <class Accumulator>
void run_squares(const Statistic& s, Accumulator accumulator, Results results, StatisticFinish finish,
                 const Statistics& to) {
  std::atomic<bool> lost{false};
  finish.lost = &lost;
  s.run<double>(accumulator, results, &finish, to);
  if (!lost) return;
  const std::optional<Tensor> scales = scales_of(s);
  if (!scales) return;
  accumulator.scaled = true;
  s.run<double>(accumulator, results, &finish, to, &*scales);
}

inline bool may_be_lost(double sum) { return !(sum > 0x1p-900) || sum > std::numeric_limits<double>::max(); }

}  // namespace safeops::cpu

#define SAFEOPS_STATISTIC(name, body)                                                                                  \
  static Statistics name(const Tensor& input, const OptionalTensor& mask, const OptionalTensor& weight,               \
                         const Dims& dim, bool keepdim, bool empty_nan, const std::optional<ScalarType>& dtype,       \
                         double parameter) {                                                                          \
    const Statistic s{input, mask, weight, dim, keepdim, dtype};                                                      \
    body                                                                                                               \
  }                                                                                                                    \
  STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_" #name, TORCH_BOX(&name)); }
