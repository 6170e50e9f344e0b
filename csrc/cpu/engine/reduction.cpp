#include "cpu/engine/reduction.h"

#include <limits>

#include "cpu/engine/vectors.h"
#include "cpu/engine/reducer.h"

namespace safeops::cpu {

namespace {

// The sums of terms: fp32 (or fp64) lanes, emptied into double every kBlock additions.
template <class C>
struct Sums {
  static constexpr int64_t kColumns = cpu::kColumns;
  const Finish& finish;
  Loop<C> loop;
  const void* op;
  bool has_weight = finish.weighted, has_spread = false, has_count = finish.counted;

  void merge(const Totals& into, const Totals& from, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) into.value[i] += from.value[i];
    for (int64_t i = 0; has_weight && i < n; ++i) into.weight[i] += from.weight[i];
    for (int64_t i = 0; has_count && i < n; ++i) into.count[i] += from.count[i];
  }

  struct Worker {
    const Sums& fold;
    const bool weighted, counted;
    typename Inputs<C>::Buffers buffers;
    Chunk<C> chunk;
    alignas(64) C terms_buffer[kBuffer];
    alignas(64) C weights[kBuffer];
    alignas(64) uint8_t keep[kBuffer];
    const C* terms;

    Worker(const Sums& fold_, const Inputs<C>& inputs)
        : fold(fold_), weighted(fold.has_weight), counted(fold.has_count) {
      inputs.prime(buffers);
      chunk.out[0] = terms_buffer;
      chunk.out[1] = weights;
      chunk.keep = keep;
    }

    void prepare() {}  // a row may need no terms

    void groups(int64_t g, int64_t reduced, int64_t inner, const Totals& out) {
      if (fold.finish.plain && inner == 1 && reduced >= kShortRow) {
        for (int64_t i = 0; i < g; ++i) {
          start_row();
          add_row(i * reduced, reduced);
          finish_row(out.from(i));
        }
        return;
      }
      make_terms();
      sum(terms, g, reduced, inner, out.value);
      if (weighted) sum(weights, g, reduced, inner, out.weight);
      if (counted) count_kept(keep, g, reduced, inner, out.count);
    }

    void start_row() { value = weight = 0, count = 0; }

    void row(int64_t m) {
      if (!fold.finish.plain) make_terms();
      add_row(0, m);
    }

    void finish_row(const Totals& out) const {
      *out.value = value;
      if (weighted) *out.weight = weight;
      if (counted) *out.count = count;
    }

    void start(int64_t lanes) {
      filled = filled_counts = 0;
      value_lanes.start(lanes);
      if (weighted) weight_lanes.start(lanes);
      if (counted) count_lanes.start(lanes);
    }

    void room(int64_t rows) {
      const int64_t additions = rows / 4 + rows % 4;  // of trees of four
      if (filled + additions > kBlock) {
        filled = 0;
        value_lanes.empty();
        if (weighted) weight_lanes.empty();
      }
      if (filled_counts + rows > kMostCounts) {
        filled_counts = 0;
        if (counted) count_lanes.empty();
      }
      filled += additions;
      filled_counts += rows;
    }

    void add(int64_t m) {
      make_terms();
      value_lanes.add(terms, m);
      if (weighted) weight_lanes.add(weights, m);
      if (counted) count_lanes.add(keep, m);
    }

    void add_at(int64_t first, int64_t m) {
      make_terms();
      value_lanes.add_at(first, terms, m);
      if (weighted) weight_lanes.add_at(first, weights, m);
      if (counted) count_lanes.add_at(first, keep, m);
    }

    void finish(int64_t n, const Totals& out) {
      value_lanes.finish(n, out.value);
      if (weighted) weight_lanes.finish(n, out.weight);
      if (counted) count_lanes.finish(n, out.count);
    }

   private:
    void make_terms() {
      terms = terms_buffer;
      if (fold.finish.plain && !counted)
        terms = chunk.in[0];
      else
        fold.loop(fold.op, chunk);
    }

