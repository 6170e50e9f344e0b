// The forward of cross entropy, for class indices or probabilities, and of token_log_probs.
// I/O: read x, and q if there are probabilities; for each row read its class, and write its loss and row_stats.
#include "cpu/engine/math.h"
#include "cpu/classification/cross_entropy_sums.h"

namespace safeops::cpu {

namespace {

template <class C>
void finish(const void* data, int64_t rows, const double* const* states, double* const* results, C* const* parameters) {
  const auto& op = *static_cast<const CrossEntropy<C>*>(data);
  double *loss = results[0], *maximum_result = results[1], *log_total = results[2];  // logsumexp = maximum + log_total
  const double *maximum = states[kMax], *target_logit = states[kTargetLogit], confidence = 1 - op.smoothing;
  double infinite = 0;
#pragma omp simd reduction(+ : infinite)
  for (int64_t r = 0; r < rows; ++r) {
    maximum_result[r] = maximum[r];
    log_total[r] = math::log_positive(states[kTotal][r]);
    loss[r] = (maximum[r] - target_logit[r]) + log_total[r];  // L - x_y
    infinite += select_or_zero(maximum[r] - maximum[r] != 0, 1.0);
  }
  const double* target_weights = states[kTargetWeight];
  if (op.row_weights) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) loss[r] *= parameters[kRowWeight][r];
  } else if (op.has_probabilities) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) {
      const double weight = target_weights[r], finite = (weight * maximum[r] - target_logit[r]) + weight * log_total[r];
      loss[r] = select(weight - weight == 0, finite, weight);  // an infinite weight would give inf - inf
    }
  }
  if (op.has_uniform) {
    double* uniform = results[3 + op.has_factor];
    const double *sum = states[kLogitSum], *weight = states[kWeightSum];
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) {
      // Adds (smoothing / A) sum_c w_c (L - x_c).
      uniform[r] = op.smoothing / states[kClassCount][r];
      loss[r] = confidence * loss[r] + uniform[r] * ((weight[r] * maximum[r] - sum[r]) + weight[r] * log_total[r]);
    }
  }
  if (op.has_factor) {
    for (int64_t r = 0; r < rows; ++r) {
      const double target_weight =
          op.has_probabilities ? target_weights[r] : static_cast<double>(parameters[kRowWeight][r]);
      results[3][r] = confidence * target_weight + (op.has_uniform ? results[4][r] * states[kWeightSum][r] : 0.0);
    }
  }
  if (op.z != 0) {  // z L^2
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r)
      loss[r] += op.z * (maximum[r] + log_total[r]) * (maximum[r] + log_total[r]);
  }
  // As in torch, a row of logits that are all -inf gives NaN. A row with +inf gives NaN, too, with one exception: if
  // only the target's logit is +inf, and there are neither smoothing nor z-loss nor probabilities, the loss is 0.
  for (int64_t r = 0; r < rows && infinite != 0; ++r) {
    if (!std::isinf(maximum[r])) continue;
    const bool plain = !op.has_probabilities && !op.has_uniform && op.z == 0;
    const bool certain = plain && maximum[r] > 0 && states[kTotal][r] == 1 && target_logit[r] == maximum[r];
    maximum_result[r] = certain ? maximum[r] : std::numeric_limits<double>::quiet_NaN();
    loss[r] = certain ? 0 : maximum_result[r];
  }
  for (int i = 0; i < 1 + op.stats_count(); ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) results[i][r] = select_or_zero(parameters[kClassHigh][r] >= 0, results[i][r]);
  }
}

// Results 0 to 2 are those of token_log_probs: log probability, entropy, L. Results 3 to 5 are the row_stats for its
// backward: the largest logit, L minus the largest logit, the entropy.
template <class C>
void finish_entropy(const void*, int64_t rows, const double* const* states, double* const* results,
                    C* const* parameters) {
  SAFEOPS_SIMD
  for (int64_t r = 0; r < rows; ++r) {
    const double maximum = states[kMax][r], log_total = math::log_positive(states[kTotal][r]);
    results[0][r] = (states[kTargetLogit][r] - maximum) - log_total;
    results[1][r] = results[5][r] = log_total - states[kEntropySum][r] / states[kTotal][r];
    results[2][r] = maximum + log_total;
    results[3][r] = maximum;
    results[4][r] = log_total;
  }
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (int64_t r = 0; r < rows; ++r) {
    const double maximum = states[kMax][r];
    if (maximum - maximum == 0) continue;
    const bool certain = maximum > 0 && states[kTotal][r] == 1 && states[kTargetLogit][r] == maximum;
    for (int i : {0, 1, 4, 5}) results[i][r] = certain ? 0 : kNaN;
    results[2][r] = certain ? maximum : kNaN;
    // If all logits are -inf, the result is -inf instead of NaN: with a split vocabulary, another part may have finite
    // logits.
    results[3][r] = certain || states[kTotal][r] == 0 ? maximum : kNaN;
  }
  for (int i = 0; i < 6; ++i) {
    SAFEOPS_SIMD
    for (int64_t r = 0; r < rows; ++r) results[i][r] = select_or_zero(parameters[kClassHigh][r] >= 0, results[i][r]);
  }
}

