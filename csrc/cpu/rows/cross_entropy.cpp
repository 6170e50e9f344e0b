// A class of each row, or probabilities.
// I/O: read x, of probabilities read them; of each row read the class, write its loss and logsumexp.
#include "cpu/engine/math.h"
#include "cpu/rows/cross_entropy_sums.h"

namespace safeops::cpu {

namespace {

template <class C>
void finish(const void* data, int64_t rows, const double* const* states, double* const* results, C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  double *loss = results[0], *high = results[1], *low = results[2];  // logsumexp = high + low
  const double *top = states[kTop], *own = states[kOwn], rest = 1 - op.smoothing;
  double infinite = 0;
#pragma omp simd reduction(+ : infinite)
  for (int64_t r = 0; r < rows; ++r) {
    high[r] = top[r];
    low[r] = math::log_positive(states[kTotal][r]);
    loss[r] = (top[r] - own[r]) + low[r];
    infinite += select_or_zero(top[r] - top[r] != 0, 1.0);
  }
  const double* mass = states[kMass];
  if (op.row_weights) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) loss[r] *= parameters[kRowWeight][r];
  } else if (op.shares) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r)  // (of an infinite mass the parts would be inf - inf)
      loss[r] = select(mass[r] - mass[r] == 0, (mass[r] * top[r] - own[r]) + mass[r] * low[r], mass[r]);
  }
  if (op.has_even) {
    double* even = results[3 + op.has_factor];
    const double *sum = states[kSum], *weight = states[kWeight];
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) {
      even[r] = op.smoothing / states[kCount][r];
      loss[r] = rest * loss[r] + even[r] * ((weight[r] * top[r] - sum[r]) + weight[r] * low[r]);
    }
  }
  if (op.has_factor) {
    for (int64_t r = 0; r < rows; ++r) {
      const double of_own = op.shares ? mass[r] : static_cast<double>(parameters[kRowWeight][r]);
      results[3][r] = rest * of_own + (op.has_even ? results[4][r] * states[kWeight][r] : 0.0);
    }
  }
  if (op.z != 0) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) loss[r] += op.z * (top[r] + low[r]) * (top[r] + low[r]);
  }
  // Nothing but -inf: NaN, as torch has it. +inf too, but where it is the row's own logit, and that one alone.
  for (int64_t r = 0; r < rows && infinite != 0; ++r) {
    if (!std::isinf(top[r])) continue;
    const bool plain = !op.shares && !op.has_even && op.z == 0;
    const bool certain = plain && top[r] > 0 && states[kTotal][r] == 1 && own[r] == top[r];
    high[r] = certain ? top[r] : std::numeric_limits<double>::quiet_NaN();
    loss[r] = certain ? 0 : high[r];
  }
  for (int i = 0; i < 1 + op.numbers(); ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) results[i][r] = select_or_zero(parameters[kPlaceHigh][r] >= 0, results[i][r]);
  }
}

// ---- the op

template <class C>
RowLoops<C> forward_loops(const CrossEntropy<C>& op) {
  RowLoops<C> loops;
  loops.prepare = pick<&prepare<C>>();
  loops.accumulate_rows =
      pick_width<&accumulate_rows<C, 64>, &accumulate_rows<C, 32>, &accumulate_rows<C, 16>>();
  loops.accumulate_columns = pick<&accumulate_columns<C>>();
  loops.states = states_of(op);
  loops.merge = loops.states == kStates    ? pick<&merge<C, kStates>>()
                : loops.states == kMass + 1 ? pick<&merge<C, kMass + 1>>()
                                            : pick<&merge<C, kOwn + 1>>();
  loops.finish = pick<&finish<C>>();
  // (the other loops have buffers for a chunk)
  if (!op.shares && !op.has_even) loops.converted_piece = 2 * kChunk;
  loops.start[kTop] = kNothing<double>;
  return loops;
}

template <class C>
void run(const ClassRows& rows, const View& x, const View* shares, double smoothing, double z, const View& loss,
         const View& numbers) {
  const std::vector<C> weights = narrowed<C>(rows.weights);
  const CrossEntropy<C> op(shares != nullptr, rows.weighted ? weights.data() : nullptr, rows.weighted, smoothing, z);
  Rowwise<C> walk(x.shape(), rows.dim, x);
  walk.input(x);
  if (shares) walk.input(*shares);
  const RowNumbers<double> place(rows.shape, rows.place.get(), DType::kDouble);
  const RowNumbers<double> weight(rows.shape, rows.weight ? rows.weight.get() : rows.place.get(), DType::kDouble);
  walk.given(place.view(), false);
  walk.given(weight.view(), false);
  walk.result(loss, false);
  for (int i = 0; i < op.numbers(); ++i) walk.result(numbers_at(rows, numbers, i).view(), false);
  walk.run(forward_loops<C>(op), &op);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& input, const Tensor& target,
                                                         const std::optional<Tensor>& weight,
                                                         const std::optional<Tensor>& mask, int64_t ignore_index,
                                                         double smoothing, double z) {
  constexpr char kName[] = "_cross_entropy";
  const View x(input), t(target);
  ClassRows rows(kName, x);
  const bool shares = t.is_floating();
  STD_TORCH_CHECK(!shares || x.shape().is(t.ndim, t.sizes), kName, ": probabilities must have input's shape");
  if (weight) rows.read_weights(kName, *weight);
  const DType dtype = wide(x.dtype, shares ? t.dtype : x.dtype);
  const DType compute = weight ? wide(dtype, View(*weight).dtype) : dtype;
  const Tensor keep = empty(rows.shape, DType::kBool, input);
  rows.read(kName, shares ? nullptr : &target, mask, ignore_index, true, reinterpret_cast<uint8_t*>(View(keep).data));
  const Tensor weights = rows.weight_tensor(compute, dtype, input);
  const Tensor loss = empty(rows.shape, dtype, input);
  const int64_t many = CrossEntropy<float>(shares, nullptr, weight.has_value(), smoothing, z).numbers();
  const Tensor numbers = empty(rows.with(many), compute, input);
  if (rows.classes == 0) {
    set_zero(loss), set_zero(numbers);
  } else {
    (compute == DType::kDouble ? run<double> : run<float>)(rows, x, shares ? &t : nullptr, smoothing, z, View(loss),
                                                           View(numbers));
  }
  return {loss, keep, weights, numbers};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_cross_entropy", TORCH_BOX(&cross_entropy)); }

}  // namespace safeops::cpu
