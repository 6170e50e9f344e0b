// The driver of every reduction, over any dims of any layout. It reads the input once.
//
// An output is a row if its elements are consecutive in memory; it is summed in registers. Other outputs are columns,
// which lie side by side. A column has one accumulator, or several if columns are few (fold_of): its elements go to the
// accumulators in turn. An accumulator adds kBlock elements one after the other; then all accumulators of the column
// are merged. So the bits of an output depend neither on its place nor on the number of outputs, except that few
// columns have several accumulators each.
//
// A state is the partial result of one output (States). An Accumulator turns elements into states. The driver decides
// which elements it gets, in which order, on which thread.
//
//     struct Accumulator {
//       bool has_weight, has_second, has_count;           the arrays of States that it uses besides value
//       void merge(const States& into, const States& from, int64_t n) const;
//       static constexpr int64_t kColumns, kBlock;        most accumulators side by side; elements that each adds
//       struct Worker {                                   has one thread's buffers
//         Worker(const Accumulator&, const Inputs<C>&);
//         buffers, chunk;
//         void prepare();                                 called after each fetch of a chunk
//
//         bool rows(g, reduced, States);                  reduces the chunk (g, reduced) to g states; or returns
//                                                         false: the driver then reduces it as columns
//
//         void start_row(); void row(m);                  begins a row; adds the m elements of a chunk to it
//         bool stored_row(inputs, begin, end);            optional: adds a row in its stored dtype, or returns false
//         void finish_row(States);                        writes the row's state
//
//         void start_columns(n);                          begins n accumulators side by side
//         void transpose(g, n);                           transposes the chunk from (g, n) to (n, g)
//         void add(at, m, first, period);                 adds elements [at, at + m) of the chunk: element at + i
//                                                         to accumulator first + i % period
//         States finish_columns(m);                       the accumulators' states, after m elements; valid until the
//                                                         next start
//       };
//     };
#pragma once

#include <memory>

#include "cpu/engine/column_sums.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/reduction.h"
#include "cpu/engine/row_sums.h"
#include "cpu/engine/transpose.h"

namespace safeops::cpu {

constexpr int kMaxResults = 3;
constexpr int64_t kHeldStates = 4096;  // states that a thread holds before it writes results

// The states of several outputs, one array entry each. For a sum: value is the sum of the kept values, weight the sum
// of their weights, count their number. Other accumulators document their use of the arrays. An array that is not used
// is null.
struct States {
  double* value;
  double* weight;
  double* second;  // a second sum, such as a variance's sum of squared deviations
  int64_t* count;

  States from(int64_t i) const {
    const auto at = [i](auto* all) { return all ? all + i : nullptr; };
    return {at(value), at(weight), at(second), at(count)};
  }

  // Calls body(source, target) for each array that exists both in these states and in `to`.
  template <class Body>
  void for_pairs(const States& to, const Body& body) const {
    body(value, to.value);
    if (weight && to.weight) body(weight, to.weight);
    if (second && to.second) body(second, to.second);
    if (count && to.count) body(count, to.count);
  }
};

// Memory for n states.
struct StateBuffer {
  std::unique_ptr<double[]> value, weight, second;
  std::unique_ptr<int64_t[]> count;

  template <class Accumulator>
  StateBuffer(const Accumulator& accumulator, int64_t n) {
    if (n == 0) return;
    value.reset(new double[n]);
    if (accumulator.has_weight) weight.reset(new double[n]);
    if (accumulator.has_second) second.reset(new double[n]);
    if (accumulator.has_count) count.reset(new int64_t[n]);
  }

  States from(int64_t i) const { return States{value.get(), weight.get(), second.get(), count.get()}.from(i); }
};

// Turns the states of n outputs, each of `reduced` elements, into results. `finish` is the op's data. `unscale`: the
// factor by which each output's elements were multiplied before they were accumulated; or null.
using Results = void (*)(const void* finish, int64_t reduced, const States& states, int64_t n, const double* unscale,
                         double* const* results);

// The last step: writes the results of states to output tensors of any layout.
struct Outputs {
  Results results;
  const void* finish;
  int64_t reduced;
  Shape full;   // the outputs' shape with size-1 reduced dims
  Order order;  // of the output dims, in the sequence of the input's walk
  int count = 0;
  bool scaled = false;
  Sink<double> sink[kMaxResults];
  Source<double> unscale;

