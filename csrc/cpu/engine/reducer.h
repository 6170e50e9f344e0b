// The driver of every reduction: any dims of any layout, one read, a partition that depends on the sizes alone.
//
// A Fold says how elements become the state of an output (Totals), in three parts; the driver decides which elements.
//
//     struct Fold {
//       bool has_weight, has_spread, has_count;                      the arrays of Totals it uses besides value
//       void merge(const Totals& into, const Totals& from, int64_t n) const;
//       static constexpr int64_t kColumns;                           lanes at most
//       struct Worker {                                              one thread's buffers
//         Worker(const Fold&, const Inputs<C>&);
//         buffers, chunk; void prepare();                            a chunk has been fetched
//         void groups(g, reduced, inner, Totals);                    (g, reduced, inner) -> (g, inner), all in the
// chunk
//         void start_row(); void row(m); void finish_row(Totals);    a row, chunk by chunk
//         void start(lanes); void room(additions);                   columns: the next chunks add so often to a lane
//         void add(m); void add_at(first, m);                        rows of all lanes; a piece of one row
//         void finish(n, Totals);                                    lane p belongs to output p % n
//       };
//     };
#pragma once

#include <memory>

#include "cpu/engine/accumulators.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/reduction.h"

namespace safeops::cpu {

constexpr int kMaxResults = 3;
constexpr int64_t kTotals = 4096;  // states a thread holds before it writes results

// States of n outputs, each of `reduced` elements -> results. `unscale`: what a scaled input was divided by, or null.
using Results = void (*)(const void* fold, int64_t reduced, const Totals& totals, int64_t n, const double* unscale,
                         double* const* results);

// The last step: states -> results, in any layout.
struct Outputs {
  Results results;
  const void* fold;
  int64_t reduced;
  Shape full;  // the outputs seen with size-1 reduced dims, so that they can be walked in the order of the kept dims
  Order kept;
  int count = 0;
  bool scaled = false;
  Sink<double> sink[kMaxResults];
  Source<double> unscale;

  template <class C>
  Outputs(const Reduction<C>& r, Results results_, const void* fold_)
      : results(results_), fold(fold_), reduced(r.reduced), full(r.dims.output(r.shape, true)), kept(r.kept) {}

  void add(const Unreduced& output) { sink[count++].bind(output.view, full, kept); }
  void add_unscale(const Unreduced& output) {
    unscale.bind(output.view, full, kept);
    scaled = true;
  }

  // States of outputs [start, start + n) of the kept walk.
  void write(int64_t start, int64_t n, const Totals& totals) const {
    double buffers[kMaxResults][kChunk], divisors[kChunk];
    double* target[kMaxResults];
    if (scaled) unscale.prime(divisors);
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t at = start + done, m = std::min(kChunk, n - done);
      for (int i = 0; i < count; ++i) target[i] = sink[i].target(at, buffers[i]);
      const double* divided = scaled ? unscale.fetch(at, m, at + kAhead, divisors) : nullptr;
      results(fold, reduced, totals.from(done), m, divided, target);
      for (int i = 0; i < count; ++i) sink[i].commit(at, m, buffers[i]);
    }
  }
};

// The states of many outputs.
struct States {
  std::unique_ptr<double[]> value, weight, spread;
  std::unique_ptr<int64_t[]> count;

  template <class Fold>
  States(const Fold& fold, int64_t n) {
    if (n == 0) return;
    value.reset(new double[n]);
    if (fold.has_weight) weight.reset(new double[n]);
    if (fold.has_spread) spread.reset(new double[n]);
    if (fold.has_count) count.reset(new int64_t[n]);
  }

  Totals from(int64_t i) const { return Totals{value.get(), weight.get(), spread.get(), count.get()}.from(i); }
};

template <class C, class Fold, class Writer = Outputs>
struct Reducer {
  using Worker = typename Fold::Worker;

  // A long reduction with few outputs is cut into slices of at least kSlice terms, up to about kMaxUnits pieces of
  // work.
  static constexpr int64_t kSlice = 32768;
  static constexpr int64_t kMaxUnits = 256;
  static constexpr int64_t kMinRows = 128;  // reduced in a slice of columns: its partial states are 16 bytes a column
  static constexpr int64_t kColumns = Fold::kColumns;

  const Reduction<C>& r;
  const Fold& fold;
  const Writer& outputs;

  void run() const {
    if (r.outer * r.inner == 0) return;
    if (r.reduced == 0)
      run_empty();
    else if (r.reduced * r.inner <= kChunk)
      run_short();
    else
      run_long();
  }