    // Elements [at, at + m) of the chunk.
    void add_row(int64_t at, int64_t m) {
      double more;
      if (fold.finish.plain && counted) normalise(chunk.mask + at, m, keep + at);
      if (fold.finish.plain)
        more = (counted ? kept_row : whole_row)({chunk.in[0] + at, keep + at, nullptr}, m);
      else
        sum.rows(terms + at, 1, m, &more);
      value += more;
      if (weighted) sum.rows(weights + at, 1, m, &more), weight += more;
      int64_t kept;
      if (counted) count_kept.rows(keep + at, 1, m, &kept), count += kept;
    }

    double value, weight;
    int64_t count, filled, filled_counts;
    Lanes<C, double> value_lanes, weight_lanes;
    Lanes<uint8_t, int64_t> count_lanes;
    SumGroups<C, double> sum;
    SumGroups<uint8_t, int64_t> count_kept;
    decltype(pick<&normalise_loop>()) normalise = pick<&normalise_loop>();
    decltype(&sum_row<C, 16, true, false>) kept_row =
        pick_width<&sum_row<C, 64, true, false>, &sum_row<C, 32, true, false>, &sum_row<C, 16, true, false>>();
    decltype(&sum_row<C, 16, false, false>) whole_row =
        pick_width<&sum_row<C, 64, false, false>, &sum_row<C, 32, false, false>, &sum_row<C, 16, false, false>>();
  };
};

// Totals of n outputs -> values and denominators.
void results_loop(const void* fold, int64_t reduced, const Totals& totals, int64_t n, const double*,
                  double* const* results) {
  const Finish& finish = *static_cast<const Finish*>(fold);
  double *value = results[0], *denominator = results[1];
  const double all = finish.divisor ? *finish.divisor : static_cast<double>(reduced);
  const double* given = finish.weighted ? totals.weight : nullptr;
  const int64_t* counts = finish.counted ? totals.count : nullptr;
  if (finish.divisor || (!given && !counts))
    for (int64_t i = 0; i < n; ++i) denominator[i] = all;
  else if (given)
    std::copy_n(given, n, denominator);
  else
    for (int64_t i = 0; i < n; ++i) denominator[i] = static_cast<double>(counts[i]);

  if (finish.mean)
    for (int64_t i = 0; i < n; ++i) value[i] = totals.value[i] / denominator[i];
  else
    std::copy_n(totals.value, n, value);

  const double nothing = finish.empty_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  if (counts)
    for (int64_t i = 0; i < n; ++i) value[i] = select(counts[i] == 0, nothing, value[i]);
  else if (reduced == 0)
    for (int64_t i = 0; i < n; ++i) value[i] = nothing;
}

}  // namespace

template <class C>
Reduction<C>::Reduction(const Shape& shape_, const ReducedDims& dims_, const View& x) : shape(shape_), dims(dims_) {
  int64_t strides[kMaxDims];
  expand_strides(x.ndim, x.sizes, x.strides, shape, strides);
  const Order walk = Order::by_strides(shape, strides);
  const Order gone = Order::by_strides(shape, strides, dims.reduced, true);
  kept = Order::by_strides(shape, strides, dims.reduced, false);
  int fastest = 0;  // kept dims that lie faster than every reduced one
  while (fastest < walk.ndim && !dims.reduced[walk.dim[fastest]]) ++fastest;
  if (gone.ndim == 0) fastest = 0;
  for (int i = 0; i < kept.ndim; ++i) (i < fastest ? inner : outer) *= kept.size[i];
  for (int i = 0; i < fastest; ++i) order.push(kept.dim[i], kept.size[i]);
  for (int i = 0; i < gone.ndim; ++i) order.push(gone.dim[i], gone.size[i]);
  for (int i = fastest; i < kept.ndim; ++i) order.push(kept.dim[i], kept.size[i]);
  for (int d = 0; d < shape.ndim; ++d)
    if (dims.reduced[d]) reduced *= shape.size[d];
}

template <class C>
void Reduction<C>::run(Loop<C> loop, const void* op, const Finish& finish, const Tensor& value,
                       const Tensor& denominator) const {
  Outputs outputs(*this, pick<&results_loop>(), &finish);
  outputs.add(seen(value));
  outputs.add(seen(denominator));
  const Sums<C> fold{finish, loop, op};
  Reducer<C, Sums<C>>{*this, fold, outputs}.run();
}

template struct Reduction<float>;
template struct Reduction<double>;

}  // namespace safeops::cpu
