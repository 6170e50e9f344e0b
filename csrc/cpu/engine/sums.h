// The accumulator of weighted sums, and the step from its states to sums or means.
#pragma once

#include <limits>

#include "cpu/engine/reduction_driver.h"
#include "cpu/engine/vectors.h"

namespace safeops::cpu {

// Accumulates, for each output, the sum of the values that a loop computes, the sum of the weights, and the number of
// kept elements.
template <class C>
struct Sums {
  static constexpr int64_t kColumns = cpu::kColumns, kBlock = cpu::kBlock;
  const Finish& finish;
  Loop<C> loop;
  const void* op;
  StoredSum stored;
  bool has_weight = finish.weighted, has_second = false, has_count = finish.counted;

  void merge(const States& into, const States& from, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) into.value[i] += from.value[i];
    for (int64_t i = 0; has_weight && i < n; ++i) into.weight[i] += from.weight[i];
    for (int64_t i = 0; has_count && i < n; ++i) into.count[i] += from.count[i];
  }

  struct Worker {
    const Sums& sums;
    const bool weighted, counted;
    typename Inputs<C>::Buffers buffers;
    Chunk<C> chunk;
    alignas(64) C values_buffer[kBuffer];
    alignas(64) C weights_buffer[kBuffer];
    alignas(64) uint8_t keep_buffer[kBuffer];
    const C *values, *weights;
    const uint8_t* keep;
    bool computed;

    Worker(const Sums& sums_, const Inputs<C>& inputs)
        : sums(sums_), weighted(sums.has_weight), counted(sums.has_count), unit(inputs.unit()) {
      inputs.prime(buffers);
      chunk.out[0] = values_buffer;
      chunk.out[1] = weights_buffer;
      chunk.keep = keep_buffer;
    }

    void prepare() { computed = false; }  // the loop runs when its values are needed; plain rows do not need them

    bool rows(int64_t g, int64_t reduced, const States& out) {
      if (sums.finish.plain && reduced >= kShortRow) {
        for (int64_t i = 0; i < g; ++i) {
          start_row();
          add_row(i * reduced, reduced);
          finish_row(out.from(i));
        }
        return true;
      }
      compute_values();
      sum(values, g, reduced, out.value);
      if (weighted) sum(weights, g, reduced, out.weight);
      if (counted) count_kept(keep, g, reduced, out.count);
      return true;
    }

    void start_row() { value = weight = 0, count = 0; }

    bool stored_row(const Inputs<C>& inputs, int64_t begin, int64_t end) {
      Stored run;
      if (!sums.stored || !inputs.stored(begin, end - begin, run)) return false;
      sums.stored(sums.op, run, value, count);
      return true;
    }

    void row(int64_t m) {
      if (!sums.finish.plain) compute_values();
      for (int64_t at = 0; at < m; at += unit) add_row(at, std::min(unit, m - at));
    }

    void finish_row(const States& out) const {
      *out.value = value;
      if (weighted) *out.weight = weight;
      if (counted) *out.count = count;
    }

    void start_columns(int64_t n) {
      value_columns.start(n);
      if (weighted) weight_columns.start(n);
      if (counted) count_columns.start(n);
    }

    void transpose(int64_t g, int64_t n) {
      compute_values();
      transpose_values(values, g, n, transposed_values);
      values = transposed_values;
      if (weighted) transpose_values(weights, g, n, transposed_weights), weights = transposed_weights;
      if (counted) transpose_keep(keep, g, n, transposed_keep), keep = transposed_keep;
    }

    void add(int64_t at, int64_t m, int64_t first, int64_t period) {
      compute_values();
      value_columns.add(values + at, m, first, period);
      if (weighted) weight_columns.add(weights + at, m, first, period);
      if (counted) count_columns.add(keep + at, m, first, period);
    }

    States finish_columns(int64_t) {
      return {value_columns.finish(), weighted ? weight_columns.finish() : nullptr, nullptr,
              counted ? count_columns.finish() : nullptr};
    }

