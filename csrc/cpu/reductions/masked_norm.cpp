// Norms, root mean square and sum of squares, from sum w |x| or sum w x^2 over the kept elements. Squares neither
// overflow nor underflow: elements that float cannot square are summed in double.
// I/O: forward reads x, mask, weight once.
#include "cpu/reductions/statistic_worker.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

// ---- inner loops

template <class C, bool kSquare>
inline C power(C x) {
  if constexpr (kSquare)
    return x * x;
  else
    return std::fabs(x);
}

// Replaces a register of kept elements x by x^2 (kSquare) or |x|.
template <bool kSquare>
struct Power {
  template <class R>
  static void apply(typename R::V& x) {
    if constexpr (kSquare)
      x *= x;
    else
      R::abs(x);
  }
};

// Returns sum w x^2 (kSquare) or sum w |x|, in double.
template <class C, bool kKeep, bool kWeight, bool kSquare>
double careful_powers(const Elements<C>& e, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    double x = static_cast<double>(e.x[i]);
    if constexpr (kKeep) x = select_or_zero(e.keep[i] != 0, x);
    double term = power<double, kSquare>(x);
    if constexpr (kWeight) term *= static_cast<double>(e.w[i]);
    sum += term;
  }
  return sum;
}

template <class C>
struct PowerColumns {
  C *sum, *weight;
};

template <class C, bool kKeep, bool kWeight, bool kSquare>
void power_columns(const Elements<C>& e, int64_t n, int64_t period, const PowerColumns<C>& columns) {
  C *sum = columns.sum, *weight = columns.weight;
  for_columns(e, n, period, [&](const Elements<C>& row, int64_t p) __attribute__((always_inline)) {
    C v = row.x[p];
    if constexpr (kKeep) v = select_or_zero(row.keep[p] != 0, v);
    C term = power<C, kSquare>(v);
    if constexpr (kWeight) term *= row.w[p];
    if constexpr (kWeight) weight[p] += row.w[p];
    sum[p] += term;
  });
}

// ---- The accumulator. value: sum w x^2 or sum w |x|; weight: sum of weights

template <class C>
struct Powers {
  static constexpr int64_t kColumns = 1024, kBlock = cpu::kBlock;
  static constexpr bool has_second = false, has_count = true;
  bool weighted, scaled;
  bool half;  // the input is fp16: float squares it without loss of range
  bool square;
  bool has_weight = weighted;

  void merge(const States& into, const States& from, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) into.value[i] += from.value[i];
    for (int64_t i = 0; weighted && i < n; ++i) into.weight[i] += from.weight[i];
    for (int64_t i = 0; i < n; ++i) into.count[i] += from.count[i];
  }

  class Worker : public StatisticWorker<C, Powers> {
    using Base = StatisticWorker<C, Powers>;
    friend Base;

   public:
    Worker(const Powers& accumulator, const Inputs<C>& inputs) : Base(accumulator, inputs) {
      this->pick_kind([&](auto keep, auto weight) {
        accumulator.square ? pick_loops<true, keep, weight>() : pick_loops<false, keep, weight>();
      });
    }

   private:
    template <bool kSquare, bool kKeep, bool kWeight>
    void pick_loops() {
      using P = Power<kSquare>;
      row_ = pick_width<&sum_row<C, 64, kKeep, kWeight, P>, &sum_row<C, 32, kKeep, kWeight, P>,
                        &sum_row<C, 16, kKeep, kWeight, P>>();
      careful_ = pick<&careful_powers<C, kKeep, kWeight, kSquare>>();
      columns_ = pick<&power_columns<C, kKeep, kWeight, kSquare>>();
      rare_ = pick_width<&any_out_of_range<64, kKeep>, &any_out_of_range<32, kKeep>,
                           &any_out_of_range<16, kKeep>>();
    }

    void reset_row() { row_sum_ = row_weight_ = 0; }

    void accumulate_row(const Elements<C>& e, int64_t n, int64_t) {
      double sum = row_(e, n);
      if constexpr (sizeof(C) == 4) {
        if (!(sum > 0x1p-100 && sum < 0x1p+120) && !this->accumulator_.half) sum = careful_(e, n);
      }
      row_sum_ += sum;
      if (!e.w) return;
      double weight;
      sum_(e.w, 1, n, &weight);
      row_weight_ += weight;
    }

    void row_state(const States& out) const {
      *out.value = row_sum_;
      if (out.weight) *out.weight = row_weight_;
    }

    void reset_columns() {
      any_rare_ = false;
      std::fill_n(sums_, this->width_, C(0));
      std::fill_n(sw_, this->width_, C(0));
    }

    void accumulate_columns(Elements<C> e, int64_t first, int64_t n, int64_t period) {
      if constexpr (sizeof(C) == 4) {
        const SafeRange& range = this->accumulator_.square ? kSquares : kMagnitudes;
        if (!this->accumulator_.half && rare_(e, n, range)) e.x = add_rare(e, first, n, period, range);
      }
      columns_(e, n, period, {sums_ + first, sw_ + first});
    }

    // Adds the kept elements outside `range` to their columns one by one, in double. Returns all elements, with those
    // set to 0.
    const C* add_rare(const Elements<C>& e, int64_t first, int64_t n, int64_t period, const SafeRange& range) {
      if (!any_rare_) std::fill_n(value_, this->width_, 0.0);
      any_rare_ = true;
      for (int64_t i = 0; i < n; ++i) {
        const bool rare = (!e.keep || e.keep[i]) && !range.holds(e.x[i]);
        if (rare) value_[first + i % period] += careful_(e.from(i), 1);
        others_[i] = rare ? C(0) : e.x[i];
      }
      return others_;
    }

    States column_states() {
      widen_(sums_, this->width_, wide_sums_);
      for (int64_t p = 0; any_rare_ && p < this->width_; ++p) wide_sums_[p] += value_[p];
      widen_(sw_, this->width_, weight_);
      return {wide_sums_, weight_, nullptr, this->column_counts_};
    }

    double row_sum_, row_weight_;
    bool any_rare_;
    decltype(&sum_row<C, 16, true, true>) row_;
    decltype(&careful_powers<C, true, true, true>) careful_;
    decltype(&power_columns<C, true, true, true>) columns_;
    decltype(&any_out_of_range<16, true>) rare_;
    decltype(pick<&rows_loop<C, double>>()) sum_ = pick<&rows_loop<C, double>>();
    decltype(pick<&widen_loop<C, double>>()) widen_ = pick<&widen_loop<C, double>>();
    alignas(64) C sums_[kColumns + kPad];
    alignas(64) C sw_[kColumns + kPad];
    alignas(64) double value_[kColumns + kPad];  // sums of the elements outside the safe range
    alignas(64) double wide_sums_[kColumns + kPad];
    alignas(64) double weight_[kColumns + kPad];
    alignas(64) C others_[kBuffer];
  };
};

