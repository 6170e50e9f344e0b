// Reductions of sequences of rows: the driver, and the operands of forward and backward.
//
// A sequence is cut into slices of a fixed number of rows, counted from its own first row, so that the bits of its
// result depend neither on its place nor on other sequences. The input is cut into tasks of that number of rows. A task
// reduces the slices that begin among its rows.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/engine/reduction_driver.h"

namespace safeops::cpu {

using OptionalTensor = std::optional<Tensor>;

// Reads a one-dimensional int64 or int32 tensor.
std::vector<int64_t> read_integers(const char* op, const char* name, const Tensor& t);

// Reads cu_seqlens (S + 1,), the bounds of the sequences: they must go from 0 to `rows` and never decrease.
std::vector<int64_t> read_bounds(const char* op, const Tensor& cu_seqlens, int64_t rows);

// Returns the rows' indices in the order of their sequences; null if the rows are in that order already.
const int64_t* read_order(const char* op, const OptionalTensor& order, int64_t rows);

// Returns the results' shape (S, *rest) for an input of shape (rows, *rest) and S sequences.
inline Shape shape_of_results(const Shape& input, const std::vector<int64_t>& bounds) {
  Shape shape = input;
  shape.size[0] = static_cast<int64_t>(bounds.size()) - 1;
  return shape;
}

template <class C, class Accumulator>
struct SegmentDriver : ReductionDriver<C, Accumulator> {
  using Base = ReductionDriver<C, Accumulator>;
  using Worker = typename Base::Worker;
  using Base::accumulator, Base::kColumns, Base::outputs, Base::r;
  static constexpr int64_t kMinSegment = 128;  // rows in a slice, at least

  const std::vector<int64_t>& bounds;
  const int64_t segments = static_cast<int64_t>(bounds.size()) - 1, columns = r.inner;
  const int64_t width = std::max<int64_t>(1, std::min(columns, kColumns));
  const int64_t slice = std::max(kMinSegment, Base::kSlice / width);  // rows of a slice

  SegmentDriver(const Reduction<C>& reduction, const Accumulator& states, const Outputs& results,
                const std::vector<int64_t>& bounds_)
      : Base{reduction, states, results}, bounds(bounds_) {}

  void run() const {
    if (segments * columns == 0) return;
    std::vector<int64_t> partial_of(segments);  // first partial state of s, if it has several slices
    int64_t slices = 0;
    for (int64_t s = 0; s < segments; ++s) {
      partial_of[s] = slices;
      if (rows_of(s) > slice) slices += slices_of(s);
    }
    const StateBuffer partials(accumulator, slices * columns);
    const auto partial = [&](int64_t s, int64_t k, int64_t column) {
      return partials.from((partial_of[s] + k) * columns + column);
    };

    const int64_t rows = bounds.back(), tasks = rows / slice + 1;
    parallel(tasks, slice * columns, [&](int64_t begin, int64_t end) {
      Worker worker(accumulator, r.inputs);
      Held held(*this);
      const int64_t first = begin * slice, last = end == tasks ? rows + 1 : end * slice;
      int64_t s = std::lower_bound(bounds.begin(), bounds.end() - 1, first) - bounds.begin();
      if (s > 0 && bounds[s] > first) --s;  // later slices of the previous sequence may begin in this task
      for (; s < segments && bounds[s] < last; ++s) {
        int64_t k = std::max<int64_t>(0, (first - bounds[s] + slice - 1) / slice);
        if (rows_of(s) <= slice) {
          if (k == 0 && rows_of(s) > 0 && rows_of(s) * columns <= kChunk) {
            reduce_short(worker, s, held.next(s, 0, columns));
          } else if (k == 0) {
            for_tiles([&](int64_t column, int64_t n) {
              this->reduce(worker, 0, column, n, bounds[s], bounds[s + 1], held.next(s, column, n));
            });
          }
          continue;
        }
        for (; k < slices_of(s) && bounds[s] + k * slice < last; ++k) {
          const int64_t from = bounds[s] + k * slice, to = std::min(from + slice, bounds[s + 1]);
          for_tiles([&](int64_t column, int64_t n) {
            this->reduce(worker, 0, column, n, from, to, partial(s, k, column));
          });
        }
      }
    });

    Held held(*this);
    for (int64_t s = 0; s < segments; ++s) {
      if (rows_of(s) <= slice) continue;
      for_tiles([&](int64_t column, int64_t n) {  // merges slices in this order, whatever the threads did
        const States sum = partial(s, 0, column);
        for (int64_t k = 1; k < slices_of(s); ++k) accumulator.merge(sum, partial(s, k, column), n);
        held.write(s, column, n, sum);
      });
    }
  }

