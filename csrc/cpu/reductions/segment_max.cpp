// The largest kept element of each sequence of rows, and the number of kept elements equal to it.
// I/O: read x, mask, weight once.
#include "cpu/reductions/extreme.h"
#include "cpu/reductions/segments.h"

namespace safeops::cpu {

namespace {

void finish(const void* op, int64_t, const States& states, int64_t n, const double*, double* const* results) {
  const double empty = *static_cast<const double*>(op);
  for (int64_t i = 0; i < n; ++i) {
    results[0][i] = states.count[i] == 0 ? empty : states.value[i];
    results[1][i] = static_cast<double>(states.count[i]);
  }
}

std::tuple<Tensor, Tensor> segment_max(const Tensor& input, const OptionalTensor& mask, const OptionalTensor& weight,
                                       const Tensor& cu_seqlens, const OptionalTensor&, const OptionalTensor& order,
                                       bool empty_nan) {
  const Segments s("segment_max", input, mask, weight, cu_seqlens, order);
  const double empty = empty_value(empty_nan);
  const bool weighted = weight.has_value();
  if (s.x.dtype == DType::kDouble || in_double(weight))
    s.run<double>(Extreme<double>{weighted, false, Extremum::kMax}, &finish, &empty);
  else
    s.run<float>(Extreme<float>{weighted, false, Extremum::kMax}, &finish, &empty);
  return {s.value, s.denominator};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_segment_max", TORCH_BOX(&segment_max)); }

}  // namespace safeops::cpu
