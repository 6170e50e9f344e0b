// Variance and standard deviation: (sum of weights, mean, sum of squared deviations m2) of the kept elements in one
// read, by Welford's method for whole chunks.  I/O: forward reads x, mask, weight once.
//
// Deviations are taken from a pivot near the mean, so that nothing cancels: the mean so far; at first, the mean of the
// row's first chunk, or the column's first element. A pivot off the mean costs digits only in proportion to its
// distance in standard deviations, which is small. Not so with weights, where a distant pivot may have almost no
// weight: rows with weights take each chunk's own mean, and columns with weights their elements one by one.
#include "cpu/reductions/statistic_worker.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

// ---- inner loops

// sums = (sum w d, sum w d^2), d = x - pivot
template <class C, int kBytes, bool kKeep, bool kWeight>
void deviations_row(const Elements<C>& e, int64_t n, C pivot, double* sums) {
  using V = typename Register<C, kBytes>::V;
  constexpr int64_t most = 64 * Register<C, kBytes>::kLanes;
  double first = 0, second = 0;
  for (int64_t i = 0; i < n; i += most) {
    V s1[4] = {}, s2[4] = {};
    for_vectors<C, kBytes, kKeep, kWeight>(e.from(i), n - i < most ? n - i : most,
                                         [&](int k, const V& x, const auto& keep, const V& w)
                                             __attribute__((always_inline)) {
                                               V d = x - pivot;
                                               Register<C, kBytes>::select_or_zero(d, keep);
                                               const V wd = kWeight ? V(w * d) : d;
                                               s1[k] += wd;
                                               s2[k] += wd * d;
                                             });
    sum_vectors(s1, first);
    sum_vectors(s2, second);
  }
  sums[0] = first;
  sums[1] = second;
}

// A weight, NaN where it is negative: the parts of a sum of such weights have no mean to take deviations from.
inline double frequency(double w) { return select(w < 0, std::numeric_limits<double>::quiet_NaN(), w); }

// The sum of weights, in double: a correction that is subtracted from it may leave little.
template <class C>
double weight_row(const C* w, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += frequency(static_cast<double>(w[i]));
  return sum;
}

// deviations_row in double, for what float cannot square.
template <class C, bool kKeep, bool kWeight>
void careful_row(const Elements<C>& e, int64_t n, double pivot, double* sums) {
  double first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
  for (int64_t i = 0; i < n; ++i) {
    double d = static_cast<double>(e.x[i]) - pivot;
    if constexpr (kKeep) d = select_or_zero(e.keep[i] != 0, d);
    double wd = d;
    if constexpr (kWeight) wd *= static_cast<double>(e.w[i]);
    first += wd;
    second += wd * d;
  }
  sums[0] = first;
  sums[1] = second;
}

// A column's pivot is NaN until it has seen a kept element.
template <class C>
struct MomentColumns {
  C *pivot, *s1, *s2;
};

template <class C, bool kKeep>
void seed_columns(const Elements<C>& e, int64_t n, int64_t period, C* pivot) {
  for (int64_t at = 0; at < n; at += period) {
    const int64_t m = n - at < period ? n - at : period;
    const C* x = e.x + at;
    const uint8_t* keep = e.keep + at;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) {
      const C old = pivot[p];
      C found = x[p];
      if constexpr (kKeep) found = select(keep[p] != 0, found, old);
      pivot[p] = select(old == old, old, found);
    }
  }
}

template <class C, bool kKeep>
void moment_columns(const Elements<C>& e, int64_t n, int64_t period, const MomentColumns<C>& columns) {
  const C* pivot = columns.pivot;
  C *s1 = columns.s1, *s2 = columns.s2;
  for (int64_t at = 0; at < n; at += period) {
    const int64_t m = n - at < period ? n - at : period;
    const C* x = e.x + at;
    const uint8_t* keep = e.keep + at;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) {
      C d = x[p] - pivot[p];
      if constexpr (kKeep) d = select_or_zero(keep[p] != 0, d);
      s1[p] += d;
      s2[p] += d * d;
    }
  }
}

