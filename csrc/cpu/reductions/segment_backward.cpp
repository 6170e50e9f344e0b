// The gradients of segment_sum, segment_mean and segment_max:
//     sum, mean:  dx = keep ? (grad / denominator) w : 0, without the denominator for a sum
//     max:        dx = keep && x == extreme ? grad / denominator : 0
// I/O: read mask, weight, and x for max; write dx. grad, denominator and extreme have one row for each sequence.
#include <memory>

#include "cpu/engine/weighted_sum.h"
#include "cpu/reductions/segments.h"

namespace safeops::cpu {

namespace {

// in: c = grad / denominator, [weight], and for max: x, extreme;  out: dx
template <class C, bool kExtreme, bool kMask, bool kWeight>
void gradient_loop(const void*, const Chunk<C>& chunk) {
  const C *c = chunk.in[0], *w = chunk.in[1], *x = chunk.in[1 + kWeight], *extreme = chunk.in[2 + kWeight];
  const uint8_t* mask = chunk.mask;
  C* dx = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    C slope = c[i];
    bool keep = is_kept<C, kMask, kWeight>(mask, w, i);
    if constexpr (kExtreme)
      keep = keep & ((x[i] == extreme[i]) | ((x[i] != x[i]) & (extreme[i] != extreme[i])));
    else if constexpr (kWeight)
      slope *= w[i];
    dx[i] = select_or_zero(keep, slope);
  }
}

template <class C, bool kExtreme>
Loop<C> pick_gradient(bool mask, bool weight) {
  if (mask)
    return weight ? pick<&gradient_loop<C, kExtreme, true, true>>() : pick<&gradient_loop<C, kExtreme, true, false>>();
  return weight ? pick<&gradient_loop<C, kExtreme, false, true>>() : pick<&gradient_loop<C, kExtreme, false, false>>();
}

// in: grad, denominator, [extreme];  out: grad / denominator, [extreme]. Each has one entry per column of each
// sequence.
template <class C>
void of_sequences_loop(const void*, const Chunk<C>& chunk) {
  const C *g = chunk.in[0], *by = chunk.in[1], *extreme = chunk.in[2];
  C *c = chunk.out[0], *at = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) c[i] = g[i] / by[i];
  if (!at) return;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) at[i] = extreme[i];
}

// Contiguous memory of the results' shape (sequences, *rest), with a view of it.
template <class C>
struct OfSequences {
  std::unique_ptr<C[]> values;
  int64_t strides[kMaxDims];
  View view;

  explicit OfSequences(const Shape& shape)
      : values(new C[std::max<int64_t>(1, shape.numel())]), view(values.get(), dtype_v<C>) {
    contiguous_strides(shape, strides);
    view.ndim = shape.ndim;
    view.sizes = shape.size;
    view.strides = strides;
  }
};

// Finds the sequence s that a row belongs to; rows must come in increasing order.
struct Cursor {
  const std::vector<int64_t>& bounds;
  const int64_t* sequences;  // the sequence of each row; null: `bounds` gives it
  int64_t s;

  Cursor(const std::vector<int64_t>& bounds_, const int64_t* sequences_, int64_t row)
      : bounds(bounds_), sequences(sequences_) {
    s = std::upper_bound(bounds.begin(), bounds.end(), row) - bounds.begin() - 1;
  }

  // Sets s to the sequence of `row`. Returns the next row that belongs to another sequence, at most `last`.
  int64_t end_of_run(int64_t row, int64_t last) {
    int64_t end = row + 1;
    if (sequences) {
      s = sequences[row];
      while (end < last && sequences[end] == s) ++end;
      return end;
    }
    while (bounds[s + 1] <= row) ++s;
    return std::min(bounds[s + 1], last);
  }
};

// Repeats values of sequences for the rows of a chunk: each row gets the values of its own sequence.
template <class C>
struct Spread {
  const C* values;  // one row per sequence, (S, columns)
  int64_t columns;
  int64_t sequence = -1, first = -1, filled = 0;  // the buffer's only sequence or -1, its first column, its size
  alignas(64) C buffer[kBuffer];

  const C* fetch(Cursor at, int64_t row, int64_t rows, int64_t column, int64_t width) {
    const int64_t last = row + rows, n = rows * width;
    int64_t end = at.end_of_run(row, last);
    const bool alone = end == last;
    if (rows == 1) return values + at.s * columns + column;
    if (alone && at.s == sequence && column == first && n <= filled) return buffer;
    sequence = alone ? at.s : -1, first = column, filled = n;
    C* to = buffer;
    for (; row < last; end = row < last ? at.end_of_run(row, last) : row) {
      const C* from = values + at.s * columns + column;
      if (width == 1) {
        to = std::fill_n(to, end - row, *from);
        row = end;
      }
      for (; row < end; ++row) to = std::copy_n(from, width, to);
    }
    return buffer;
  }
};

