// The accumulator of extremes: the largest or smallest kept element, and the number of kept elements equal to it.
// Elements are compared by ranked(x), whose maximum is the result for every Extremum.
#pragma once

#include "cpu/reductions/statistic.h"
#include "cpu/reductions/statistic_worker.h"

namespace safeops::cpu {

constexpr bool of_magnitudes(Extremum e) { return e == Extremum::kMaxAbs || e == Extremum::kMinAbs; }
constexpr bool negated(Extremum e) { return e == Extremum::kMin || e == Extremum::kMinAbs; }

// ---- inner loops

template <class C, Extremum kWhich>
inline C ranked(C x) {
  if constexpr (of_magnitudes(kWhich)) x = std::fabs(x);
  if constexpr (negated(kWhich)) x = -x;
  return x;
}

template <class R, Extremum kWhich, class V>
inline void rank(V& x) {
  if constexpr (of_magnitudes(kWhich)) R::abs(x);
  if constexpr (negated(kWhich)) x = -x;
}

// Sets `best` to the maximum of ranked(x) over the kept elements, or -inf if none is kept. Returns true if a kept x is
// NaN.
template <class C, int kBytes, bool kKeep, Extremum kWhich>
bool best_row(const Elements<C>& e, int64_t n, C* best) {
  using R = Register<C, kBytes>;
  using V = typename R::V;
  using I = typename R::I;
  const V lowest = V{} - std::numeric_limits<C>::infinity();
  V maximum[4] = {lowest, lowest, lowest, lowest};
  I nan[4] = {};
  for_vectors<C, kBytes, kKeep, false>(e, n, [&](int k, const V& x, const I& keep, const V&)
                                               __attribute__((always_inline)) {
    V v = x;
    rank<R, kWhich>(v);
    R::select(v, keep, lowest);
    maximum[k] = v > maximum[k] ? v : maximum[k];
    nan[k] |= reinterpret_cast<I>(v != v);
  });
  maximum[0] = maximum[0] > maximum[1] ? maximum[0] : maximum[1];
  maximum[2] = maximum[2] > maximum[3] ? maximum[2] : maximum[3];
  maximum[0] = maximum[0] > maximum[2] ? maximum[0] : maximum[2];
  nan[0] |= nan[1] | nan[2] | nan[3];
  C largest = maximum[0][0];
  bool any = false;
  for (int i = 0; i < R::kLanes; ++i) {
    largest = maximum[0][i] > largest ? C(maximum[0][i]) : largest;
    any |= nan[0][i] != 0;
  }
  *best = largest;
  return any;
}

// Counts the kept elements x with ranked(x) == best; if `best` is NaN, counts the kept NaNs.
template <class C, int kBytes, bool kKeep, Extremum kWhich>
int64_t ties_row(const Elements<C>& e, int64_t n, C best) {
  using R = Register<C, kBytes>;
  using V = typename R::V;
  using I = typename R::I;
  const I match_nan = I{} - (best != best);
  I matches[4] = {};
  for_vectors<C, kBytes, kKeep, false>(e, n, [&](int k, const V& x, const I& keep, const V&)
                                               __attribute__((always_inline)) {
    V v = x;
    rank<R, kWhich>(v);
    matches[k] -= (reinterpret_cast<I>(v == best) | (reinterpret_cast<I>(v != v) & match_nan)) & keep;
  });
  int64_t ties = 0;
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < R::kLanes; ++i) ties += matches[k][i];
  return ties;
}

template <class C>
struct ExtremeColumns {
  C* best;
  BitsOf<C>*ties, *nans;
};

template <class C, bool kKeep, Extremum kWhich>
void extreme_columns(const Elements<C>& e, int64_t n, int64_t period, const ExtremeColumns<C>& columns) {
  using Bits = BitsOf<C>;
  C* best = columns.best;
  Bits *ties = columns.ties, *nans = columns.nans;
  for_columns(e, n, period, [&](const Elements<C>& row, int64_t p) __attribute__((always_inline)) {
    const C old = best[p];
    C v = ranked<C, kWhich>(row.x[p]);
    Bits kept = ~Bits(0);
    if constexpr (kKeep) {
      kept = Bits(0) - static_cast<Bits>(row.keep[p] != 0);
      v = select(row.keep[p] != 0, v, -std::numeric_limits<C>::infinity());
    }
    const Bits more = Bits(0) - static_cast<Bits>(v > old), same = Bits(0) - static_cast<Bits>(v == old);
    const Bits nan = Bits(0) - static_cast<Bits>(v != v);
    ties[p] = (ties[p] & ~more) - ((more | same) & kept);
    nans[p] -= nan;
    best[p] = v > old ? v : old;
  });
}

