// Variance, standard deviation and silog_loss's square root, from three numbers of the kept elements: the sum of their
// weights, their mean, and the sum m2 of their squared deviations. One read gives all three, by Welford's method for
// whole chunks (welford_loops.h).
// I/O: forward reads x, mask, weight once.
#include "cpu/reductions/statistic.h"
#include "cpu/reductions/welford_loops.h"

namespace safeops::cpu {

namespace {

// ---- The accumulator. value: mean; weight: sum of weights, or count; second: m2 = sum w (x - mean)^2

template <class C>
struct Moments {
  static constexpr int64_t kColumns = 1024, kBlock = cpu::kBlock;
  static constexpr bool has_weight = true, has_second = true, has_count = true;
  bool weighted, scaled;
  bool half;  // the input is fp16: float squares it without loss of range

  void merge(const States& into, const States& from, int64_t n) const {
    static const double zero[kChunk] = {};
    pick<&merge_moments_loop>()(into, from.weight, from.value, zero, from.second, n);
    for (int64_t i = 0; i < n; ++i) into.count[i] += from.count[i];
  }

  class Worker : public StatisticWorker<C, Moments> {
    using Base = StatisticWorker<C, Moments>;
    friend Base;

   public:
    Worker(const Moments& accumulator, const Inputs<C>& inputs) : Base(accumulator, inputs) {
      this->pick_kind([this](auto keep, auto weight) {
        constexpr bool kKeep = keep, kWeight = weight;
        plain_ = pick_width<&sum_row<C, 64, kKeep, kWeight>, &sum_row<C, 32, kKeep, kWeight>,
                            &sum_row<C, 16, kKeep, kWeight>>();
        deviations_ = pick_width<&deviations_row<C, 64, kKeep, kWeight>, &deviations_row<C, 32, kKeep, kWeight>,
                                 &deviations_row<C, 16, kKeep, kWeight>>();
        careful_ = pick<&careful_row<C, kKeep, kWeight>>();
        seed_ = pick<&seed_columns<C, kKeep>>();
        columns_ = pick<&moment_columns<C, kKeep>>();
        join_ = pick<&join_columns<C, kWeight>>();
        rare_ = pick_width<&any_out_of_range<64, kKeep>, &any_out_of_range<32, kKeep>,
                           &any_out_of_range<16, kKeep>>();
      });
    }

   private:

    // -- a row

    void reset_row() { row_weight_ = row_mean_ = row_m2_ = 0; }

    void accumulate_row(const Elements<C>& e, int64_t n, int64_t kept) {
      double weight = static_cast<double>(kept), sums[2];
      if (e.w) weight = weigh_(e.w, n);
      C pivot = static_cast<C>(row_mean_);
      const bool new_pivot = row_weight_ == 0 || e.w;
      if (new_pivot) pivot = static_cast<C>(plain_(e, n) / weight);
      deviations_(e, n, pivot, sums);
      // If the deviations are this small, they may be mere rounding errors of the mean. Equal elements must deviate by
      // exactly 0, so the first kept element becomes the pivot.
      const double noise = static_cast<double>(pivot) * (8 * std::numeric_limits<C>::epsilon());
      if (new_pivot && !(sums[1] > noise * noise * weight)) {
        pivot = first_kept(e);
        deviations_(e, n, pivot, sums);
      }
      double from = static_cast<double>(pivot);
      if constexpr (sizeof(C) == 4) {
        if (!(sums[1] > 0x1p-100 && sums[1] < 0x1p+120)) {  // too small or too large for float, or NaN
          from = static_cast<double>(new_pivot ? first_kept(e) : row_mean_);
          careful_(e, n, from, sums);
        }
      }
      merge_moments(row_weight_, row_mean_, row_m2_, weight, from, sums[0], sums[1]);
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
      const int64_t n = this->width_;
      seeded_ = any_joined_ = false;
      std::fill_n(pivot_, n, std::numeric_limits<C>::quiet_NaN());
      for (auto* all : {s1_, s2_}) std::fill_n(all, n, C(0));
    }

    // Elements with weights, and elements that float cannot square, are merged into their columns one by one, in
    // double.
    void accumulate_columns(const Elements<C>& e, int64_t first, int64_t n, int64_t period) {
      if (this->weighted_) return join(e, first, n, period);
      if constexpr (sizeof(C) == 4) {
        if (!this->accumulator_.half && rare_(e, n, kSquares)) {
          for (int64_t i = 0; i < n; ++i) {
            const bool keep = !e.keep || e.keep[i];
            joins_[i] = keep && !kSquares.holds(e.x[i]);
            others_[i] = keep && !joins_[i];
          }
          join({e.x, joins_, nullptr}, first, n, period);
          return accumulate_in_float({e.x, others_, nullptr}, first, n, period, seed_others_, others_columns_);
        }
      }
      accumulate_in_float(e, first, n, period, seed_, columns_);
    }

    void join(const Elements<C>& e, int64_t first, int64_t n, int64_t period) {
      if (!any_joined_)
        for (auto* all : {mean_, weight_, m2_, joined_}) std::fill_n(all, this->width_, 0.0);
      any_joined_ = true;
      join_(e, n, period, weight_ + first, mean_ + first, m2_ + first, joined_ + first);
    }