struct Backward {
  const Tensor& grad;
  const OptionalTensor &denominator, &input, &extreme, &mask, &weight;
  Shape shape, results;
  const std::vector<int64_t>& bounds;
  const std::vector<int64_t>& ids;  // the sequence of each row; empty: `bounds` gives it

  template <class C>
  void run(const View& dx) const {
    const int64_t rows = shape.size[0], columns = results.numel() / results.size[0];
    const OfSequences<C> slopes(results), extremes(results);
    C one = 1;
    Elementwise<C> prepare(results, slopes.view);
    prepare.input(View(grad));
    prepare.input(denominator ? View(*denominator) : View(&one, dtype_v<C>));
    if (extreme) prepare.input(View(*extreme));
    prepare.output(slopes.view);
    prepare.output(extremes.view, extreme.has_value());
    prepare.run(pick<&of_sequences_loop<C>>(), nullptr);

    Inputs<C> inputs;
    const Order walk = Order::contiguous(shape);
    if (weight) inputs.add(View(*weight), shape, walk);
    if (extreme) inputs.add(View(*input), shape, walk);
    if (mask) inputs.add_mask(View(*mask), shape, walk);
    Sink<C> sink;
    sink.bind(dx, shape, walk);
    const Loop<C> loop = extreme ? pick_gradient<C, true>(mask.has_value(), weight.has_value())
                                 : pick_gradient<C, false>(mask.has_value(), weight.has_value());

    // A chunk has as many whole rows as fit, or a part of one row.
    const int64_t width = std::min(columns, kChunk), height = kChunk / width;
    parallel((rows + height - 1) / height, height * columns, [&](int64_t begin, int64_t end) {
      typename Inputs<C>::Buffers buffers;
      Spread<C> slope{slopes.values.get(), columns}, at{extremes.values.get(), columns};
      alignas(64) C out[kBuffer];
      Chunk<C> chunk;
      inputs.prime(buffers);
      const int64_t last = std::min(end * height, rows);
      Cursor cursor(bounds, ids.empty() ? nullptr : ids.data(), begin * height);
      for (int64_t row = begin * height; row < last; row += height) {
        const int64_t many = std::min(height, last - row);
        cursor.end_of_run(row, last);
        for (int64_t column = 0; column < columns; column += width) {
          const int64_t across = std::min(width, columns - column), n = many * across;
          const int64_t start = row * columns + column;
          inputs.fetch(start, n, start + kAhead, buffers, chunk);
          for (int i = inputs.count; i > 0; --i) chunk.in[i] = chunk.in[i - 1];
          chunk.in[0] = slope.fetch(cursor, row, many, column, across);
          if (extreme) chunk.in[1 + inputs.count] = at.fetch(cursor, row, many, column, across);
          chunk.out[0] = sink.target(start, out);
          loop(nullptr, chunk);
          sink.commit(start, n, out);
        }
      }
    });
  }
};

Tensor segment_backward(const Tensor& grad, const std::vector<int64_t>& size, ScalarType dtype,
                        const OptionalTensor& denominator, const OptionalTensor& input, const OptionalTensor& extreme,
                        const OptionalTensor& mask, const OptionalTensor& weight, const Tensor& cu_seqlens,
                        const OptionalTensor& segment_ids) {
  constexpr auto op = "_segment_backward";
  const Shape shape(static_cast<int>(size.size()), size.data());
  STD_TORCH_CHECK(shape.ndim, op, ": there must be a first dim of rows");
  const std::vector<int64_t> bounds = read_bounds(op, cu_seqlens, shape.size[0]);
  const DType type = floating(dtype);
  const Tensor dx = new_output(shape, type, grad);
  if (shape.numel() == 0) return dx;
  STD_TORCH_CHECK(input.has_value() == extreme.has_value(), op, ": input and extreme belong together");
  const Shape results = shape_of_results(shape, bounds);
  std::vector<int64_t> ids;
  if (segment_ids) ids = read_integers(op, "segment_ids", *segment_ids);
  const auto outside = [&](int64_t id) { return id < 0 || id >= results.size[0]; };
  STD_TORCH_CHECK(!segment_ids || (static_cast<int64_t>(ids.size()) == shape.size[0] &&
                                   std::none_of(ids.begin(), ids.end(), outside)),
                  op, ": segment_ids must have an id from 0 to num_segments - 1 for each row");
  const Backward work{grad, denominator, input, extreme, mask, weight, shape, results, bounds, ids};
  // With a weight, runs in double: the product of the weight and a slope outside fp32's range may lie within the range.
  if (type == DType::kDouble || dtype_of(grad) == DType::kDouble || weight)
    work.run<double>(View(dx));
  else
    work.run<float>(View(dx));
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_segment_backward", TORCH_BOX(&segment_backward)); }

}  // namespace safeops::cpu