 private:
  // Whole outputs fit in a chunk: a unit is a chunk of as many outer indices as it holds.
  void run_short() const {
    const int64_t each = r.reduced * r.inner, groups = std::max<int64_t>(1, r.inputs.step() / each);
    parallel((r.outer + groups - 1) / groups, kChunk, [&](int64_t begin, int64_t end) {
      Worker s(fold, r.inputs);
      const States states(fold, std::min(kTotals, r.outer * r.inner));
      int64_t held = 0;  // states not yet written: a few at a time would cost more than their sums
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t first = unit * groups, g = std::min(groups, r.outer - first);
        r.inputs.fetch(first * each, g * each, first * each + kAhead, s.buffers, s.chunk);
        s.prepare();
        s.groups(g, r.reduced, r.inner, states.from(held));
        held += g * r.inner;
        if (unit + 1 < end && held + kChunk <= kTotals) continue;
        outputs.write((first + g) * r.inner - held, held, states.from(0));
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
    const bool partial = slices > 1;
    const States partials(fold, partial ? units * width : 0);

    parallel(units, step * width, [&](int64_t begin, int64_t end) {
      Worker s(fold, r.inputs);
      const States states(fold, partial ? 0 : std::min(kTotals, r.outer * r.inner));
      int64_t held = 0;
      for (int64_t unit = begin; unit < end; ++unit) {
        const bool rows = slices * tiles == 1;  // many short ones, perhaps: spare them the divisions
        const int64_t slice = rows ? 0 : unit % slices;
        const int64_t tile = rows ? 0 : unit / slices % tiles;
        const int64_t outer = rows ? unit : unit / slices / tiles;
        const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
        const int64_t first = std::min(slice * step, r.reduced), last = std::min(first + step, r.reduced);
        reduce(s, outer, column, n, first, last, partial ? partials.from(unit * width) : states.from(held));
        held += n;
        if (partial || (unit + 1 < end && held + width <= kTotals)) continue;
        outputs.write(outer * r.inner + column + n - held, held, states.from(0));
        held = 0;
      }
    });

    for (int64_t unit = 0; partial && unit < units; unit += slices) {  // always in this order
      const int64_t tile = unit / slices % tiles, outer = unit / slices / tiles;
      const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
      const Totals sum = partials.from(unit * width);
      for (int64_t k = 1; k < slices; ++k) fold.merge(sum, partials.from((unit + k) * width), n);
      outputs.write(outer * r.inner + column, n, sum);
    }
  }

  // Columns [column, column + n) of the reduced rows [first, last) -> totals[0, n).
  void reduce(Worker& s, int64_t outer, int64_t column, int64_t n, int64_t first, int64_t last,
              const Totals& totals) const {
    const int64_t base = outer * r.reduced * r.inner + column;
    if (r.inner == 1) {
      row(s, base + first, base + last);
      return s.finish_row(totals);
    }
    if (n == r.inner && n <= r.inputs.step())
      narrow(s, n, base + first * n, base + last * n);
    else
      wide(s, n, base + first * r.inner, base + last * r.inner);
    s.finish(n, totals);
  }

  // One row, a chunk at a time.
  void row(Worker& s, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step();
    s.start_row();
    for (int64_t at = begin; at < end; at += step) {
      const int64_t m = std::min(step, end - at);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      s.prepare();
      s.row(m);
    }
  }

  // Rows of n without a gap, a chunk at a time.
  void narrow(Worker& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step(), period = lanes_for(n, step), rows = step / period, most = rows * period;
    s.start(period);
    for (int64_t at = begin; at < end; at += most) {
      const int64_t m = std::min(most, end - at);
      s.room(rows);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      s.prepare();
      s.add(m);
    }
  }

  // Rows of n columns, chunk by chunk, each row r.inner from the last.
  void wide(Worker& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step();
    s.start(n);
    for (int64_t row = begin; row < end; row += r.inner) {
      s.room(1);
      for (int64_t c = 0; c < n; c += step) {
        const int64_t m = std::min(step, n - c);
        const int64_t ahead = row + c + kAhead + (c + kAhead < n ? 0 : r.inner - n);
        r.inputs.fetch(row + c, m, ahead, s.buffers, s.chunk);
        s.prepare();
        s.add_at(c, m);
      }
    }
  }

  // Nothing to reduce, but perhaps outputs to write.
  void run_empty() const {
    const States states(fold, kChunk);
    const Totals none = states.from(0);
    for (int64_t i = 0; i < kChunk; ++i) {
      none.value[i] = 0;
      if (none.weight) none.weight[i] = 0;
      if (none.spread) none.spread[i] = 0;
      if (none.count) none.count[i] = 0;
    }
    const int64_t total = r.outer * r.inner;
    for (int64_t at = 0; at < total; at += kChunk) outputs.write(at, std::min(kChunk, total - at), none);
  }
};

}  // namespace safeops::cpu