// The factor `scale` follows from d value/dx. Sum of squares: 2 w x; norm: w x / norm; rms: w x / (rms sum w); sum of
// magnitudes: w sign(x).
void finish_powers(const void* op, int64_t, const States& states, int64_t n, const double* unscale,
                   double* const* results) {
  const StatisticFinish f = *static_cast<const StatisticFinish*>(op);
  for (int64_t i = 0; i < n; ++i) {
    const bool none = states.count[i] == 0;
    const double divisor = !f.mean ? 1.0 : f.weighted ? states.weight[i] : static_cast<double>(states.count[i]);
    double value = states.value[i], scale = f.slope;
    if (f.lost && !none && may_be_lost(value)) *f.lost = true;
    const bool finite = std::isfinite(value);
    const double by = unscale ? unscale[i] : 1;
    if (f.mean) value /= divisor;
    if (f.root) value = std::sqrt(value);
    if (f.root) scale = inverse_of(value * divisor, by);
    if (unscale) value /= by;
    if (finite && value > f.most) value = f.most, scale = 0;
    results[0][i] = none ? f.empty_value : value;
    results[1][i] = 0;
    results[2][i] = none ? 0.0 : scale;
  }
}

}  // namespace

Statistics powers(const Statistic& s, bool square, bool mean, bool root, bool empty_nan) {
  StatisticFinish finish;
  finish.empty_value = empty_value(empty_nan);
  finish.mean = mean;
  finish.root = root;
  finish.weighted = s.weight.has_value();
  finish.slope = square ? 2 : 1;
  finish.most = s.most;
  const Statistics to = s.results();
  if (!s.in_double())
    s.run<float>(Powers<float>{finish.weighted, false, s.x.dtype == DType::kHalf, square}, &finish_powers, &finish, to);
  else if (root || std::isfinite(s.most))
    run_squares(s, Powers<double>{finish.weighted, false, false, square}, &finish_powers, finish, to);
  else
    s.run<double>(Powers<double>{finish.weighted, false, false, square}, &finish_powers, &finish, to);
  return to;
}

SAFEOPS_STATISTIC(masked_sum_of_squares, return powers(s, true, false, false, empty_nan);)
SAFEOPS_STATISTIC(masked_rms, return powers(s, true, true, true, empty_nan);)

// order: 2: sqrt(sum w x^2), 1: sum w |x|, inf: max |x|, -inf: min |x|. It is the op's `parameter`.
static Statistics norm(const Statistic& s, double order, bool empty_nan) {
  if (order == 2) return powers(s, true, false, true, empty_nan);
  if (order == 1) return powers(s, false, false, false, empty_nan);
  STD_TORCH_CHECK(std::isinf(order), "_masked_norm: no kernel for this order");
  return extreme(s, order > 0 ? Extremum::kMaxAbs : Extremum::kMinAbs, empty_nan);
}

SAFEOPS_STATISTIC(masked_norm, { return norm(s, parameter, empty_nan); })

// The norm of finite elements stays finite: a norm that overflows becomes the dtype's largest number, with gradient 0.
SAFEOPS_STATISTIC(safe_norm, {
  Statistic saturated = s;
  saturated.most = largest(s.type);
  return norm(saturated, parameter, empty_nan);
})

}  // namespace safeops::cpu
