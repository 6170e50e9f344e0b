// log sum w exp(x) = max + log sum w exp(x - max). max is the largest kept element so far, so that no exponential
// overflows.
// I/O: forward reads x, mask, weight once.
#include "cpu/engine/exp.h"
#include "cpu/reductions/statistic_worker.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

// ---- inner loops

// Returns the largest kept element, or the lowest finite number if none is kept. It ignores NaN: the sum of the
// exponentials will be NaN.
template <class C, int kBytes, bool kKeep>
C max_row(const Elements<C>& e, int64_t n) {
  using R = Register<C, kBytes>;
  using V = typename R::V;
  const V lowest = V{} + std::numeric_limits<C>::lowest();
  V maximum[4] = {lowest, lowest, lowest, lowest};
  for_vectors<C, kBytes, kKeep, false>(e, n, [&](int k, const V& x, const auto& keep, const V&)
                                               __attribute__((always_inline)) {
    V v = x;
    R::select(v, keep, lowest);
    maximum[k] = v > maximum[k] ? v : maximum[k];
  });
  maximum[0] = maximum[0] > maximum[1] ? maximum[0] : maximum[1];
  maximum[2] = maximum[2] > maximum[3] ? maximum[2] : maximum[3];
  maximum[0] = maximum[0] > maximum[2] ? maximum[0] : maximum[2];
  C largest = maximum[0][0];
  for (int i = 1; i < R::kLanes; ++i) largest = maximum[0][i] > largest ? C(maximum[0][i]) : largest;
  return largest;
}

template <class C, bool kKeep, bool kWeight>
void exponentials_loop(const Elements<C>& e, int64_t n, C maximum, C* out) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C x = e.x[i];
    C term = exp_(select(x == maximum, C(0), x - maximum));  // if both are inf, their difference would be NaN
    if constexpr (kWeight) term *= e.w[i];
    if constexpr (kKeep) term = select_or_zero(e.keep[i] != 0, term);
    out[i] = term;
  }
}

template <class C>
struct ExponentialColumns {
  C *maximum, *sum;
};

// Takes one exponential per element: factor = exp(-|x - maximum|), where `maximum` is the largest x of the column so
// far. If x is larger, it becomes the maximum, and the sum becomes factor times the old sum plus w. Otherwise w factor
// is added.
template <class C, bool kKeep, bool kWeight>
void exponential_columns(const Elements<C>& e, int64_t n, int64_t period, const ExponentialColumns<C>& columns) {
  C *maximum = columns.maximum, *sum = columns.sum;
  for_columns(e, n, period, [&](const Elements<C>& row, int64_t p) __attribute__((always_inline)) {
    const C old = maximum[p];
    C v = row.x[p];
    if constexpr (kKeep) v = select(row.keep[p] != 0, v, -std::numeric_limits<C>::infinity());
    const C d = select(v == old, C(0), v - old), factor = exp_(0 - std::fabs(d));
    C one = 1;
    if constexpr (kWeight) one = row.w[p];
    const bool higher = d > 0;
    sum[p] = select(higher, sum[p], one) * factor + select(higher, one, sum[p]);
    maximum[p] = select(higher, v, old);
  });
}

// Merges the state (other, more) into the state (maximum, sum).
inline void join(double& maximum, double& sum, double other, double more) {
  const double d = select(other == maximum, 0.0, other - maximum), factor = exp_(0 - std::fabs(d));
  const bool higher = d > 0;
  sum = select(higher, sum, more) * factor + select(higher, more, sum);
  maximum = select(higher, other, maximum);
}

void join_loop(double* maximum, double* sum, const double* other, const double* more, int64_t n) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) join(maximum[i], sum[i], other[i], more[i]);
}

// ---- The accumulator. value: the maximum; second: sum w exp(x - maximum)

template <class C>
struct LogSumExp {
  static constexpr int64_t kColumns = 1024, kBlock = cpu::kBlock;
  static constexpr bool has_weight = false, has_second = true, has_count = true;
  static constexpr double kLowest = std::numeric_limits<double>::lowest();
  bool weighted;
  static constexpr bool scaled = false;

  void merge(const States& into, const States& from, int64_t n) const {
    pick<&join_loop>()(into.value, into.second, from.value, from.second, n);
    for (int64_t i = 0; i < n; ++i) into.count[i] += from.count[i];
  }

