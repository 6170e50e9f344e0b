// Shared by the accumulators of the statistics: the kept elements of a chunk, and the bookkeeping of rows and columns.
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

// A range of magnitudes. kSquares: float can add kBlock squares of such numbers without over- or underflow.
// kMagnitudes: float can add kBlock such numbers.
struct SafeRange {
  float low, high;

  bool holds(float x) const { return x == 0 || (std::fabs(x) >= low && std::fabs(x) < high); }
};
constexpr SafeRange kSquares{0x1p-36f, 0x1p+54f}, kMagnitudes{0, 0x1p+120f};

// True if a kept element other than 0 is outside the range. It tests the signs of differences, because gcc compares
// 64-byte integer registers one lane at a time, which is ten times slower.
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

// Calls one(row, p) for each of n elements, which form rows of `period` columns: p is the column, row.x[p] the element.
// For a narrow row the loop needs simdlen(16): in a loop with mask bytes gcc would take 64 elements at once.
template <class C, class One>
inline void for_columns(const Elements<C>& e, int64_t n, int64_t period, const One& one) {
  const bool narrow = period < kPad;
  for_rows(n, period, e.keep && !narrow ? kPad : kLanes, [&](int64_t at, int64_t m) __attribute__((always_inline)) {
    const Elements<C> row{e.x + at, e.keep + at, e.w + at};
    if (narrow) {
#pragma omp simd simdlen(16)
      for (int64_t p = 0; p < m; ++p) one(row, p);
    } else {
      SAFEOPS_SIMD
      for (int64_t p = 0; p < m; ++p) one(row, p);
    }
  });
}

// ---- one thread's part of a reduction

// Each Accumulator::Worker derives from StatisticWorker. For rows it defines reset_row(), accumulate_row(elements, n,
// kept) and row_state(out); for columns reset_columns(), accumulate_columns(elements, first, n, period) and
// column_states().
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
        unit_(inputs.unit()),
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

  bool rows(int64_t g, int64_t reduced, const States& out) {
    if (reduced < kShortRow) return false;
    for (int64_t i = 0; i < g; ++i) {
      start_row();
      add_row(e_.from(i * reduced), reduced);
      finish_row(out.from(i));
    }
    return true;
  }

  void start_row() {
    count_ = 0;
    self().reset_row();
  }

  void row(int64_t m) {
    for (int64_t at = 0; at < m; at += unit_) add_row(e_.from(at), std::min(unit_, m - at));
  }

  void finish_row(const States& out) {
    if (out.count) *out.count = count_;
    self().row_state(out);
  }

  void start_columns(int64_t n) {
    width_ = n;
    std::fill_n(counts_, n, uint8_t{0});
    self().reset_columns();
  }

  void transpose(int64_t g, int64_t n) {
    transpose(e_.x, g, n, transposed_);
    transpose(e_.keep, g, n, transposed_keep_);
    transpose(e_.w, g, n, transposed_weights_);
  }

  void add(int64_t at, int64_t m, int64_t first, int64_t period) {
    const Elements<C> e = e_.from(at);
    if (e.keep) add_counts_(e.keep, m, period, counts_ + first);
    self().accumulate_columns(e, first, m, period);
  }

  States finish_columns(int64_t m) {
    const int64_t all = m / width_, more = m % width_;  // `all` elements per accumulator, one more in the first `more`
    for (int64_t p = 0; p < width_; ++p) column_counts_[p] = masked_ || weighted_ ? counts_[p] : all + (p < more);
    return self().column_states();
  }

 protected:
  // Calls pick(keep, weight) with two std::bool_constants. keep: there is a mask or a weight; weight: there is a
  // weight.
  template <class Pick>
  void pick_kind(const Pick& pick) const {
    if (weighted_) return pick(std::true_type{}, std::true_type{});
    if (masked_) return pick(std::true_type{}, std::false_type{});
    pick(std::false_type{}, std::false_type{});
  }

  const Accumulator& accumulator_;
  const bool weighted_, masked_, scaled_, valued_;  // valued: there is an input x; a count has none
  const int64_t unit_;
  int64_t count_, width_;                           // kept elements of the row; number of accumulators
  int64_t column_counts_[Accumulator::kColumns + kPad];  // kept elements of each column

 private:
  auto& self() { return static_cast<typename Accumulator::Worker&>(*this); }

  void add_row(const Elements<C>& e, int64_t m) {
    int64_t kept = m;
    if (e.keep) count_kept_(e.keep, 1, m, &kept);
    count_ += kept;
    if (kept) self().accumulate_row(e, m, kept);
  }

  template <class T>
  static void transpose(const T*& elements, int64_t g, int64_t n, T* to) {
    if (elements) pick<&cpu::transpose<T>>()(elements, g, n, to), elements = to;
  }

  Elements<C> e_;
  decltype(pick<&normalize_mask_loop>()) normalize_mask_ = pick<&normalize_mask_loop>();
  decltype(pick<&weigh_loop<C, true>>()) weigh_;
  decltype(pick<&product_loop<C>>()) product_ = pick<&product_loop<C>>();
  decltype(pick<&add_loop<uint8_t>>()) add_counts_ = pick<&add_loop<uint8_t>>();
  decltype(pick<&rows_loop<uint8_t, int64_t>>()) count_kept_ = pick<&rows_loop<uint8_t, int64_t>>();
  alignas(64) uint8_t counts_[Accumulator::kColumns + kPad];
  alignas(64) uint8_t keep_[kBuffer];
  alignas(64) C weights_[kBuffer];
  alignas(64) C scaled_buffer_[kBuffer];
  alignas(64) C transposed_[kBuffer];
  alignas(64) C transposed_weights_[kBuffer];
  alignas(64) uint8_t transposed_keep_[kBuffer];
};

}  // namespace safeops::cpu
