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
    const double nothing = finish.empty_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    double values[kChunk], denominators[kChunk];
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t at = start + done, m = std::min(kChunk, n - done);
      double* v = value.target(at, values);
      double* d = denominator.target(at, denominators);
      for (int64_t i = 0; i < m; ++i) {
        const int64_t count = finish.counted ? totals.count[done + i] : reduced;
        const double total = totals.value[done + i];
        d[i] = finish.divisor    ? *finish.divisor
               : finish.weighted ? totals.weight[done + i]
                                 : static_cast<double>(count);
        v[i] = count == 0 ? nothing : finish.mean ? total / d[i] : total;
      }
      value.commit(at, m, values);
      denominator.commit(at, m, denominators);
    }
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
    double value[kColumns], weight[kColumns];
    int64_t count[kColumns];
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

  // A unit is one outer index, one tile of at most kColumns inner columns, and one slice of the reduced walk.
  void run_long() const {
    const int64_t width = std::min(r.inner, kColumns), tiles = (r.inner + kColumns - 1) / kColumns;
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
        const bool rows = slices * tiles == 1;  // many short ones, perhaps: spare them the divisions
        const int64_t slice = rows ? 0 : unit % slices;
        const int64_t tile = rows ? 0 : unit / slices % tiles;
        const int64_t outer = rows ? unit : unit / slices / tiles;
        const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
        const int64_t first = std::min(slice * step, r.reduced), last = std::min(first + step, r.reduced);
        sum_slice(s, outer, column, n, first, last, room ? partial(unit) : s.totals);
        if (!room) outputs.write(outer * r.inner + column, n, s.totals);
      }
    });

    for (int64_t unit = 0; room && unit < units; unit += slices) {  // always in this order
      const int64_t tile = unit / slices % tiles, outer = unit / slices / tiles;
      const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
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

  // Columns [column, column + n) of the reduced rows [first, last) -> totals[0, n).
  void sum_slice(Scratch& s, int64_t outer, int64_t column, int64_t n, int64_t first, int64_t last,
                 const Totals& totals) const {
    const int64_t base = outer * r.reduced * r.inner + column;
    if (n == r.inner && n <= kChunk)
      sum_narrow(s, n, base + first * n, base + last * n);
    else
      sum_wide(s, n, base + first * r.inner, base + last * r.inner);
    s.value_lanes.finish(n, totals.value);
    if (finish.weighted) s.weight_lanes.finish(n, totals.weight);
    if (finish.counted) s.count_lanes.finish(n, totals.count);
  }

  void start(Scratch& s, int64_t period) const {
    s.value_lanes.start(period);
    if (finish.weighted) s.weight_lanes.start(period);
    if (finish.counted) s.count_lanes.start(period);
  }

  void empty(Scratch& s) const {
    s.value_lanes.empty();
    if (finish.weighted) s.weight_lanes.empty();
    if (finish.counted) s.count_lanes.empty();
  }

  // Rows of n without a gap, a chunk at a time; rows narrower than kLanes several together, as one row of `period`.
  void sum_narrow(Scratch& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t period = n < kLanes ? n * ((kLanes + n - 1) / n) : n;
    const int64_t most = period * (kChunk / period);
    const int64_t additions = most == kChunk && period == kLanes ? 1 : most / period;  // to a lane, for each chunk
    int64_t filled = 0;
    start(s, period);
    for (int64_t at = begin; at < end; at += most, filled += additions) {
      if (filled + additions > kBlock) empty(s), filled = 0;
      const int64_t m = std::min(most, end - at);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      if (!finish.plain) loop(op, s.chunk);
      s.value_lanes.add(finish.plain ? s.chunk.in[0] : s.terms, m);
      if (finish.weighted) s.weight_lanes.add(s.weights, m);
      if (finish.counted) s.count_lanes.add(s.keep, m);
    }
  }

  // Rows of n columns, chunk by chunk, each row r.inner from the last.
  void sum_wide(Scratch& s, int64_t n, int64_t begin, int64_t end) const {
    int64_t filled = 0;
    start(s, n);
    for (int64_t row = begin; row < end; row += r.inner, ++filled) {
      if (filled == kBlock) empty(s), filled = 0;
      for (int64_t c = 0; c < n; c += kChunk) {
        const int64_t m = std::min(kChunk, n - c);
        const int64_t ahead = row + c + kAhead + (c + kAhead < n ? 0 : r.inner - n);
        r.inputs.fetch(row + c, m, ahead, s.buffers, s.chunk);
        if (!finish.plain) loop(op, s.chunk);
        s.value_lanes.add_at(c, finish.plain ? s.chunk.in[0] : s.terms, m);
        if (finish.weighted) s.weight_lanes.add_at(c, s.weights, m);
        if (finish.counted) s.count_lanes.add_at(c, s.keep, m);
      }
    }
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