   private:
    void compute_values() {
      if (computed) return;
      computed = true;
      values = values_buffer, weights = weights_buffer, keep = keep_buffer;
      if (sums.finish.plain && !counted)
        values = chunk.in[0];
      else
        sums.loop(sums.op, chunk);
    }

    // Adds elements [at, at + m) of the chunk to the row.
    void add_row(int64_t at, int64_t m) {
      double part;
      if (sums.finish.plain && counted) normalize_mask(chunk.mask + at, m, keep_buffer + at);
      if (sums.finish.plain)
        part = (counted ? sum_kept : sum_all)({chunk.in[0] + at, keep_buffer + at, nullptr}, m);
      else
        sum(values + at, 1, m, &part);
      value += part;
      if (weighted) sum(weights + at, 1, m, &part), weight += part;
      int64_t kept;
      if (counted) count_kept(keep_buffer + at, 1, m, &kept), count += kept;
    }

    double value, weight;
    int64_t count;
    const int64_t unit;
    ColumnSums<C, double> value_columns, weight_columns;
    ColumnSums<uint8_t, int64_t> count_columns;
    decltype(pick<&rows_loop<C, double>>()) sum = pick<&rows_loop<C, double>>();
    decltype(pick<&rows_loop<uint8_t, int64_t>>()) count_kept = pick<&rows_loop<uint8_t, int64_t>>();
    decltype(pick<&cpu::transpose<C>>()) transpose_values = pick<&cpu::transpose<C>>();
    decltype(pick<&cpu::transpose<uint8_t>>()) transpose_keep = pick<&cpu::transpose<uint8_t>>();
    alignas(64) C transposed_values[kBuffer];
    alignas(64) C transposed_weights[kBuffer];
    alignas(64) uint8_t transposed_keep[kBuffer];
    decltype(pick<&normalize_mask_loop>()) normalize_mask = pick<&normalize_mask_loop>();
    decltype(&sum_row<C, 16, true, false>) sum_kept =
        pick_width<&sum_row<C, 64, true, false>, &sum_row<C, 32, true, false>, &sum_row<C, 16, true, false>>();
    decltype(&sum_row<C, 16, false, false>) sum_all =
        pick_width<&sum_row<C, 64, false, false>, &sum_row<C, 32, false, false>, &sum_row<C, 16, false, false>>();
  };
};

// Turns the states of n outputs into values and denominators. op: a Finish.
inline void sum_results_loop(const void* op, int64_t reduced, const States& states, int64_t n, const double*,
                  double* const* results) {
  const Finish& finish = *static_cast<const Finish*>(op);
  double *value = results[0], *denominator = results[1];
  // A divisor is the number of kept elements in all micro-batches and ranks. If it is 0, nothing is kept; a denominator
  // of inf then makes the mean 0.
  const bool has_divisor = finish.divisor.has_value(), zero_divisor = has_divisor && *finish.divisor == 0;
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  const double full_denominator = zero_divisor ? kInfinity : finish.divisor.value_or(static_cast<double>(reduced));
  const double nothing = finish.empty_nan && (!has_divisor || zero_divisor) ? kNaN : 0.0;
  const double* weights = finish.weighted ? states.weight : nullptr;
  const int64_t* counts = finish.counted ? states.count : nullptr;
  if (has_divisor || (!weights && !counts))
    for (int64_t i = 0; i < n; ++i) denominator[i] = full_denominator;
  else if (weights)
    std::copy_n(weights, n, denominator);
  else
    for (int64_t i = 0; i < n; ++i) denominator[i] = static_cast<double>(counts[i]);

  if (finish.mean)
    for (int64_t i = 0; i < n; ++i) value[i] = states.value[i] / denominator[i];
  else
    std::copy_n(states.value, n, value);

  if (zero_divisor && finish.empty_nan)
    std::fill_n(value, n, nothing);
  else if (counts)
    for (int64_t i = 0; i < n; ++i) value[i] = select(counts[i] == 0, nothing, value[i]);
  else if (reduced == 0)
    for (int64_t i = 0; i < n; ++i) value[i] = nothing;
}

}  // namespace safeops::cpu