    template <class Seed, class Columns>
    void accumulate_in_float(const Elements<C>& e, int64_t first, int64_t n, int64_t period, Seed seed,
                             Columns columns) {
      const int64_t width = std::min(n, period);
      if (!seeded_ && any_nan_(pivot_ + first, width)) seed(e, e.keep ? n : width, period, pivot_ + first);
      seeded_ = seeded_ || (width == this->width_ && !any_nan_(pivot_, width));
      columns(e, n, period, {pivot_ + first, s1_ + first, s2_ + first});
    }

    States column_states() {
      const int64_t n = this->width_;
      if (this->weighted_) return {mean_, weight_, m2_, this->column_counts_};
      if (!any_joined_) {
        moments_(this->column_counts_, pivot_, s1_, s2_, n, {mean_, weight_, m2_, nullptr});
        return {mean_, weight_, m2_, this->column_counts_};
      }
      alignas(64) double count[kColumns + kPad], p[kColumns + kPad], s1[kColumns + kPad], s2[kColumns + kPad];
      for (int64_t i = 0; i < n; ++i) count[i] = static_cast<double>(this->column_counts_[i]) - joined_[i];
      widen_(pivot_, n, p);
      widen_(s1_, n, s1);
      widen_(s2_, n, s2);
      merge_({mean_, weight_, m2_, nullptr}, count, p, s1, s2, n);
      return {mean_, weight_, m2_, this->column_counts_};
    }

    double row_weight_, row_mean_, row_m2_;
    bool seeded_, any_joined_;  // seeded: each column has its pivot; any joined: elements have joined one by one
    decltype(&sum_row<C, 16, true, true>) plain_;
    decltype(&deviations_row<C, 16, true, true>) deviations_;
    decltype(&careful_row<C, true, true>) careful_;
    decltype(&seed_columns<C, true>) seed_;
    decltype(&moment_columns<C, true>) columns_;
    decltype(&join_columns<C, true>) join_;
    decltype(&any_out_of_range<16, true>) rare_;
    decltype(pick<&seed_columns<C, true>>()) seed_others_ = pick<&seed_columns<C, true>>();
    decltype(pick<&moment_columns<C, true>>()) others_columns_ = pick<&moment_columns<C, true>>();
    decltype(pick<&any_nan_loop<C>>()) any_nan_ = pick<&any_nan_loop<C>>();
    decltype(pick<&widen_loop<C, double>>()) widen_ = pick<&widen_loop<C, double>>();
    decltype(pick<&weight_row<C>>()) weigh_ = pick<&weight_row<C>>();
    decltype(pick<&moments_loop<C>>()) moments_ = pick<&moments_loop<C>>();
    decltype(pick<&merge_moments_loop>()) merge_ = pick<&merge_moments_loop>();
    alignas(64) C pivot_[kColumns + kPad];
    alignas(64) C s1_[kColumns + kPad];
    alignas(64) C s2_[kColumns + kPad];
    alignas(64) double mean_[kColumns + kPad];
    alignas(64) double weight_[kColumns + kPad];
    alignas(64) double m2_[kColumns + kPad];
    alignas(64) double joined_[kColumns + kPad];  // number of elements that joined one by one
    alignas(64) uint8_t joins_[kBuffer];
    alignas(64) uint8_t others_[kBuffer];
  };
};

// var = sum w (x - mean)^2 / (sum w - correction);  d var/dx = 2 w (x - mean) / (sum w - correction)
// root = sqrt(var + (1 - focus) mean^2);            d root/dx = w (x - focus mean) / (root sum w), with no correction
void finish_moments(const void* op, int64_t, const States& states, int64_t n, const double* unscale,
                    double* const* results) {
  const StatisticFinish f = *static_cast<const StatisticFinish*>(op);
  for (int64_t i = 0; i < n; ++i) {
    const double divisor = states.weight[i] - f.correction, m2 = states.second[i] < 0 ? 0.0 : states.second[i];
    // If the sum of weights is at most the correction, the result is that of nothing kept, unless m2 is NaN because an
    // element is NaN or inf.
    const bool none = states.count[i] == 0 || (divisor <= 0 && m2 == m2);
    if (f.lost && !none && may_be_lost(m2)) *f.lost = true;
    // A kept inf makes m2 NaN, and m2 makes `scale` NaN: all elements then have gradient NaN.
    const double by = unscale ? unscale[i] : 1;
    double value = m2 / divisor, mean = states.value[i], scale = m2 != m2 ? m2 : 2 / divisor;
    if (f.root) {
      value = std::sqrt(value + (1 - f.focus) * mean * mean);
      mean *= f.focus;
      scale = inverse_of(value * divisor, by);
    } else if (unscale) {
      value /= by;
    }
    if (unscale) value /= by, mean /= by;
    results[0][i] = none ? f.empty_value : value;
    results[1][i] = mean;
    results[2][i] = none ? 0.0 : scale;
  }
}

}  // namespace

Statistics moments(const Statistic& s, bool root, double correction, bool empty_nan, double focus) {
  StatisticFinish finish;
  finish.focus = focus;
  finish.empty_value = empty_value(empty_nan);
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

// `parameter` is the correction of the variance; for silog_loss it is the focus.
SAFEOPS_STATISTIC(masked_var, return moments(s, false, parameter, empty_nan);)
SAFEOPS_STATISTIC(masked_std, return moments(s, true, parameter, empty_nan);)
SAFEOPS_STATISTIC(silog_loss, return moments(s, true, 0, empty_nan, parameter);)

}  // namespace safeops::cpu