// Elements join their columns one by one, in double: West's weighted form of Welford's update, in which nothing
// cancels, whatever the weights.
template <class C, bool kKeep, bool kWeight>
void join_columns(const Elements<C>& e, int64_t n, int64_t period, double* weight, double* mean, double* m2,
                double* joined) {
  for (int64_t at = 0; at < n; at += period) {
    const int64_t m = n - at < period ? n - at : period;
    const C *x = e.x + at, *w = e.w + at;
    const uint8_t* keep = e.keep + at;
    SAFEOPS_SIMD
    for (int64_t p = 0; p < m; ++p) {
      double more = 1;
      if constexpr (kWeight) more = frequency(static_cast<double>(w[p]));
      if constexpr (kKeep) more = select_or_zero(keep[p] != 0, more);
      const double old = weight[p], all = old + more;
      const double shift = select_or_zero(more != 0, static_cast<double>(x[p]) - mean[p]);
      const double step = shift * select(all != 0, more / select(all != 0, all, 1.0), 0.0);
      weight[p] = all;
      mean[p] += step;
      m2[p] += old * shift * step + (shift - shift);  // an infinite element makes it NaN
      if constexpr (kKeep && !kWeight) joined[p] += more;
      if constexpr (!kKeep) joined[p] += 1;
    }
  }
}

// More elements, of weight n, with sum s1 and sum of squares s2 of their deviations from p, join the state (w, mean,
// m2): Chan's formula, around both means, so that only what is near them cancels.
inline void join(double& w, double& mean, double& m2, double n, double p, double s1, double s2) {
  const bool any = n != 0;
  const double all = w + n, share = select_or_zero(all != 0, n / select(all != 0, all, 1.0));
  const double off = select_or_zero(any, s1 / select(any, n, 1.0)), own = p + off;
  const double base = select((w == 0) & any, own, mean), shift = select_or_zero(any, own - base);
  const double step = shift * share;
  m2 += (s2 - s1 * off) + w * shift * step;
  mean = base + step;
  w = all;
}

void join_loop(const States& into, const double* n, const double* p, const double* s1, const double* s2,
                      int64_t count) {
  double *w = into.weight, *mean = into.value, *m2 = into.second;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < count; ++i) join(w[i], mean[i], m2[i], n[i], p[i], s1[i], s2[i]);
}

// ---- the accumulator. value: mean; weight: sum of weights, or count; second: m2 = sum w (x - mean)^2

template <class C>
struct Moments {
  static constexpr int64_t kColumns = 1024;
  static constexpr bool has_weight = true, has_second = true, has_count = true;
  bool weighted, scaled;
  bool half;  // the input is fp16: float squares it without loss of range

  void merge(const States& into, const States& from, int64_t n) const {
    static const double zero[kChunk] = {};
    pick<&join_loop>()(into, from.weight, from.value, zero, from.second, n);
    for (int64_t i = 0; i < n; ++i) into.count[i] += from.count[i];
  }

  class Worker : public StatisticWorker<C, Moments, Worker> {
    using Base = StatisticWorker<C, Moments, Worker>;
    friend Base;

   public:
    static constexpr int64_t kBlock = 32;

    Worker(const Moments& accumulator, const Inputs<C>& inputs) : Base(accumulator, inputs) {
      pick_loops(accumulator.weighted ? 2 : inputs.masked);
    }