  class Worker : public StatisticWorker<C, LogSumExp> {
    using Base = StatisticWorker<C, LogSumExp>;
    friend Base;

   public:
    Worker(const LogSumExp& accumulator, const Inputs<C>& inputs) : Base(accumulator, inputs) {
      this->pick_kind([this](auto keep, auto weight) {
        constexpr bool kKeep = keep, kWeight = weight;
        max_row_ = pick_width<&max_row<C, 64, kKeep>, &max_row<C, 32, kKeep>, &max_row<C, 16, kKeep>>();
        exponentials_ = pick<&exponentials_loop<C, kKeep, kWeight>>();
        columns_ = pick<&exponential_columns<C, kKeep, kWeight>>();
      });
    }

   private:
    void reset_row() { row_max_ = kLowest, row_sum_ = 0; }

    void accumulate_row(const Elements<C>& e, int64_t n, int64_t) {
      const C chunk = max_row_(e, n), maximum = chunk > row_max_ ? chunk : static_cast<C>(row_max_);
      double more;
      exponentials_(e, n, maximum, terms_);
      sum_(terms_, 1, n, &more);
      join(row_max_, row_sum_, static_cast<double>(maximum), more);
    }

    void row_state(const States& out) const {
      *out.value = row_max_;
      *out.second = row_sum_;
    }

    void reset_columns() {
      std::fill_n(max_, this->width_, std::numeric_limits<C>::lowest());
      std::fill_n(sums_, this->width_, C(0));
    }

    void accumulate_columns(const Elements<C>& e, int64_t first, int64_t n, int64_t period) {
      columns_(e, n, period, {max_ + first, sums_ + first});
    }

    States column_states() {
      widen_(max_, this->width_, value_);
      widen_(sums_, this->width_, wide_sums_);
      return {value_, nullptr, wide_sums_, this->column_counts_};
    }

    double row_max_, row_sum_;
    decltype(&max_row<C, 16, true>) max_row_;
    decltype(&exponentials_loop<C, true, true>) exponentials_;
    decltype(&exponential_columns<C, true, true>) columns_;
    decltype(pick<&rows_loop<C, double>>()) sum_ = pick<&rows_loop<C, double>>();
    decltype(pick<&widen_loop<C, double>>()) widen_ = pick<&widen_loop<C, double>>();
    alignas(64) C terms_[kBuffer];
    alignas(64) C max_[kColumns + kPad];
    alignas(64) C sums_[kColumns + kPad];
    alignas(64) double value_[kColumns + kPad];
    alignas(64) double wide_sums_[kColumns + kPad];
  };
};

// Sets origin = maximum and scale = 1 / sum, which give the gradient w exp(x - maximum) / sum. (w exp(x - value) would
// lose digits if x and value are large.) If the sum is 0 (all kept elements are -inf), origin = 0 and scale = 1 give w
// exp(x) = 0.
void finish_logsumexp(const void* op, int64_t, const States& states, int64_t n, const double*,
                      double* const* results) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const StatisticFinish f = *static_cast<const StatisticFinish*>(op);
  for (int64_t i = 0; i < n; ++i) {
    const bool none = states.count[i] == 0;
    const double maximum = states.value[i], second = states.second[i];
    // Negative weights may make the sum negative: its logarithm and its slope are NaN.
    const double sum = second < 0 ? std::numeric_limits<double>::quiet_NaN() : second;
    results[0][i] = none ? f.empty_value : sum == 0 ? -kInfinity : maximum + std::log(sum);
    results[1][i] = none || sum == 0 ? 0.0 : maximum;
    results[2][i] = none ? 0.0 : sum == 0 ? 1.0 : 1 / sum;
  }
}

Statistics logsumexp(const Statistic& s, bool empty_nan) {
  StatisticFinish finish;
  finish.empty_value = empty_value(empty_nan);
  const Statistics to = s.results();
  if (s.in_double())
    s.run<double>(LogSumExp<double>{s.weight.has_value()}, &finish_logsumexp, &finish, to);
  else
    s.run<float>(LogSumExp<float>{s.weight.has_value()}, &finish_logsumexp, &finish, to);
  return to;
}

}  // namespace

SAFEOPS_STATISTIC(masked_logsumexp, return logsumexp(s, empty_nan);)

}  // namespace safeops::cpu
