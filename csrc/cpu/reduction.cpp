#include "reduction.h"

#include <limits>
#include <memory>

#include "lanes.h"
#include "parallel.h"

namespace safeops::cpu {

namespace {

// A long reduction with few outputs is cut into slices of at least kSlice terms, up to about kMaxUnits pieces of work.
constexpr int64_t kSlice = 32768;
constexpr int64_t kMaxUnits = 256;

struct Outputs {
  const Finish& finish;
  int64_t reduced;
  Sink<double> value, denominator;

  // Totals of outputs [start, start + n) of the kept walk -> value and denominator.
  void write(int64_t start, int64_t n, const Totals& totals) const {
    double values[kChunk], denominators[kChunk];
    double* v = value.target(start, values);
    double* d = denominator.target(start, denominators);
    const double nothing = finish.empty_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t count = finish.counted ? totals.count[i] : reduced;
      d[i] = finish.divisor ? *finish.divisor : finish.weighted ? totals.weight[i] : static_cast<double>(count);
      v[i] = count == 0 ? nothing : finish.mean ? totals.value[i] / d[i] : totals.value[i];
    }
    value.commit(start, n, values);
    denominator.commit(start, n, denominators);
  }
};

template <class C>
struct Reducer {
  const Reduction<C>& r;
  const Finish& finish;
  Loop<C> loop;
  const void* op;
  const Outputs& outputs;

  // One thread's buffers.
  struct Scratch {
    typename Inputs<C>::Buffers buffers;
    alignas(64) C terms[kChunk];
    alignas(64) C weights[kChunk];
    alignas(64) uint8_t keep[kChunk];
    double value[kChunk], weight[kChunk];
    int64_t count[kChunk];
    Totals totals{value, weight, count};
    Lanes<C, double> value_lanes, weight_lanes;
    Lanes<uint8_t, int64_t> count_lanes;
    Chunk<C> chunk;

    explicit Scratch(const Inputs<C>& inputs) {
      inputs.prime(buffers);
      chunk.out[0] = terms;
      chunk.out[1] = weights;
      chunk.keep = keep;
    }
  };

  // Whole outputs fit in a chunk: a unit is a chunk of as many outer indices as it holds.
  void run_short() const {
    const int64_t each = r.reduced * r.inner, groups = kChunk / each;
    const SumGroups<C, double> sum;
    const SumGroups<uint8_t, int64_t> count;
    parallel((r.outer + groups - 1) / groups, kChunk, [&](int64_t begin, int64_t end) {
      Scratch s(r.inputs);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit * groups, g = std::min(groups, r.outer - first);
        r.inputs.fetch(first * each, g * each, first * each + kAhead, s.buffers, s.chunk);
        loop(op, s.chunk);
        sum(s.terms, g, r.reduced, r.inner, s.value);
        if (finish.weighted) sum(s.weights, g, r.reduced, r.inner, s.weight);
        if (finish.counted) count(s.keep, g, r.reduced, r.inner, s.count);
        outputs.write(first * r.inner, g * r.inner, s.totals);
      }
    });
  }

  // A unit is one outer index, one tile of at most kChunk inner columns, and one slice of the reduced walk.
  void run_long() const {
    const int64_t width = std::min(r.inner, kChunk), tiles = (r.inner + kChunk - 1) / kChunk;
    const int64_t spare = std::max<int64_t>(1, kMaxUnits / (r.outer * tiles));
    const int64_t slices = std::clamp<int64_t>(r.reduced * width / kSlice, 1, spare);
    const int64_t step = (r.reduced + slices - 1) / slices, units = r.outer * tiles * slices;

    const int64_t room = slices > 1 ? units * width : 0;
    const std::unique_ptr<double[]> values(room ? new double[room] : nullptr);
    const std::unique_ptr<double[]> weights(room && finish.weighted ? new double[room] : nullptr);
    const std::unique_ptr<int64_t[]> counts(room && finish.counted ? new int64_t[room] : nullptr);
    const auto partial = [&](int64_t unit) {
      const auto at = [&](auto& all) { return all ? all.get() + unit * width : nullptr; };
      return Totals{at(values), at(weights), at(counts)};
    };

    parallel(units, step * width, [&](int64_t begin, int64_t end) {
      Scratch s(r.inputs);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t slice = unit % slices, tile = unit / slices % tiles, outer = unit / slices / tiles;
        const int64_t column = tile * kChunk, n = std::min(kChunk, r.inner - column);
        const int64_t first = std::min(slice * step, r.reduced), last = std::min(first + step, r.reduced);
        sum_slice(s, outer, column, n, first, last, room ? partial(unit) : s.totals);
        if (!room) outputs.write(outer * r.inner + column, n, s.totals);
      }
    });