   private:
    void pick_loops(int kind) {
      rare_pivot_ = pick_width<&any_extraordinary<64, false>, &any_extraordinary<32, false>,
                               &any_extraordinary<16, false>>();
      const auto set = [&](auto keep, auto weight) {
        constexpr bool kKeep = decltype(keep)::value, kWeight = decltype(weight)::value;
        plain_ = pick_width<&sum_row<C, 64, kKeep, kWeight>, &sum_row<C, 32, kKeep, kWeight>,
                            &sum_row<C, 16, kKeep, kWeight>>();
        deviations_ = pick_width<&deviations_row<C, 64, kKeep, kWeight>, &deviations_row<C, 32, kKeep, kWeight>,
                                 &deviations_row<C, 16, kKeep, kWeight>>();
        careful_ = pick<&careful_row<C, kKeep, kWeight>>();
        seed_ = pick<&seed_columns<C, kKeep>>();
        columns_ = pick<&moment_columns<C, kKeep>>();
        join_each_ = pick<&join_columns<C, kKeep, kWeight>>();
        rare_ = pick_width<&any_extraordinary<64, kKeep>, &any_extraordinary<32, kKeep>,
                           &any_extraordinary<16, kKeep>>();
      };
      if (kind == 0) set(std::false_type{}, std::false_type{});
      if (kind == 1) set(std::true_type{}, std::false_type{});
      if (kind == 2) set(std::true_type{}, std::true_type{});
    }

    // -- a row

    void reset_row() { row_weight_ = row_mean_ = row_m2_ = 0; }

    void accumulate_row(const Elements<C>& e, int64_t n, int64_t kept) {
      double weight = static_cast<double>(kept), sums[2];
      if (e.w) weight = weigh_(e.w, n);
      C pivot = static_cast<C>(row_mean_);
      const bool own = row_weight_ == 0 || e.w;
      if (own) pivot = static_cast<C>(plain_(e, n) / weight);
      deviations_(e, n, pivot, sums);
      // Deviations as small as the rounding of the mean itself: elements that are all equal must deviate by exactly 0,
      // so one of them becomes the pivot.
      const double noise = static_cast<double>(pivot) * (8 * std::numeric_limits<C>::epsilon());
      if (own && !(sums[1] > noise * noise * weight)) {
        pivot = first_kept(e);
        deviations_(e, n, pivot, sums);
      }
      double from = static_cast<double>(pivot);
      if constexpr (sizeof(C) == 4) {
        if (!(sums[1] > 0x1p-100 && sums[1] < 0x1p+120)) {  // too small or too large for float, or NaN
          from = static_cast<double>(own ? first_kept(e) : row_mean_);
          careful_(e, n, from, sums);
        }
      }
      join(row_weight_, row_mean_, row_m2_, weight, from, sums[0], sums[1]);
    }

    static C first_kept(const Elements<C>& e) {
      int64_t i = 0;
      while (e.keep && !e.keep[i]) ++i;
      return e.x[i];
    }

    void row_state(const States& out) const {
      *out.value = row_mean_;
      *out.weight = row_weight_;
      *out.second = row_m2_;
    }

    // -- columns

    void reset_columns() {
      for (auto* all : {mean_, weight_, m2_}) std::fill_n(all, this->period_, 0.0);
      any_joined_ = false;
      clear_columns();
    }

    void clear_columns() {
      seeded_ = true;
      each_ = this->weighted_;
      for (int64_t p = 0; p < this->period_; ++p) {
        const bool known = weight_[p] != 0;
        pivot_[p] = known ? static_cast<C>(mean_[p]) : std::numeric_limits<C>::quiet_NaN();
        seeded_ = seeded_ && known;
      }
      // Where float cannot square the mean, it cannot square the deviations from it either.
      if constexpr (sizeof(C) == 4) each_ = each_ || (any_joined_ && rare_pivot_({pivot_}, this->period_, kSquares));
      for (auto* all : {s1_, s2_}) std::fill_n(all, this->period_, C(0));
    }

    void accumulate_columns(const Elements<C>& e, int64_t first, int64_t n, int64_t period) {
      bool each = each_;
      if constexpr (sizeof(C) == 4) each = each || (!this->accumulator_.half && rare_(e, n, kSquares));
      if (each) {
        any_joined_ = true;
        join_each_(e, n, period, weight_ + first, mean_ + first, m2_ + first, joined_ + first);
        return;
      }
      if (!seeded_) seed_(e, e.keep ? n : std::min(n, period), period, pivot_ + first);  // all kept: one row is enough
      columns_(e, n, period, {pivot_ + first, s1_ + first, s2_ + first});
    }

