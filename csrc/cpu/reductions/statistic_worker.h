// Accumulators of the statistics share the kept elements of a chunk, and the bookkeeping of rows and columns.
#pragma once

#include "cpu/engine/reduction_driver.h"
#include "cpu/engine/transpose.h"
#include "cpu/engine/vectors.h"

namespace safeops::cpu {

// ---- inner loops

template <class C, bool kMask>
void weigh_loop(const uint8_t* mask, const C* w, int64_t n, uint8_t* keep, C* weights) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    bool k = w[i] != 0;  // a NaN weight is kept
    if constexpr (kMask) k = k & (mask[i] != 0);
    keep[i] = k;
    weights[i] = select_or_zero(k, w[i]);
  }
}

template <class C>
void product_loop(const C* a, const C* b, int64_t n, C* out) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

// Magnitudes that float can square, or add, kBlock times over without loss.
struct SafeRange {
  float low, high;
};
constexpr SafeRange kSquares{0x1p-36f, 0x1p+54f}, kMagnitudes{0, 0x1p+120f};

// True if any kept element but 0 is out of the range. The signs of differences tell: gcc compares 64-byte integer
// registers one lane at a time, ten times slower.
template <int kBytes, bool kKeep>
bool any_out_of_range(const Elements<float>& e, int64_t n, const SafeRange& range) {
  using R = Register<float, kBytes>;
  using I = typename R::I;
  const int32_t low = bit_cast<int32_t>(range.low), high = bit_cast<int32_t>(range.high);
  I out_of_range[4] = {};
  for_vectors<float, kBytes, kKeep, false>(e, n, [&](int k, const auto& x, const I& keep, const auto&)
                                                     __attribute__((always_inline)) {
    const I size = reinterpret_cast<I>(x) & keep & 0x7FFFFFFF;
    out_of_range[k] |= ((size - low) | (high - 1 - size)) & -size;
  });
  const I all = (out_of_range[0] | out_of_range[1]) | (out_of_range[2] | out_of_range[3]);
  int32_t any = 0;
  for (int i = 0; i < R::kLanes; ++i) any |= all[i];
  return any < 0;
}

// Calls one(row, p) for each of n elements that lie in rows of `period` columns: p is the column, row.x[p] the element.
template <class C, class One>
inline void for_columns(const Elements<C>& e, int64_t n, int64_t period, const One& one) {
  for (int64_t at = 0; at < n; at += period) {
    const Elements<C> row{e.x + at, e.keep + at, e.w + at};
    const int64_t m = n - at < period ? n - at : period;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) one(row, p);
  }
}

// ---- one thread's part of a reduction

// Accumulator::Worker derives from it and accumulates a row: reset_row(), accumulate_row(elements, n, kept),
// row_state(out), and columns: reset_columns(), accumulate_columns(elements, first, n, period), flush_columns(counts),
// column_states(). A column takes Accumulator::kBlock elements before it is flushed.
template <class C, class Accumulator>
class StatisticWorker {
 public:
  typename Inputs<C>::Buffers buffers;
  Chunk<C> chunk;

  StatisticWorker(const Accumulator& accumulator, const Inputs<C>& inputs)
      : accumulator_(accumulator),
        weighted_(accumulator.weighted),
        masked_(inputs.masked),
        scaled_(accumulator.scaled),
        valued_(inputs.count > weighted_),
        weigh_(masked_ ? pick<&weigh_loop<C, true>>() : pick<&weigh_loop<C, false>>()) {
    inputs.prime(buffers);
  }

  void prepare() {
    const int64_t n = chunk.n;
    e_ = {valued_ ? chunk.in[weighted_] : nullptr, nullptr, nullptr};
    if (scaled_) {
      product_(e_.x, chunk.in[weighted_ + 1], n, scaled_buffer_);
      e_.x = scaled_buffer_;
    }
    if (weighted_) {
      weigh_(chunk.mask, chunk.in[0], n, keep_, weights_);
      e_.keep = keep_;
      e_.w = weights_;
    } else if (masked_) {
      normalize_mask_(chunk.mask, n, keep_);
      e_.keep = keep_;
    }
  }

  void groups(int64_t g, int64_t reduced, int64_t inner, const States& out) {
    if (inner == 1 && reduced >= kShortRow) {
      for (int64_t i = 0; i < g; ++i) {
        start_row();
        add_row(e_.from(i * reduced), reduced);
        finish_row(out.from(i));
      }
      return;
    }
    // Short rows are transposed, so that they lie side by side as columns.
    const int64_t n = g * inner, total = n * reduced;
    const Elements<C> e = g > 1 ? transposed(g, reduced, inner) : e_;
    const int64_t period = total >= kMinPeriod ? period_for(n, total) : n;
    start_columns(period);
    const int64_t most = Accumulator::kBlock * period;
    for (int64_t at = 0; at < total; at += most) {
      reserve(Accumulator::kBlock);
      add(e.from(at), std::min(most, total - at));
    }
    finish_columns(n, out);
  }

  void start_row() {
    count_ = 0;
    self().reset_row();
  }

  void row(int64_t m) { add_row(e_, m); }

  void finish_row(const States& out) {
    if (out.count) *out.count = count_;
    self().row_state(out);
  }