  template <class C>
  Outputs(const Reduction<C>& r, Results results_, const void* finish_)
      : results(results_),
        finish(finish_),
        reduced(r.reduced),
        full(r.dims.output(r.shape, true)),
        order(r.output_order) {}

  // Contiguous outputs of any shape. `reduced` is not used (0), since each state holds its number of elements.
  Outputs(const Shape& shape, Results results_, const void* finish_)
      : results(results_), finish(finish_), reduced(0), full(shape), order(Order::contiguous(shape)) {}

  void add(const View& output) { sink[count++].bind(output, full, order); }
  void add(const Unreduced& output) { add(output.view); }
  void add_unscale(const Unreduced& output) {
    unscale.bind(output.view, full, order);
    scaled = true;
  }

  // Writes the results of outputs [start, start + n) in the order of the walk.
  void write(int64_t start, int64_t n, const States& states) const {
    double buffers[kMaxResults][kChunk], divisors[kChunk];
    double* target[kMaxResults];
    if (scaled) unscale.prime(divisors);
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t at = start + done, m = std::min(kChunk, n - done);
      for (int i = 0; i < count; ++i) target[i] = sink[i].target(at, buffers[i]);
      const double* divided = scaled ? unscale.fetch(at, m, at + kAhead, divisors) : nullptr;
      results(finish, reduced, states.from(done), m, divided, target);
      for (int i = 0; i < count; ++i) sink[i].commit(at, m, buffers[i]);
    }
  }
};

template <class Worker, class = void>
constexpr bool has_stored_row = false;
template <class Worker>
constexpr bool has_stored_row<Worker, std::void_t<decltype(&Worker::stored_row)>> = true;

template <class C, class Accumulator, class Writer = Outputs>
struct ReductionDriver {
  // Long rows and columns are cut into slices for several threads: at most kMaxSlices slices, each of at least kSlice
  // elements (rows) or kMinRows rows (columns).
  static constexpr int64_t kSlice = 32768;  // elements of a row
  static constexpr int64_t kMinRows = kChunk / 4 + 1;  // rows of columns: run_short's kChunk / 2 rows are not cut
  static constexpr int64_t kMaxSlices = 256;
  static constexpr int64_t kColumns = Accumulator::kColumns, kBlock = Accumulator::kBlock;
  static constexpr int64_t kFewColumns = 64;
  static constexpr int64_t kNarrowTile = 512;  // columns; while tasks are too few, wider tiles are halved
  static constexpr int64_t kEnoughTasks = 4;

  struct Worker : Accumulator::Worker {
    StateBuffer scratch;

    Worker(const Accumulator& accumulator, const Inputs<C>& inputs)
        : Accumulator::Worker(accumulator, inputs), scratch(accumulator, kChunk) {}
  };

  const Reduction<C>& r;
  const Accumulator& accumulator;
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

