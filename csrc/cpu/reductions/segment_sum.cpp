// The sum and the mean of each sequence of rows. The denominator is the count of kept elements, or the sum of their
// weights.
// I/O: read x, mask, weight once.
#include "cpu/engine/sums.h"
#include "cpu/engine/weighted_sum.h"
#include "cpu/reductions/segments.h"

namespace safeops::cpu {

namespace {

template <class C>
void run(const Segments& s, bool mean, bool empty_nan) {
  const Identity<C> op;
  Finish finish;
  finish.mean = mean;
  finish.counted = s.mask || s.weight;
  finish.weighted = s.weight.has_value();
  finish.plain = !s.weight;
  finish.empty_nan = empty_nan;
  Finish results = finish;
  results.counted = true;  // without mask and weight the driver sets the count to the sequence's rows
  const Sums<C> sums{finish, pick_selection<C>(s.mask.has_value(), s.weight.has_value()), &op, nullptr};
  s.run<C>(sums, pick<&sum_results_loop>(), &results);
}

std::tuple<Tensor, Tensor> reduce(const Segments& s, bool mean, bool empty_nan) {
  if (s.x.dtype == DType::kDouble || in_double(s.weight))
    run<double>(s, mean, empty_nan);
  else
    run<float>(s, mean, empty_nan);
  return {s.value, s.denominator};
}

std::tuple<Tensor, Tensor> segment_sum(const Tensor& input, const OptionalTensor& mask, const OptionalTensor& weight,
                                       const Tensor& cu_seqlens, const OptionalTensor&, const OptionalTensor& order,
                                       bool empty_nan) {
  return reduce(Segments("segment_sum", input, mask, weight, cu_seqlens, order), false, empty_nan);
}

std::tuple<Tensor, Tensor> segment_mean(const Tensor& input, const OptionalTensor& mask, const OptionalTensor& weight,
                                        const Tensor& cu_seqlens, const OptionalTensor&, const OptionalTensor& order,
                                       bool empty_nan) {
  return reduce(Segments("segment_mean", input, mask, weight, cu_seqlens, order), true, empty_nan);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_segment_sum", TORCH_BOX(&segment_sum));
  m.impl("_segment_mean", TORCH_BOX(&segment_mean));
}

}  // namespace safeops::cpu
