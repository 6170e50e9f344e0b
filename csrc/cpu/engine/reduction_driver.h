// The driver of every reduction: any dims of any layout, one read, a partition that depends on the sizes alone.
//
// An Accumulator has three ways to turn elements into the state of an output (States); the driver decides which
// elements, in which order, on which thread.
//
//     struct Accumulator {
//       bool has_weight, has_second, has_count;           the arrays of States that it uses besides value
//       void merge(const States& into, const States& from, int64_t n) const;
//       static constexpr int64_t kColumns;                columns at most that it takes in one go
//       struct Worker {                                   one thread's buffers
//         Worker(const Accumulator&, const Inputs<C>&);
//         buffers, chunk;
//         void prepare();                                 called when a chunk has been fetched
//
//         void groups(g, reduced, inner, States);         whole outputs: (g, reduced, inner) -> (g, inner), one chunk
//
//         void start_row(); void row(m);                  one output, a chunk of m elements at a time
//         bool stored_row(inputs, begin, end);            or all of it as it is stored, where that is possible
//         void finish_row(States);
//
//         void start_columns(period);                     outputs side by side: `period` accumulators, and
//         void reserve(additions);                        before a chunk how often it will add to each,
//         void add(m);                                    a chunk of whole periods, or
//         void add_at(first, m);                          m elements for the accumulators from `first` on
//         void finish_columns(n, States);                 accumulator p belongs to output p % n
//       };
//     };
#pragma once

#include <memory>

#include "cpu/engine/column_sums.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/reduction.h"

namespace safeops::cpu {

constexpr int kMaxResults = 3;
constexpr int64_t kHeldStates = 4096;  // states that a thread holds before it writes results

// The states of outputs, one entry each. For a sum: the sum of the kept values, the sum of their weights, and their
// number. Other accumulators document their use of the arrays. An array that is not used is null.
struct States {
  double* value;
  double* weight;
  double* second;  // as a variance's squared deviations, logsumexp's sum
  int64_t* count;

  States from(int64_t i) const {
    const auto at = [i](auto* all) { return all ? all + i : nullptr; };
    return {at(value), at(weight), at(second), at(count)};
  }
};

// The memory of n states.
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

// States of n outputs, each of `reduced` elements -> results. `finish` is the op's data. `unscale`: the factors by
// which each output's elements were multiplied before they were accumulated, or null.
using Results = void (*)(const void* finish, int64_t reduced, const States& states, int64_t n, const double* unscale,
                         double* const* results);

// The last step: states -> results, in any layout.
struct Outputs {
  Results results;
  const void* finish;
  int64_t reduced;
  Shape full;   // the outputs' shape with size-1 reduced dims
  Order order;  // of the outputs: that of their elements in the input
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

  // Contiguous outputs of their own shape, whose states know how many elements each is made of.
  Outputs(const Shape& shape, Results results_, const void* finish_)
      : results(results_), finish(finish_), reduced(0), full(shape), order(Order::contiguous(shape)) {}

  void add(const View& output) { sink[count++].bind(output, full, order); }
  void add(const Unreduced& output) { add(output.view); }
  void add_unscale(const Unreduced& output) {
    unscale.bind(output.view, full, order);
    scaled = true;
  }

  // Writes the results of outputs [start, start + n) of the walk.
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
  using Worker = typename Accumulator::Worker;

  // A long reduction with few outputs is cut into slices of at least kSlice elements, into about kMaxTasks tasks at
  // most.
  static constexpr int64_t kSlice = 32768;
  static constexpr int64_t kMaxTasks = 256;
  static constexpr int64_t kMinRows = 128;  // in a slice of columns, whose partial states take 16 bytes a column
  static constexpr int64_t kColumns = Accumulator::kColumns;

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
  // All elements of an output fit in a chunk: a task is a chunk of as many outer indices as it holds.
  void run_short() const {
    const int64_t each = r.reduced * r.inner, groups = std::max<int64_t>(1, r.inputs.step() / each);
    parallel((r.outer + groups - 1) / groups, kChunk, [&](int64_t begin, int64_t end) {
      Worker s(accumulator, r.inputs);
      const StateBuffer held_states(accumulator, std::min(kHeldStates, r.outer * r.inner));
      int64_t held = 0;  // states not yet written: writing a few at a time would cost more than summing them
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task * groups, g = std::min(groups, r.outer - first);
        r.inputs.fetch(first * each, g * each, first * each + kAhead, s.buffers, s.chunk);
        s.prepare();
        s.groups(g, r.reduced, r.inner, held_states.from(held));
        held += g * r.inner;
        if (task + 1 < end && held + kChunk <= kHeldStates) continue;
        outputs.write((first + g) * r.inner - held, held, held_states.from(0));
        held = 0;
      }
    });
  }