 protected:
  // For inputs whose reduced * inner elements of one outer index fit in a chunk. A task is one chunk, which holds as
  // many outer indices as fit.
  void run_short() const {
    const int64_t each = r.reduced * r.inner, most = r.inputs.step() / each;
    const int64_t groups = most >= 4 ? most / 4 * 4 : std::max<int64_t>(1, most);  // transposed in fours
    parallel((r.outer + groups - 1) / groups, kChunk, [&](int64_t begin, int64_t end) {
      Worker s(accumulator, r.inputs);
      const StateBuffer held_states(accumulator, std::min(kHeldStates, r.outer * r.inner));
      int64_t held = 0;  // states not yet written: writing a few at a time would cost more than summing them
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task * groups, g = std::min(groups, r.outer - first);
        r.inputs.fetch(first * each, g * each, first * each + kAhead, s.buffers, s.chunk);
        s.prepare();
        this->groups(s, g, r.reduced, r.inner, held_states.from(held));
        held += g * r.inner;
        if (task + 1 < end && held + kChunk <= kHeldStates) continue;
        outputs.write((first + g) * r.inner - held, held, held_states.from(0));
        held = 0;
      }
    });
  }

  // A task is one outer index, one tile of the inner columns and one slice of the reduced elements.
  void run_long() const {
    const int64_t slices = std::clamp<int64_t>(r.reduced / (r.inner == 1 ? kSlice : kMinRows), 1, kMaxSlices);
    const int64_t step = (r.reduced + slices - 1) / slices;
    int64_t width = std::min(r.inner, kColumns);
    while (width > kNarrowTile && r.outer * slices * (r.inner / width) < kEnoughTasks) width = (width + 1) / 2;
    const int64_t tiles = (r.inner + width - 1) / width, tasks = r.outer * tiles * slices;
    const bool partial = slices > 1;
    const StateBuffer partials(accumulator, partial ? tasks * width : 0);

    parallel(tasks, step * width, [&](int64_t begin, int64_t end) {
      Worker s(accumulator, r.inputs);
      const StateBuffer held_states(accumulator, partial ? 0 : std::min(kHeldStates, r.outer * r.inner));
      int64_t held = 0;
      for (int64_t task = begin; task < end; ++task) {
        const bool rows = slices * tiles == 1;  // many short rows have no time for the divisions below
        const int64_t slice = rows ? 0 : task % slices;
        const int64_t tile = rows ? 0 : task / slices % tiles;
        const int64_t outer = rows ? task : task / slices / tiles;
        const int64_t column = tile * width, n = std::min(width, r.inner - column);
        const int64_t first = std::min(slice * step, r.reduced), last = std::min(first + step, r.reduced);
        reduce(s, outer, column, n, first, last, partial ? partials.from(task * width) : held_states.from(held));
        held += n;
        if (partial || (task + 1 < end && held + width <= kHeldStates)) continue;
        outputs.write(outer * r.inner + column + n - held, held, held_states.from(0));
        held = 0;
      }
    });

    if (!partial) return;
    parallel(r.outer * tiles, slices * width, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t column = task % tiles * width, n = std::min(width, r.inner - column);
        const States sum = partials.from(task * slices * width);
        for (int64_t k = 1; k < slices; ++k) accumulator.merge(sum, partials.from((task * slices + k) * width), n);
        outputs.write(task / tiles * r.inner + column, n, sum);
      }
    });
  }

  // Reduces columns [column, column + n) of the reduced rows [first, last) to states[0, n).
  void reduce(Worker& s, int64_t outer, int64_t column, int64_t n, int64_t first, int64_t last,
              const States& states) const {
    const int64_t begin = (outer * r.reduced + first) * r.inner + column, rows = last - first;
    if (r.inner > 1) return tall(s, n, begin, rows, states);
    row(s, begin, begin + rows);
    s.finish_row(states);
  }

  // Adds elements [begin, end), one row: all at once if the worker can read their stored dtype, else a chunk at a time.
  void row(Worker& s, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step();
    s.start_row();
    if constexpr (has_stored_row<Worker>)
      if (s.stored_row(r.inputs, begin, end)) return;
    for (int64_t at = begin; at < end; at += step) {
      const int64_t m = std::min(step, end - at);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      s.prepare();
      s.row(m);
    }
  }

  // Reduces columns: `rows` rows of n elements, which start r.inner elements apart. Writes states[0, n).
  void tall(Worker& s, int64_t n, int64_t begin, int64_t rows, const States& states) const {
    if (rows == 0) {  // a slice without rows
      s.start_columns(n);
      return collect(s, true, n, n, 0, states);
    }
    const int64_t fold = fold_of(rows, r.inner), period = n * fold, block = kBlock * fold;
    const int64_t step = std::max(period <= kChunk ? period : 0, r.inputs.step());
    if (n == r.inner && block * n <= step) {  // the chunk holds several blocks
      const int64_t most = step / (block * n) * block * n;
      for (int64_t at = 0; at < rows * n; at += most) {
        const int64_t m = std::min(most, rows * n - at);
        r.inputs.fetch(begin + at, m, begin + at + kAhead, s.buffers, s.chunk);
        s.prepare();
        blocks(s, at == 0, 0, m, n, fold, states);
      }
      return;
    }
    const int64_t together = n == r.inner ? step / period * fold : 0;  // rows per chunk; 0: there are gaps between rows
    for (int64_t top = 0; top < rows; top += block) {
      const int64_t last = std::min(rows, top + block);
      s.start_columns(period);
      for (int64_t row = top; row < last; row += std::max<int64_t>(1, together)) {
        const int64_t m = together ? std::min(together, last - row) * n : n, at = begin + row * r.inner;
        for (int64_t c = 0; c < m; c += step) {
          const int64_t ahead = c + kAhead, piece = std::min(step, m - c);
          r.inputs.fetch(at + c, piece, at + ahead / n * r.inner + ahead % n, s.buffers, s.chunk);
          s.prepare();
          s.add(0, piece, c, together ? period : piece);
        }
      }
      collect(s, top == 0, n, period, (last - top) * n, states);
    }
  }

  // Reduces a whole chunk (g, reduced, inner) to states (g, inner).
  void groups(Worker& s, int64_t g, int64_t reduced, int64_t inner, const States& states) const {
    if (inner == 1 && s.rows(g, reduced, states)) return;
    // Many groups of short columns are transposed, so that all columns lie side by side: (g, reduced, inner) becomes
    // (reduced, inner, g).
    const bool transposed = g >= 4 && reduced < kShortRow;
    if (transposed) s.transpose(g, reduced * inner);
    const int64_t n = transposed ? g * inner : inner, m = reduced * n;
    const States out = transposed && inner > 1 ? s.scratch.from(0) : states;
    for (int64_t k = 0; k * n < g * inner; ++k) blocks(s, true, k * m, m, n, fold_of(reduced, inner), out.from(k * n));
    if (transposed && inner > 1)
      out.for_pairs(states, [&](const auto* from, auto* to) { transpose(from, inner, g, to); });
  }

  // Reduces elements [at, at + m) of the chunk, which form rows of n columns, to states[0, n), a block at a time.
  // first: the first block is copied to states instead of merged.
  void blocks(Worker& s, bool first, int64_t at, int64_t m, int64_t n, int64_t fold, const States& states) const {
    const int64_t period = fold * n, most = kBlock * period;
    for (int64_t done = 0; done < m; done += most, first = false) {
      const int64_t block = std::min(most, m - done);
      s.start_columns(period);
      s.add(at + done, block, 0, period);
      collect(s, first, n, period, block, states);
    }
  }

  // Returns the number of accumulators of an output. A row shorter than a chunk has one for each 16 elements, so that
  // the accumulators of a chunk's rows fill the registers. A long column has several if columns are few.
  static int64_t fold_of(int64_t reduced, int64_t inner) {
    if (inner == 1) return (reduced + 15) / 16;
    return inner >= kFewColumns || reduced < kShortRow ? 1 : reduced < 4 * kShortRow ? 4 : 16;
  }

  // Ends a block of m elements: merges the accumulators of each output, then merges the result into `states`. first:
  // copies it instead.
  void collect(Worker& s, bool first, int64_t n, int64_t period, int64_t m, const States& states) const {
    const States block = s.finish_columns(m);
    for (int64_t p = n; p < period; p += n) accumulator.merge(block, block.from(p), n);
    if (first)
      block.for_pairs(states, [&](const auto* from, auto* to) { std::copy_n(from, n, to); });
    else
      accumulator.merge(states, block, n);
  }

  // Outputs of no elements: all their states are 0.
  void run_empty() const {
    const StateBuffer zeros(accumulator, kChunk);
    const States none = zeros.from(0);
    for (int64_t i = 0; i < kChunk; ++i) {
      none.value[i] = 0;
      if (none.weight) none.weight[i] = 0;
      if (none.second) none.second[i] = 0;
      if (none.count) none.count[i] = 0;
    }
    const int64_t total = r.outer * r.inner;
    for (int64_t at = 0; at < total; at += kChunk) outputs.write(at, std::min(kChunk, total - at), none);
  }
};

}  // namespace safeops::cpu
