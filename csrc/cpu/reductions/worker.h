// What the folds of the statistics share: the kept elements of a chunk, and the bookkeeping of columns.
#pragma once

#include "cpu/engine/vectors.h"
#include "cpu/engine/reducer.h"

namespace safeops::cpu {

// ---- inner loops

template <class C, bool kMask>
void weigh_loop(const uint8_t* mask, const C* w, int64_t n, uint8_t* keep, C* weights) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    bool k = w[i] != 0;  // a NaN weight is kept
    if constexpr (kMask) k = k & (mask[i] != 0);
    keep[i] = k;
    weights[i] = kept_or_zero(k, w[i]);
  }
}

template <class C>
void product_loop(const C* a, const C* b, int64_t n, C* out) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

// Magnitudes of which a block of rows can be summed in float.
struct Ordinary {
  float low, high;
};
constexpr Ordinary kSquares{0x1p-36f, 0x1p+54f}, kMagnitudes{0, 0x1p+120f};

// Whether any kept element but 0 is out of the range.
template <int kBytes, bool kKeep>
bool any_extraordinary(const Elements<float>& e, int64_t n, const Ordinary& range) {
  using R = Register<float, kBytes>;
  using I = typename R::I;
  const int32_t low = bit_cast<int32_t>(range.low), high = bit_cast<int32_t>(range.high);
  I found[4] = {};
  for_lines<float, kBytes, kKeep, false>(e, n, [&](int k, const auto& x, const I& keep, const auto&)
                                                   __attribute__((always_inline)) {
    const I size = reinterpret_cast<I>(x) & keep & 0x7FFFFFFF;
    found[k] |= (size >= high) | ((size < low) & (size != 0));
  });
  const I all = (found[0] | found[1]) | (found[2] | found[3]);
  int32_t any = 0;
  for (int i = 0; i < R::kSide; ++i) any |= all[i];
  return any != 0;
}

// ---- one thread's part of a fold

// Derived folds rows (start_row, fold_row, row_state) and lanes (start_lanes, fold_lanes, empty_lanes); its lanes take
// kBlock additions.
template <class C, class Fold, class Derived>
class Kept {
 public:
  typename Inputs<C>::Buffers buffers;
  Chunk<C> chunk;