    for (int64_t unit = 0; room && unit < units; unit += slices) {  // always in this order
      const int64_t tile = unit / slices % tiles, outer = unit / slices / tiles;
      const int64_t column = tile * kChunk, n = std::min(kChunk, r.inner - column);
      const Totals sum = partial(unit);
      for (int64_t k = 1; k < slices; ++k) {
        const Totals other = partial(unit + k);
        for (int64_t i = 0; i < n; ++i) {
          sum.value[i] += other.value[i];
          if (finish.weighted) sum.weight[i] += other.weight[i];
          if (finish.counted) sum.count[i] += other.count[i];
        }
      }
      outputs.write(outer * r.inner + column, n, sum);
    }
  }

  // Columns [column, column + n) of the reduced rows [first, last) -> totals[0, n). Rows narrower than kLanes are
  // taken several at a time, as one row of `period` lanes.
  void sum_slice(Scratch& s, int64_t outer, int64_t column, int64_t n, int64_t first, int64_t last,
                 const Totals& totals) const {
    const bool whole = n == r.inner;  // rows follow each other without a gap
    const int64_t period = whole && n < kLanes ? n * ((kLanes + n - 1) / n) : n;
    s.value_lanes.start(period);
    if (finish.weighted) s.weight_lanes.start(period);
    if (finish.counted) s.count_lanes.start(period);

    const int64_t base = outer * r.reduced * r.inner + column;
    const int64_t end = base + last * r.inner;
    const int64_t most = whole ? period * std::min(kChunk / period, kBlock) : n;
    const int64_t step = whole ? most : r.inner;
    const int64_t additions = most == kChunk && period == kLanes ? 1 : most / period;  // to a lane, for each chunk
    int64_t filled = 0;
    for (int64_t at = base + first * r.inner; at < end; at += step) {
      const int64_t m = std::min(most, end - at);
      if (filled + additions > kBlock) {
        s.value_lanes.empty();
        if (finish.weighted) s.weight_lanes.empty();
        if (finish.counted) s.count_lanes.empty();
        filled = 0;
      }
      r.inputs.fetch(at, m, whole ? at + kAhead : at + 2 * step, s.buffers, s.chunk);
      if (!finish.plain) loop(op, s.chunk);
      s.value_lanes.add(finish.plain ? s.chunk.in[0] : s.terms, m);
      if (finish.weighted) s.weight_lanes.add(s.weights, m);
      if (finish.counted) s.count_lanes.add(s.keep, m);
      filled += additions;
    }
    s.value_lanes.finish(n, totals.value);
    if (finish.weighted) s.weight_lanes.finish(n, totals.weight);
    if (finish.counted) s.count_lanes.finish(n, totals.count);
  }

  // Nothing to reduce, but perhaps outputs to write.
  void run_empty() const {
    Scratch s(r.inputs);
    for (int64_t i = 0; i < kChunk; ++i) s.value[i] = 0, s.weight[i] = 0, s.count[i] = 0;
    const int64_t total = r.outer * r.inner;
    for (int64_t at = 0; at < total; at += kChunk) outputs.write(at, std::min(kChunk, total - at), s.totals);
  }
};

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
  // The outputs seen with size-1 reduced dims, so that they can be walked in the order of the input's kept dims.
  const Shape full = dims.output(shape, true);
  int64_t strides[kMaxDims];
  contiguous_strides(full, strides);
  const auto seen = [&](const Tensor& t) {
    View view(t);
    view.ndim = full.ndim;
    view.sizes = full.size;
    view.strides = strides;
    return view;
  };
  Outputs outputs{finish, reduced, {}, {}};
  outputs.value.bind(seen(value), full, kept);
  outputs.denominator.bind(seen(denominator), full, kept);
  if (outer * inner == 0) return;
  const Reducer<C> reducer{*this, finish, loop, op, outputs};
  if (reduced == 0)
    reducer.run_empty();
  else if (reduced * inner <= kChunk)
    reducer.run_short();
  else
    reducer.run_long();
}

template struct Reduction<float>;
template struct Reduction<double>;

}  // namespace safeops::cpu