template <class C>
void finish_argmax(const void* op, int64_t rows, const double* const* states, double* const* results,
                   C* const* parameters) {
  finish_entropy<C>(op, rows, states, results, parameters);
  for (int64_t r = 0; r < rows; ++r)
    results[6][r] = select_or_zero(parameters[kClassHigh][r] >= 0, states[kIndex][r]);
}

// ---- the ops

template <class C>
RowLoops<C> forward_loops(const CrossEntropy<C>& op) {
  RowLoops<C> loops;
  if (op.logits.changed) loops.read = pick<&read_logits<C>>();
  loops.prepare = pick<&prepare<C>>();
  loops.accumulate_rows =
      pick_width<&accumulate_rows<C, 64>, &accumulate_rows<C, 32>, &accumulate_rows<C, 16>>();
  loops.accumulate_columns = pick<&accumulate_columns<C>>();
  loops.states = states_of(op);
  loops.merge = op.has_argmax                ? pick<&merge_best<C>>()
                : op.has_entropy             ? pick<&merge_moments<C>>()
                : loops.states == kStates    ? pick<&merge<C, kStates>>()
                : loops.states == kTargetWeight + 1 ? pick<&merge<C, kTargetWeight + 1>>()
                                            : pick<&merge<C, kTargetLogit + 1>>();
  loops.finish = op.has_argmax    ? pick<&finish_argmax<C>>()
                 : op.has_entropy ? pick<&finish_entropy<C>>()
                                  : pick<&finish<C>>();
  // With the other options the loops have buffers of one chunk, so they need the default, shorter pieces.
  if (!op.has_probabilities && !op.has_uniform && !op.has_entropy) loops.converted_piece = 2 * kChunk;
  loops.start[kMax] = kMinusInfinity<double>;
  if (op.has_argmax) loops.start[kBest] = kMinusInfinity<double>, loops.start[kIndex] = kInfinity<double>;
  return loops;
}