 private:
  int64_t rows_of(int64_t s) const { return bounds[s + 1] - bounds[s]; }
  int64_t slices_of(int64_t s) const { return (rows_of(s) + slice - 1) / slice; }

  // Reduces sequence s, which must fit in a chunk.
  void reduce_short(Worker& worker, int64_t s, const States& states) const {
    const int64_t start = bounds[s] * columns, n = rows_of(s) * columns;
    r.inputs.fetch(start, n, start + kAhead, worker.buffers, worker.chunk);
    worker.prepare();
    this->groups(worker, 1, rows_of(s), columns, states);
  }

  template <class Body>
  void for_tiles(const Body& body) const {
    for (int64_t column = 0; column < columns; column += width) body(column, std::min(width, columns - column));
  }

  // Holds the states of consecutive outputs, so that many are written at a time.
  struct Held {
    const SegmentDriver& driver;
    const int64_t most = std::max(driver.width, std::min(kHeldStates, driver.segments * driver.columns));
    const StateBuffer states{driver.accumulator, most};
    std::vector<int64_t> counts = std::vector<int64_t>(driver.accumulator.has_count ? 0 : most);
    int64_t first = 0, n = 0;

    explicit Held(const SegmentDriver& driver_) : driver(driver_) {}
    ~Held() { flush(); }

    // Returns room for the states of n_more outputs: columns [column, column + n_more) of sequence s.
    States next(int64_t s, int64_t column, int64_t n_more) {
      const int64_t output = s * driver.columns + column;
      if (output != first + n || n + n_more > most) {
        flush();
        first = output;
      }
      if (!counts.empty()) std::fill_n(counts.begin() + n, n_more, driver.rows_of(s));
      n += n_more;
      return states.from(n - n_more);
    }

    void write(int64_t s, int64_t column, int64_t count, States sum) {
      if (!counts.empty()) {
        std::fill_n(counts.begin(), count, driver.rows_of(s));
        sum.count = counts.data();
      }
      driver.outputs.write(s * driver.columns + column, count, sum);
    }

   private:
    void flush() {
      States all = states.from(0);
      if (!counts.empty()) all.count = counts.data();
      if (n) driver.outputs.write(first, n, all);
      n = 0;
    }
  };
};

// ---- operands

// Returns a copy of t with its rows in the order of their sequences. Returns t itself if `order` is null or t is
// broadcast along the rows.
std::optional<Tensor> in_order(const OptionalTensor& t, const Shape& input, const int64_t* order,
                               const OptionalTensor& indices);

// The operands of a segment op's forward, and its results.
struct Segments {
  View x;
  Shape shape, out;
  std::vector<int64_t> bounds;
  Tensor input;
  OptionalTensor mask, weight;
  Tensor value, denominator;

  Segments(const char* op, const Tensor& input, const OptionalTensor& mask, const OptionalTensor& weight,
           const Tensor& cu_seqlens, const OptionalTensor& order);

  // finish: the op's data, which is passed to `results`.
  template <class C, class Accumulator>
  void run(const Accumulator& accumulator, Results results, const void* finish) const {
    Reduction<C> r(shape);
    if (weight) r.input(View(*weight));
    r.input(View(input));
    if (mask) r.mask(View(*mask));
    Outputs outputs(out, results, finish);
    outputs.add(View(value));
    outputs.add(View(denominator));
    SegmentDriver<C, Accumulator>(r, accumulator, outputs, bounds).run();
  }
};

}  // namespace safeops::cpu