  Kept(const Fold& fold, const Inputs<C>& inputs)
      : fold_(fold),
        weighted_(fold.weighted),
        masked_(inputs.masked),
        scaled_(fold.scaled),
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
      normalise_(chunk.mask, n, keep_);
      e_.keep = keep_;
    }
  }

  void groups(int64_t g, int64_t reduced, int64_t inner, const Totals& out) {
    if (inner == 1 && reduced >= kShortRow) {
      for (int64_t i = 0; i < g; ++i) {
        start_row();
        add_row(e_.from(i * reduced), reduced);
        finish_row(out.from(i));
      }
      return;
    }
    // Short rows side by side are columns.
    const int64_t n = g * inner, total = n * reduced;
    const Elements<C> e = g > 1 ? transposed(g, reduced, inner) : e_;
    const int64_t period = total >= kLanes ? lanes_for(n, total) : n;
    start(period);
    const int64_t most = Derived::kBlock * period;
    for (int64_t at = 0; at < total; at += most) {
      room(Derived::kBlock);
      add(e.from(at), std::min(most, total - at));
    }
    finish(n, out);
  }

  void start_row() {
    count_ = 0;
    self().reset_row();
  }

  void row(int64_t m) { add_row(e_, m); }

  void finish_row(const Totals& out) {
    if (out.count) *out.count = count_;
    self().row_state(out);
  }

  void start(int64_t lanes) {
    period_ = lanes;
    filled_ = whole_ = rest_ = 0;
    std::fill_n(counts_, lanes, uint8_t{0});
    std::fill_n(count_lanes_, lanes, int64_t{0});
    self().start_lanes();
  }

  void room(int64_t additions) {
    if (filled_ + additions > Derived::kBlock) empty();
    filled_ += additions;
  }

  void add(int64_t m) { add(e_, m); }

  void add_at(int64_t first, int64_t m) {
    if (e_.keep)
      add_counts_(e_.keep, m, m, counts_ + first);
    else
      whole_ += first == 0;
    self().fold_lanes(e_, first, m, m);
  }

  void finish(int64_t n, const Totals& out) {
    empty();
    const Totals lanes = self().lane_states();
    for (int64_t p = n; p < period_; p += n) fold_.merge(lanes, lanes.from(p), n);
    std::copy_n(lanes.value, n, out.value);
    if (lanes.weight && out.weight) std::copy_n(lanes.weight, n, out.weight);
    if (lanes.spread && out.spread) std::copy_n(lanes.spread, n, out.spread);
    if (lanes.count && out.count) std::copy_n(lanes.count, n, out.count);
  }

 protected:
  const Fold& fold_;
  const bool weighted_, masked_, scaled_, valued_;  // valued: counting reads no input
  int64_t count_, period_;  // kept elements of the row; lanes
  int64_t count_lanes_[Fold::kColumns];

 private:
  Derived& self() { return static_cast<Derived&>(*this); }

  void add_row(const Elements<C>& e, int64_t m) {
    int64_t kept = m;
    if (e.keep) count_kept_(e.keep, 1, m, &kept);
    count_ += kept;
    if (kept) self().fold_row(e, m, kept);
  }

  void add(const Elements<C>& e, int64_t m) {
    if (e.keep)
      add_counts_(e.keep, m, period_, counts_);
    else
      whole_ += m / period_, rest_ = m % period_;
    self().fold_lanes(e, 0, m, period_);
  }

  // What the lanes hold goes to their states.
  void empty() {
    alignas(64) double count[Fold::kColumns];  // kept elements in each lane since it was last emptied
    for (int64_t p = 0; p < period_; ++p) {
      const int64_t n = masked_ || weighted_ ? counts_[p] : whole_ + (p < rest_);
      count_lanes_[p] += n;
      count[p] = static_cast<double>(n);
    }
    self().empty_lanes(count);
    std::fill_n(counts_, period_, uint8_t{0});
    filled_ = whole_ = rest_ = 0;
  }

  // (g, reduced, inner) -> (reduced, g, inner)
  Elements<C> transposed(int64_t g, int64_t reduced, int64_t inner) {
    if (e_.x) transpose(e_.x, g, reduced, inner, turned_);
    if (e_.keep) transpose(e_.keep, g, reduced, inner, turned_keep_);
    if (e_.w) transpose(e_.w, g, reduced, inner, turned_weights_);
    return {turned_, e_.keep ? turned_keep_ : nullptr, e_.w ? turned_weights_ : nullptr};
  }

  template <class T>
  static void transpose(const T* from, int64_t g, int64_t reduced, int64_t inner, T* to) {
    if (inner == 1) {
      int64_t i = 0;
      for (; i + 4 <= g; i += 4) {  // four rows at a time: their elements are stored as one
        const T *f0 = from + i * reduced, *f1 = f0 + reduced, *f2 = f1 + reduced, *f3 = f2 + reduced;
        T* t = to + i;
        for (int64_t r = 0; r < reduced; ++r, t += g) {
          const T x0 = f0[r], x1 = f1[r], x2 = f2[r], x3 = f3[r];
          t[0] = x0, t[1] = x1, t[2] = x2, t[3] = x3;
        }
      }
      for (; i < g; ++i)
        for (int64_t r = 0; r < reduced; ++r) to[r * g + i] = from[i * reduced + r];
      return;
    }
    for (int64_t r = 0; r < reduced; ++r)
      for (int64_t i = 0; i < g; ++i, to += inner) std::copy_n(from + (i * reduced + r) * inner, inner, to);
  }

  Elements<C> e_;
  int64_t filled_, whole_, rest_;
  decltype(pick<&normalise_loop>()) normalise_ = pick<&normalise_loop>();
  decltype(pick<&weigh_loop<C, true>>()) weigh_;
  decltype(pick<&product_loop<C>>()) product_ = pick<&product_loop<C>>();
  decltype(pick<&add_loop<uint8_t>>()) add_counts_ = pick<&add_loop<uint8_t>>();
  decltype(pick<&rows_loop<uint8_t, int64_t>>()) count_kept_ = pick<&rows_loop<uint8_t, int64_t>>();
  alignas(64) uint8_t counts_[Fold::kColumns];
  alignas(64) uint8_t keep_[kBuffer];
  alignas(64) C weights_[kBuffer];
  alignas(64) C scaled_buffer_[kBuffer];
  alignas(64) C turned_[kBuffer];
  alignas(64) C turned_weights_[kBuffer];
  alignas(64) uint8_t turned_keep_[kBuffer];
};

}  // namespace safeops::cpu