// ---- The accumulator. value: the maximum of ranked(x); count: the number of elements that reach it, 0 if none is kept

template <class C>
struct Extreme {
  static constexpr int64_t kColumns = 1024, kBlock = 255;
  static constexpr bool has_weight = false, has_second = false, has_count = true;
  bool weighted, scaled;
  Extremum which;

  static void join(double& best, int64_t& ties, double other, int64_t more) {
    if (more == 0) return;
    const bool first = ties == 0 || (best == best && (other > best || other != other));
    const bool same = other == best || (other != other && best != best);
    ties = first ? more : ties + (same ? more : 0);
    best = first ? other : best;
  }

  void merge(const States& into, const States& from, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) join(into.value[i], into.count[i], from.value[i], from.count[i]);
  }

  class Worker : public StatisticWorker<C, Extreme> {
    using Base = StatisticWorker<C, Extreme>;
    friend Base;

   public:
    Worker(const Extreme& accumulator, const Inputs<C>& inputs) : Base(accumulator, inputs) {
      this->pick_kind([&](auto keep, auto) {
        switch (accumulator.which) {
          case Extremum::kMax: return pick_loops<Extremum::kMax, keep>();
          case Extremum::kMin: return pick_loops<Extremum::kMin, keep>();
          case Extremum::kMaxAbs: return pick_loops<Extremum::kMaxAbs, keep>();
          case Extremum::kMinAbs: return pick_loops<Extremum::kMinAbs, keep>();
        }
      });
    }

   private:
    template <Extremum kWhich, bool kKeep>
    void pick_loops() {
      best_row_ = pick_width<&best_row<C, 64, kKeep, kWhich>, &best_row<C, 32, kKeep, kWhich>,
                             &best_row<C, 16, kKeep, kWhich>>();
      ties_row_ = pick_width<&ties_row<C, 64, kKeep, kWhich>, &ties_row<C, 32, kKeep, kWhich>,
                             &ties_row<C, 16, kKeep, kWhich>>();
      columns_ = pick<&extreme_columns<C, kKeep, kWhich>>();
    }

    void reset_row() {
      row_best_ = -std::numeric_limits<double>::infinity();
      row_ties_ = 0;
    }

    void accumulate_row(const Elements<C>& e, int64_t n, int64_t) {
      C best;
      if (best_row_(e, n, &best)) best = std::numeric_limits<C>::quiet_NaN();
      if (best < row_best_) return;  // it has no ties; most chunks stay below the maximum
      join(row_best_, row_ties_, static_cast<double>(best), ties_row_(e, n, best));
    }

    void row_state(const States& out) const {
      *out.value = row_best_;
      *out.count = row_ties_;
    }

    void reset_columns() {
      std::fill_n(best_, this->width_, -std::numeric_limits<C>::infinity());
      std::fill_n(ties_, this->width_, 0);
      std::fill_n(nans_, this->width_, 0);
    }

    void accumulate_columns(const Elements<C>& e, int64_t first, int64_t n, int64_t period) {
      columns_(e, n, period, {best_ + first, ties_ + first, nans_ + first});
    }

    States column_states() {
      for (int64_t p = 0; p < this->width_; ++p) {
        value_[p] = nans_[p] ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(best_[p]);
        this->column_counts_[p] = static_cast<int64_t>(nans_[p] ? nans_[p] : ties_[p]);
      }
      return {value_, nullptr, nullptr, this->column_counts_};
    }

    double row_best_;
    int64_t row_ties_;
    decltype(&best_row<C, 16, true, Extremum::kMax>) best_row_;
    decltype(&ties_row<C, 16, true, Extremum::kMax>) ties_row_;
    decltype(&extreme_columns<C, true, Extremum::kMax>) columns_;
    alignas(64) C best_[kColumns + kPad];
    alignas(64) BitsOf<C> ties_[kColumns + kPad];
    alignas(64) BitsOf<C> nans_[kColumns + kPad];
    double value_[kColumns + kPad];
  };
};

}  // namespace safeops::cpu
