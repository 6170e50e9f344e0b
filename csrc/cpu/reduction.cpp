#include "reduction.h"

#include <memory>

#include "lanes.h"
#include "outputs.h"
#include "parallel.h"

namespace safeops::cpu {

namespace {

// A long reduction with few outputs is cut into slices of at least kSlice terms, up to about kMaxUnits pieces of work.
constexpr int64_t kSlice = 32768;
constexpr int64_t kMaxUnits = 256;
constexpr int64_t kMinRows = 128;  // reduced in a slice of columns: its partial totals are 16 bytes a column

template <class C>
struct Reducer {
  const Reduction<C>& r;
  const Finish& finish;
  Loop<C> loop;
  const void* op;
  const Outputs& outputs;

  const C* terms_of(Scratch<C>& s) const {
    if (finish.plain) return s.chunk.in[0];
    loop(op, s.chunk);
    return s.terms;
  }

  // Whole outputs fit in a chunk: a unit is a chunk of as many outer indices as it holds.
  void run_short() const {
    const int64_t each = r.reduced * r.inner, groups = std::max<int64_t>(1, r.inputs.step(0) / each);
    parallel((r.outer + groups - 1) / groups, kChunk, [&](int64_t begin, int64_t end) {
      Scratch<C> s(r.inputs);
      int64_t held = 0;  // totals not yet written: a few at a time would cost more than their sums
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit * groups, g = std::min(groups, r.outer - first);
        r.inputs.fetch(first * each, g * each, first * each + kAhead, s.buffers, s.chunk);
        const Totals totals = s.totals.from(held);
        s.sum(terms_of(s), g, r.reduced, r.inner, totals.value);
        if (finish.weighted) s.sum(s.weights, g, r.reduced, r.inner, totals.weight);
        if (finish.counted) s.count_kept(s.keep, g, r.reduced, r.inner, totals.count);
        held += g * r.inner;
        if (unit + 1 < end && held + kChunk <= kColumns) continue;
        outputs.write((first + g) * r.inner - held, held, s.totals);
        held = 0;
      }
    });
  }

  // A unit is one outer index, one tile of at most kColumns inner columns, and one slice of the reduced walk.
  void run_long() const {
    const int64_t width = std::min(r.inner, kColumns), tiles = (r.inner + kColumns - 1) / kColumns;
    const int64_t spare = std::max<int64_t>(1, kMaxUnits / (r.outer * tiles));
    const int64_t slices = std::clamp<int64_t>(std::min(r.reduced * width / kSlice, r.reduced / kMinRows), 1, spare);
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
      Scratch<C> s(r.inputs);
      int64_t held = 0;
      for (int64_t unit = begin; unit < end; ++unit) {
        const bool rows = slices * tiles == 1;  // many short ones, perhaps: spare them the divisions
        const int64_t slice = rows ? 0 : unit % slices;
        const int64_t tile = rows ? 0 : unit / slices % tiles;
        const int64_t outer = rows ? unit : unit / slices / tiles;
        const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
        const int64_t first = std::min(slice * step, r.reduced), last = std::min(first + step, r.reduced);
        sum_slice(s, outer, column, n, first, last, room ? partial(unit) : s.totals.from(held));
        held += n;
        if (room || (unit + 1 < end && held + width <= kColumns)) continue;
        outputs.write(outer * r.inner + column + n - held, held, s.totals);
        held = 0;
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
  void sum_slice(Scratch<C>& s, int64_t outer, int64_t column, int64_t n, int64_t first, int64_t last,
                 const Totals& totals) const {
    const int64_t base = outer * r.reduced * r.inner + column;
    if (r.inner == 1) return sum_row(s, base + first, base + last, totals);
    if (n == r.inner && n <= r.inputs.step(0))
      sum_narrow(s, n, base + first * n, base + last * n);
    else
      sum_wide(s, n, base + first * r.inner, base + last * r.inner);
    s.value_lanes.finish(n, totals.value);
    if (finish.weighted) s.weight_lanes.finish(n, totals.weight);
    if (finish.counted) s.count_lanes.finish(n, totals.count);
  }

  void start(Scratch<C>& s, int64_t period) const {
    s.value_lanes.start(period);
    if (finish.weighted) s.weight_lanes.start(period);
    if (finish.counted) s.count_lanes.start(period);
  }

  void empty_sums(Scratch<C>& s) const {
    s.value_lanes.empty();
    if (finish.weighted) s.weight_lanes.empty();
  }

  void empty_counts(Scratch<C>& s) const {
    if (finish.counted) s.count_lanes.empty();
  }

  // One row, a chunk at a time.
  void sum_row(Scratch<C>& s, int64_t begin, int64_t end, const Totals& totals) const {
    double value = 0, weight = 0, more;
    int64_t count = 0, kept;
    const int64_t step = r.inputs.step(0);
    for (int64_t at = begin; at < end; at += step) {
      const int64_t m = std::min(step, end - at);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      s.sum.rows(terms_of(s), 1, m, &more);
      value += more;
      if (finish.weighted) s.sum.rows(s.weights, 1, m, &more), weight += more;
      if (finish.counted) s.count_kept.rows(s.keep, 1, m, &kept), count += kept;
    }
    *totals.value = value;
    if (finish.weighted) *totals.weight = weight;
    if (finish.counted) *totals.count = count;
  }

  // Rows of n without a gap, a chunk at a time.
  void sum_narrow(Scratch<C>& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step(0), period = lanes_for(n, step), rows = step / period, most = rows * period;
    int64_t filled = 0, counted = 0;
    start(s, period);
    const int64_t additions = s.value_lanes.additions(most);
    for (int64_t at = begin; at < end; at += most, filled += additions, counted += rows) {
      if (filled + additions > kBlock) empty_sums(s), filled = 0;
      if (counted + rows > kMostCounts) empty_counts(s), counted = 0;
      const int64_t m = std::min(most, end - at);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      s.value_lanes.add(terms_of(s), m);
      if (finish.weighted) s.weight_lanes.add(s.weights, m);
      if (finish.counted) s.count_lanes.add(s.keep, m);
    }
  }

  // Rows of n columns, chunk by chunk, each row r.inner from the last.
  void sum_wide(Scratch<C>& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step(0);
    int64_t filled = 0, counted = 0;
    start(s, n);
    for (int64_t row = begin; row < end; row += r.inner, ++filled, ++counted) {
      if (filled == kBlock) empty_sums(s), filled = 0;
      if (counted == kMostCounts) empty_counts(s), counted = 0;
      for (int64_t c = 0; c < n; c += step) {
        const int64_t m = std::min(step, n - c);
        const int64_t ahead = row + c + kAhead + (c + kAhead < n ? 0 : r.inner - n);
        r.inputs.fetch(row + c, m, ahead, s.buffers, s.chunk);
        s.value_lanes.add_at(c, terms_of(s), m);
        if (finish.weighted) s.weight_lanes.add_at(c, s.weights, m);
        if (finish.counted) s.count_lanes.add_at(c, s.keep, m);
      }
    }
  }

  // Nothing to reduce, but perhaps outputs to write.
  void run_empty() const {
    Scratch<C> s(r.inputs);
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