  // A task is one outer index, one tile of at most kColumns inner columns, and one slice of the reduced walk.
  void run_long() const {
    const int64_t width = std::min(r.inner, kColumns), tiles = (r.inner + kColumns - 1) / kColumns;
    const int64_t spare = std::max<int64_t>(1, kMaxTasks / (r.outer * tiles));
    const int64_t slices = std::clamp<int64_t>(std::min(r.reduced * width / kSlice, r.reduced / kMinRows), 1, spare);
    const int64_t step = (r.reduced + slices - 1) / slices, tasks = r.outer * tiles * slices;
    const bool partial = slices > 1;
    const StateBuffer partials(accumulator, partial ? tasks * width : 0);

    parallel(tasks, step * width, [&](int64_t begin, int64_t end) {
      Worker s(accumulator, r.inputs);
      const StateBuffer held_states(accumulator, partial ? 0 : std::min(kHeldStates, r.outer * r.inner));
      int64_t held = 0;
      for (int64_t task = begin; task < end; ++task) {
        const bool rows = slices * tiles == 1;  // perhaps many short ones, for which the divisions would take long
        const int64_t slice = rows ? 0 : task % slices;
        const int64_t tile = rows ? 0 : task / slices % tiles;
        const int64_t outer = rows ? task : task / slices / tiles;
        const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
        const int64_t first = std::min(slice * step, r.reduced), last = std::min(first + step, r.reduced);
        reduce(s, outer, column, n, first, last, partial ? partials.from(task * width) : held_states.from(held));
        held += n;
        if (partial || (task + 1 < end && held + width <= kHeldStates)) continue;
        outputs.write(outer * r.inner + column + n - held, held, held_states.from(0));
        held = 0;
      }
    });

    for (int64_t task = 0; partial && task < tasks; task += slices) {  // in this order, whatever the threads did
      const int64_t tile = task / slices % tiles, outer = task / slices / tiles;
      const int64_t column = tile * kColumns, n = std::min(kColumns, r.inner - column);
      const States sum = partials.from(task * width);
      for (int64_t k = 1; k < slices; ++k) accumulator.merge(sum, partials.from((task + k) * width), n);
      outputs.write(outer * r.inner + column, n, sum);
    }
  }

  // Columns [column, column + n) of the reduced rows [first, last) -> states[0, n).
  void reduce(Worker& s, int64_t outer, int64_t column, int64_t n, int64_t first, int64_t last,
              const States& states) const {
    const int64_t base = outer * r.reduced * r.inner + column;
    if (r.inner == 1) {
      row(s, base + first, base + last);
      return s.finish_row(states);
    }
    if (n == r.inner && n <= r.inputs.step())
      narrow(s, n, base + first * n, base + last * n);
    else
      wide(s, n, base + first * r.inner, base + last * r.inner);
    s.finish_columns(n, states);
  }

  // One row, all at once or a chunk at a time.
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

  // Rows of n columns without a gap between rows, a chunk at a time.
  void narrow(Worker& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step(), period = period_for(n, step), rows = step / period, most = rows * period;
    s.start_columns(period);
    for (int64_t at = begin; at < end; at += most) {
      const int64_t m = std::min(most, end - at);
      s.reserve(rows);
      r.inputs.fetch(at, m, at + kAhead, s.buffers, s.chunk);
      s.prepare();
      s.add(m);
    }
  }

  // Rows of n columns, chunk by chunk; rows start r.inner elements apart.
  void wide(Worker& s, int64_t n, int64_t begin, int64_t end) const {
    const int64_t step = r.inputs.step();
    s.start_columns(n);
    for (int64_t row = begin; row < end; row += r.inner) {
      s.reserve(1);
      for (int64_t c = 0; c < n; c += step) {
        const int64_t m = std::min(step, n - c);
        const int64_t ahead = row + c + kAhead + (c + kAhead < n ? 0 : r.inner - n);
        r.inputs.fetch(row + c, m, ahead, s.buffers, s.chunk);
        s.prepare();
        s.add_at(c, m);
      }
    }
  }

  // There is nothing to reduce, but there may be outputs to write.
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
