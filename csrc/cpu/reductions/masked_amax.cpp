// The largest or smallest kept element, and how many elements share that value: its gradient is divided among them.
// I/O: forward reads x, mask, weight once.
#include "cpu/reductions/statistic_worker.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

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

// Sets `best` to the largest kept element, -inf if there is none. Returns true if any is NaN.
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

// Counts the kept elements equal to `best`, or if `best` is NaN those that are NaN.
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

// ---- the accumulator. value: the maximum of ranked(x); count: how many elements have it, 0 where nothing is kept

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
      if (best < row_best_) return;  // few chunks hold a new maximum: only those are read a second time
      join(row_best_, row_ties_, static_cast<double>(best), ties_row_(e, n, best));
    }

    void row_state(const States& out) const {
      *out.value = row_best_;
      *out.count = row_ties_;
    }

    void reset_columns() {
      std::fill_n(best_, this->period_, -std::numeric_limits<C>::infinity());
      std::fill_n(ties_, this->period_, 0);
      std::fill_n(nans_, this->period_, 0);
    }

    void accumulate_columns(const Elements<C>& e, int64_t first, int64_t n, int64_t period) {
      columns_(e, n, period, {best_ + first, ties_ + first, nans_ + first});
    }

    void flush_columns(double*) {}  // nothing to flush: a maximum never outgrows its type

    States column_states() {
      for (int64_t p = 0; p < this->period_; ++p) {
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
    alignas(64) C best_[kColumns];
    alignas(64) BitsOf<C> ties_[kColumns];
    alignas(64) BitsOf<C> nans_[kColumns];
    double value_[kColumns];
  };
};

void finish_extreme(const void* op, int64_t, const States& states, int64_t n, const double*, double* const* results) {
  const StatisticFinish f = *static_cast<const StatisticFinish*>(op);
  for (int64_t i = 0; i < n; ++i) {
    const bool none = states.count[i] == 0;
    const double best = f.negate ? -states.value[i] : states.value[i];
    results[0][i] = none ? f.empty_value : best;
    results[1][i] = none ? 0.0 : best;
    results[2][i] = none ? 0.0 : 1.0 / static_cast<double>(states.count[i]);
    if (best > f.most && std::isfinite(best)) results[0][i] = f.most, results[2][i] = 0;
  }
}

void run_extreme(const Statistic& s, Extremum which, bool empty_nan, const Statistics& to) {
  StatisticFinish finish;
  finish.empty_value = empty_value(empty_nan);
  finish.negate = negated(which);
  finish.most = s.most;
  const bool weighted = s.weight.has_value();
  if (s.in_double())
    s.run<double>(Extreme<double>{weighted, false, which}, &finish_extreme, &finish, to);
  else
    s.run<float>(Extreme<float>{weighted, false, which}, &finish_extreme, &finish, to);
}

}  // namespace

Statistics extreme(const Statistic& s, Extremum which, bool empty_nan) {
  const Statistics to = s.results();
  run_extreme(s, which, empty_nan, to);
  return to;
}

std::optional<Tensor> scales_of(const Statistic& s) {
  Statistic wide = s;
  wide.type = DType::kDouble;
  const Tensor maxima = std::get<0>(extreme(wide, Extremum::kMaxAbs, false));
  double* scale = reinterpret_cast<double*>(View(maxima).data);
  bool any = false;
  for (int64_t i = 0, n = s.out.numel(); i < n; ++i) {
    const double maximum = scale[i];
    const bool out = std::isfinite(maximum) && maximum != 0 && (maximum > 0x1p+400 || maximum < 0x1p-400);
    scale[i] = out ? std::ldexp(1.0, std::clamp(-std::ilogb(maximum), -1000, 1000)) : 1.0;
    any = any || out;
  }
  if (!any) return std::nullopt;
  return maxima;
}

SAFEOPS_STATISTIC(masked_amax, return extreme(s, Extremum::kMax, empty_nan);)
SAFEOPS_STATISTIC(masked_amin, return extreme(s, Extremum::kMin, empty_nan);)

}  // namespace safeops::cpu