  void start_columns(int64_t period) {
    period_ = period;
    filled_ = full_periods_ = remainder_ = 0;
    std::fill_n(counts_, period, uint8_t{0});
    std::fill_n(column_counts_, period, int64_t{0});
    self().reset_columns();
  }

  void reserve(int64_t additions) {
    if (filled_ + additions > Accumulator::kBlock) flush();
    filled_ += additions;
  }

  void add(int64_t m) { add(e_, m); }

  void add_at(int64_t first, int64_t m) {
    if (e_.keep)
      add_counts_(e_.keep, m, m, counts_ + first);
    else
      full_periods_ += first == 0;
    self().accumulate_columns(e_, first, m, m);
  }

  void finish_columns(int64_t n, const States& out) {
    flush();
    const States columns = self().column_states();
    for (int64_t p = n; p < period_; p += n) accumulator_.merge(columns, columns.from(p), n);
    std::copy_n(columns.value, n, out.value);
    if (columns.weight && out.weight) std::copy_n(columns.weight, n, out.weight);
    if (columns.second && out.second) std::copy_n(columns.second, n, out.second);
    if (columns.count && out.count) std::copy_n(columns.count, n, out.count);
  }

 protected:
  // Calls pick(keep, weight) with two std::bool_constants: elements have a mask (also with weights), and weights.
  template <class Pick>
  void pick_kind(const Pick& pick) const {
    if (weighted_) return pick(std::true_type{}, std::true_type{});
    if (masked_) return pick(std::true_type{}, std::false_type{});
    pick(std::false_type{}, std::false_type{});
  }

  const Accumulator& accumulator_;
  const bool weighted_, masked_, scaled_, valued_;  // valued: there is an input; a count reads none
  int64_t count_, period_;                          // kept elements of the row; accumulators of the columns
  int64_t column_counts_[Accumulator::kColumns];    // kept elements of each column

 private:
  auto& self() { return static_cast<typename Accumulator::Worker&>(*this); }

  void add_row(const Elements<C>& e, int64_t m) {
    int64_t kept = m;
    if (e.keep) count_kept_(e.keep, 1, m, &kept);
    count_ += kept;
    if (kept) self().accumulate_row(e, m, kept);
  }

  void add(const Elements<C>& e, int64_t m) {
    if (e.keep)
      add_counts_(e.keep, m, period_, counts_);
    else
      full_periods_ += m / period_, remainder_ = m % period_;
    self().accumulate_columns(e, 0, m, period_);
  }

  void flush() {
    alignas(64) double count[Accumulator::kColumns];  // kept elements of each column since the last flush
    for (int64_t p = 0; p < period_; ++p) {
      const int64_t n = masked_ || weighted_ ? counts_[p] : full_periods_ + (p < remainder_);
      column_counts_[p] += n;
      count[p] = static_cast<double>(n);
    }
    self().flush_columns(count);
    std::fill_n(counts_, period_, uint8_t{0});
    filled_ = full_periods_ = remainder_ = 0;
  }

  // (g, reduced, inner) -> (reduced, g, inner)
  Elements<C> transposed(int64_t g, int64_t reduced, int64_t inner) {
    if (e_.x) transpose_groups(e_.x, g, reduced, inner, transposed_);
    if (e_.keep) transpose_groups(e_.keep, g, reduced, inner, transposed_keep_);
    if (e_.w) transpose_groups(e_.w, g, reduced, inner, transposed_weights_);
    return {transposed_, e_.keep ? transposed_keep_ : nullptr, e_.w ? transposed_weights_ : nullptr};
  }

  template <class T>
  static void transpose_groups(const T* from, int64_t g, int64_t reduced, int64_t inner, T* to) {
    if (inner == 1) return transpose(from, g, reduced, to);
    for (int64_t r = 0; r < reduced; ++r)
      for (int64_t i = 0; i < g; ++i, to += inner) std::copy_n(from + (i * reduced + r) * inner, inner, to);
  }

  Elements<C> e_;
  int64_t filled_;                    // additions to each accumulator since the last flush
  int64_t full_periods_, remainder_;  // where all elements are kept: full periods, and the elements after them
  decltype(pick<&normalize_mask_loop>()) normalize_mask_ = pick<&normalize_mask_loop>();
  decltype(pick<&weigh_loop<C, true>>()) weigh_;
  decltype(pick<&product_loop<C>>()) product_ = pick<&product_loop<C>>();
  decltype(pick<&add_loop<uint8_t>>()) add_counts_ = pick<&add_loop<uint8_t>>();
  decltype(pick<&rows_loop<uint8_t, int64_t>>()) count_kept_ = pick<&rows_loop<uint8_t, int64_t>>();
  alignas(64) uint8_t counts_[Accumulator::kColumns];
  alignas(64) uint8_t keep_[kBuffer];
  alignas(64) C weights_[kBuffer];
  alignas(64) C scaled_buffer_[kBuffer];
  alignas(64) C transposed_[kBuffer];
  alignas(64) C transposed_weights_[kBuffer];
  alignas(64) uint8_t transposed_keep_[kBuffer];
};

}  // namespace safeops::cpu