template <class C>
void run(const ClassRows& rows, const View& x, const View* probabilities, double smoothing, double z,
         double temperature, double softcap, const View& loss, const View& row_stats) {
  const std::vector<C> weights = narrowed<C>(rows.weights);
  const CrossEntropy<C> op(probabilities != nullptr, rows.weighted ? weights.data() : nullptr, rows.weighted,
                           smoothing, z, Logits<C>(temperature, softcap));
  Rowwise<C> walk(x.shape(), rows.dim, x);
  walk.input(x);
  if (probabilities) walk.input(*probabilities);
  const RowValues<double> class_index(rows.shape, rows.class_index.get(), DType::kDouble);
  const RowValues<double> weight(rows.shape, rows.weight ? rows.weight.get() : rows.class_index.get(), DType::kDouble);
  walk.row_input(class_index.view(), false);
  walk.row_input(weight.view(), false);
  walk.result(loss, false);
  for (int i = 0; i < op.stats_count(); ++i) walk.result(row_stat(rows, row_stats, i).view(), false);
  walk.run(forward_loops<C>(op), &op);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy(const Tensor& input, const Tensor& target,
                                                         const std::optional<Tensor>& weight,
                                                         const std::optional<Tensor>& mask, int64_t ignore_index,
                                                         double smoothing, double z, double temperature,
                                                         double softcap) {
  constexpr char kName[] = "_cross_entropy";
  const View x(input), t(target);
  ClassRows rows(kName, x);
  const bool has_probabilities = t.is_floating();
  STD_TORCH_CHECK(!has_probabilities || x.shape().is(t.ndim, t.sizes), kName,
                  ": probabilities must have input's shape");
  if (weight) rows.read_weights(kName, *weight);
  const DType dtype = wide(x.dtype, has_probabilities ? t.dtype : x.dtype);
  const DType compute = weight ? wide(dtype, View(*weight).dtype) : dtype;
  const Tensor keep = empty(rows.shape, DType::kBool, input);
  rows.read(kName, has_probabilities ? nullptr : &target, mask, ignore_index, true,
            reinterpret_cast<uint8_t*>(View(keep).data));
  const Tensor weights = rows.weight_tensor(compute, dtype, input);
  const Tensor loss = empty(rows.shape, dtype, input);
  const int64_t stats_count =
      CrossEntropy<float>(has_probabilities, nullptr, weight.has_value(), smoothing, z).stats_count();
  const Tensor row_stats = empty(rows.with(stats_count), compute, input);
  if (rows.classes == 0) {
    set_zero(loss), set_zero(row_stats);
  } else {
    (compute == DType::kDouble ? run<double> : run<float>)(
        rows, x, has_probabilities ? &t : nullptr, smoothing, z, temperature, softcap, View(loss), View(row_stats));
  }
  return {loss, keep, weights, row_stats};
}

// argmax: receives the class of the largest logit of each row; null: not wanted.
template <class C>
void run_entropy(const ClassRows& rows, const View& x, double temperature, double softcap, const View& results,
                 const View& row_stats, double* argmax) {
  CrossEntropy<C> op(false, nullptr, false, 0, 0, Logits<C>(temperature, softcap));
  op.has_entropy = true;
  op.has_argmax = argmax != nullptr;
  Rowwise<C> walk(x.shape(), rows.dim, x);
  walk.input(x);
  if (argmax && op.logits.changed) walk.input(x);  // for the argmax: the logits before softcap and temperature
  const RowValues<double> class_index(rows.shape, rows.class_index.get(), DType::kDouble);
  walk.row_input(class_index.view(), false);
  walk.row_input(class_index.view(), false);  // in place of the weight, which is not used
  for (const View& all : {results, row_stats})
    for (int i = 0; i < 3; ++i) walk.result(row_stat(rows, all, i).view(), false);
  if (argmax) walk.result(RowValues<double>(rows.shape, argmax, DType::kDouble).view(), false);
  walk.run(forward_loops<C>(op), &op);
}

constexpr char kLogProbs[] = "_token_log_probs";

std::tuple<Tensor, Tensor> log_probs(const ClassRows& rows, const Tensor& input, double temperature, double softcap,
                                     double* argmax) {
  const View x(input);
  const DType dtype = wide(x.dtype, x.dtype);
  const Tensor results = empty(rows.with(3), dtype, input), row_stats = empty(rows.with(3), dtype, input);
  if (rows.classes == 0) {
    set_zero(results), set_zero(row_stats);
  } else {
    (dtype == DType::kDouble ? run_entropy<double> : run_entropy<float>)(rows, x, temperature, softcap, View(results),
                                                                         View(row_stats), argmax);
  }
  return {results, row_stats};
}

std::tuple<Tensor, Tensor> token_log_probs(const Tensor& input, const Tensor& target,
                                           const std::optional<Tensor>& mask, int64_t ignore_index, double temperature,
                                           double softcap) {
  ClassRows rows(kLogProbs, View(input));
  rows.read(kLogProbs, &target, mask, ignore_index, true, nullptr);
  return log_probs(rows, input, temperature, softcap, nullptr);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_log_probs_argmax(const Tensor& input, const Tensor& target,
                                                                  const std::optional<Tensor>& mask,
                                                                  int64_t ignore_index, double temperature,
                                                                  double softcap) {
  ClassRows rows(kLogProbs, View(input));
  rows.read(kLogProbs, &target, mask, ignore_index, true, nullptr);
  std::vector<double> index(std::max<int64_t>(1, rows.count));
  const auto [results, row_stats] = log_probs(rows, input, temperature, softcap, index.data());
  const Tensor argmax = empty(rows.shape, DType::kLong, input), correct = empty(rows.shape, DType::kBool, input);
  auto* classes = reinterpret_cast<int64_t*>(View(argmax).data);
  auto* is_own = reinterpret_cast<uint8_t*>(View(correct).data);
  for (int64_t r = 0; r < rows.count; ++r) {
    classes[r] = static_cast<int64_t>(index[r]);
    is_own[r] = rows.class_index[r] == index[r];
  }
  return {results, argmax, correct, row_stats};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("_token_log_probs", TORCH_BOX(&token_log_probs));
  m.impl("_token_log_probs_argmax", TORCH_BOX(&token_log_probs_argmax));
}

}  // namespace safeops::cpu