    // `count` is of all elements; those that joined one by one are in their columns' states already.
    void flush_columns(double* count) {
      const int64_t n = this->period_;
      if (!this->weighted_) {
        alignas(64) double p[kColumns], s1[kColumns], s2[kColumns];
        for (int64_t i = 0; i < n; ++i) {
          count[i] -= joined_[i];
          p[i] = static_cast<double>(pivot_[i]);
          s1[i] = static_cast<double>(s1_[i]);
          s2[i] = static_cast<double>(s2_[i]);
        }
        join_({mean_, weight_, m2_, nullptr}, count, p, s1, s2, n);
      }
      clear_columns();
      if (any_joined_) std::fill_n(joined_, n, 0.0);
    }

    States column_states() { return {mean_, weight_, m2_, this->column_counts_}; }

    double row_weight_, row_mean_, row_m2_;
    bool seeded_, each_, any_joined_ = false;  // each_: elements join one by one
    decltype(&sum_row<C, 16, true, true>) plain_;
    decltype(&deviations_row<C, 16, true, true>) deviations_;
    decltype(&careful_row<C, true, true>) careful_;
    decltype(&seed_columns<C, true>) seed_;
    decltype(&moment_columns<C, true>) columns_;
    decltype(&join_columns<C, true, true>) join_each_;
    decltype(&any_extraordinary<16, true>) rare_, rare_pivot_;
    decltype(pick<&weight_row<C>>()) weigh_ = pick<&weight_row<C>>();
    decltype(pick<&join_loop>()) join_ = pick<&join_loop>();
    alignas(64) C pivot_[kColumns];
    alignas(64) C s1_[kColumns];
    alignas(64) C s2_[kColumns];
    alignas(64) double mean_[kColumns];
    alignas(64) double weight_[kColumns];
    alignas(64) double m2_[kColumns];
    alignas(64) double joined_[kColumns] = {};  // elements
  };
};

// var = sum w (x - mean)^2 / (sum w - correction);  d var/dx = 2 w (x - mean) / (sum w - correction)
void finish_moments(const void* op, int64_t, const States& states, int64_t n, const double* unscale,
                    double* const* results) {
  const StatisticFinish f = *static_cast<const StatisticFinish*>(op);
  for (int64_t i = 0; i < n; ++i) {
    const double divisor = states.weight[i] - f.correction, m2 = states.second[i] < 0 ? 0.0 : states.second[i];
    // Less weight than the correction counts as nothing kept, but a NaN or inf among the elements shows.
    const bool none = states.count[i] == 0 || (divisor <= 0 && m2 == m2);
    if (f.lost && !none && may_be_lost(m2)) *f.lost = true;
    // A kept infinity makes m2 NaN, and so the gradient of all.
    const double by = unscale ? unscale[i] : 1;
    double value = m2 / divisor, mean = states.value[i], scale = m2 != m2 ? m2 : 2 / divisor;
    if (f.root) {
      value = std::sqrt(value);
      scale = inverse_of(value * divisor, by);
    } else if (unscale) {
      value /= by;
    }
    if (unscale) value /= by, mean /= by;
    results[0][i] = none ? f.nothing : value;
    results[1][i] = mean;
    results[2][i] = none ? 0.0 : scale;
  }
}

}  // namespace

Statistics moments(const Statistic& s, bool root, double correction, bool empty_nan) {
  StatisticFinish finish;
  finish.nothing = nothing_kept(empty_nan);
  finish.correction = correction;
  finish.root = root;
  const Statistics to = s.results();
  const bool weighted = s.weight.has_value();
  if (s.in_double())
    run_squares(s, Moments<double>{weighted, false, false}, &finish_moments, finish, to);
  else
    s.run<float>(Moments<float>{weighted, false, s.x.dtype == DType::kHalf}, &finish_moments, &finish, to);
  return to;
}

// `parameter` is the correction.
SAFEOPS_STATISTIC(masked_var, return moments(s, false, parameter, empty_nan);)
SAFEOPS_STATISTIC(masked_std, return moments(s, true, parameter, empty_nan);)

}  // namespace safeops::cpu
