// loss = w_y/C sum max(margin - x_y + x_j, 0)^p over the classes j != y of a row with class y; and its gradient.
// I/O: forward reads x and the classes, backward reads them and writes dx.
#include <memory>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/row_sums.h"
#include "cpu/classification/classification.h"

namespace safeops::cpu {

namespace {

// ---- Loops over the classes of several rows. d = base + x, where base = margin - x_y is repeated for each class.

// values = max(d, 0)^p, with p = 2 if kSquare, else 1.
template <class C, bool kSquare>
void values_loop(const C* base, const C* x, int64_t n, C* values) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C d = base[i] + x[i], kept = d <= 0 ? C(0) : d;  // NaN stays
    values[i] = kSquare ? kept * kept : kept;
  }
}

// slopes = p max(d, 0)^(p - 1), with p = 2 if kSquare, else 1.
template <class C, bool kSquare>
void slopes_loop(const C* base, const C* x, int64_t n, C* slopes) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C d = base[i] + x[i];
    slopes[i] = d <= 0 ? C(0) : kSquare ? 2 * d : C(1);
  }
}

// Multiplies slopes by g. A slope of 0 gives 0, even for an infinite g.
template <class C>
void scale_loop(const C* g, int64_t n, C* slopes) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) slopes[i] = slopes[i] == 0 ? C(0) : g[i] * slopes[i];
}

// Repeats the value of each row n times. It writes full blocks, so the last block may end after the last row.
template <class C>
void spread_loop(const C* row_values, int64_t rows, int64_t n, C* to) {
  constexpr int64_t kBlock = 16;
  for (int64_t r = 0; r < rows; ++r, to += n) {
    for (int64_t i = 0; i < n; i += kBlock) {
      SAFEOPS_SIMD
      for (int64_t k = 0; k < kBlock; ++k) to[i + k] = row_values[r];
    }
  }
}

// ---- the rows

// Rows (..., C), in contiguous order: several short rows are read at once, a long row in pieces.
template <class C>
struct Rows {
  ClassRows of;  // class_index is -1 for a row whose class has weight 0
  Shape shape;
  Order order;
  int64_t classes, rows, batch;  // batch: rows that are read at once
  C margin;
  Source<C> x;

  // keep: receives 1 for each row that a mean counts, else 0. If it is null, a class out of range is not an error.
  Rows(const char* op, const View& x_, const Tensor& target, const std::optional<Tensor>& weight,
       const std::optional<Tensor>& mask, double margin_, uint8_t* keep)
      : of(op, x_, x_.ndim - 1), shape(x_.shape()), order(Order::contiguous(shape)), margin(static_cast<C>(margin_)) {
    classes = of.classes, rows = of.count;
    batch = std::max<int64_t>(1, kChunk / std::max<int64_t>(classes, 1));
    of.read(op, &target, mask, INT64_MIN, keep && classes > 0, keep);
    if (weight) {
      of.read_weights(op, *weight);
      of.weight.reset(new double[std::max<int64_t>(1, rows)]);
      for (int64_t row = 0; row < rows; ++row) {
        of.weight[row] = class_index(row) < 0 ? 0 : of.weights[class_index(row)];
        if (of.weight[row] == 0) of.class_index[row] = -1;
      }
    }
    x.bind(x_, shape, order);
  }

  int64_t class_index(int64_t row) const { return static_cast<int64_t>(of.class_index[row]); }

  // Returns w_y/C times a sum over the classes of a row.
  double scaled(int64_t row, double sum) const {
    const double mean = sum / static_cast<double>(std::max<int64_t>(classes, 1));
    return of.weight ? mean * of.weight[row] : mean;
  }

  struct Buffers { alignas(64) C x[kBuffer], to[kBuffer], spread[kBuffer], target[kBuffer], per_row[kChunk]; };

  // Calls body(first row, number of rows, buffers) for each batch.
  template <class Body>
  void run(const Body& body) const {
    parallel((rows + batch - 1) / batch, batch * classes, [&](int64_t begin, int64_t end) {
      const auto buffers = std::make_unique<Buffers>();
      x.prime(buffers->x), x.prime(buffers->target);
      for (int64_t task = begin; task < end; ++task)
        body(task * batch, std::min(batch, rows - task * batch), *buffers);
    });
  }

  // For each piece of `count` rows: (1) calls loop(), which fills buffers.to; (2) sets buffers.to to 0 at each row's
  // target class and in rows that are not kept; (3) calls body(first class, classes in the piece, offset in the walk,
  // row sums).
  template <class Loop, class Body>
  void for_pieces(int64_t row, int64_t count, Buffers& b, Loop loop, const Body& body) const {
    const auto spread = pick<&spread_loop<C>>();
    const auto sum = pick<&rows_loop<C, double>>();
    double sums[kChunk];
    for (int64_t first = 0; first < classes; first += kChunk) {
      const int64_t n = std::min(kChunk, classes - first), at = row * classes + first;
      const C* from = x.fetch(at, count * n, at + kAhead, b.x);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t class_index = std::max<int64_t>(0, this->class_index(row + r));
        const bool one_piece = classes == n;
        b.per_row[r] =
            margin -
            (one_piece ? from[r * n + class_index] : *x.fetch(row * classes + class_index, 1, kNever, b.target));
      }
      spread(b.per_row, count, n, b.spread);
      loop(b.spread, from, count * n, b.to);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t class_index = this->class_index(row + r) - first;
        if (this->class_index(row + r) < 0)
          std::fill_n(b.to + r * n, n, C(0));
        else if (class_index >= 0 && class_index < n)
          b.to[r * n + class_index] = 0;
      }
      sum(b.to, count, n, sums);
      body(first, n, at, sums);
    }
  }
};

template <class C>
void forward(const Rows<C>& rows, bool square, C* out) {
  const auto values = square ? pick<&values_loop<C, true>>() : pick<&values_loop<C, false>>();
  rows.run([&](int64_t row, int64_t count, auto& buffers) {
    double total[kChunk] = {};
    rows.for_pieces(row, count, buffers, values, [&](int64_t, int64_t, int64_t, const double* sums) {
      for (int64_t r = 0; r < count; ++r) total[r] += sums[r];
    });
    for (int64_t r = 0; r < count; ++r)
      out[row + r] = rows.class_index(row + r) < 0 ? C(0) : static_cast<C>(rows.scaled(row + r, total[r]));
  });
}

template <class C>
void backward(const Rows<C>& rows, bool square, const double* grad, const Sink<C>& sink) {
  const auto slopes = square ? pick<&slopes_loop<C, true>>() : pick<&slopes_loop<C, false>>();
  const auto spread = pick<&spread_loop<C>>();
  const auto scale = pick<&scale_loop<C>>();
  const bool one_piece = rows.classes <= kChunk;
  rows.run([&](int64_t row, int64_t count, auto& b) {
    double slope = 0;  // a long row's sum: its target class needs it before all pieces are written
    const auto add = [&](int64_t, int64_t, int64_t, const double* sums) { slope += sums[0]; };
    if (!one_piece) rows.for_pieces(row, count, b, slopes, add);
    // dx_j = g w_y/C slope_j for j != y,  dx_y = -(sum of all other dx_j)
    const auto write = [&](int64_t first, int64_t n, int64_t at, const double* sums) {
      for (int64_t r = 0; r < count; ++r) b.per_row[r] = static_cast<C>(rows.scaled(row + r, grad[row + r]));
      spread(b.per_row, count, n, b.spread);
      scale(b.spread, count * n, b.to);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t class_index = rows.class_index(row + r) - first;
        const double total = one_piece ? sums[r] : slope;
        if (class_index >= 0 && class_index < n && rows.class_index(row + r) >= 0 && total != 0)
          b.to[r * n + class_index] = static_cast<C>(-total * rows.scaled(row + r, grad[row + r]));
      }
      C* to = sink.target(at, b.to);
      if (to != b.to) std::copy_n(b.to, count * n, to);
      sink.commit(at, count * n, b.to);
    };
    rows.for_pieces(row, count, b, slopes, write);
  });
}

// ---- the ops

std::tuple<Tensor, Tensor> multi_margin_loss(const Tensor& input, const Tensor& target,
                                             const std::optional<Tensor>& weight, const std::optional<Tensor>& mask,
                                             double margin, int64_t p) {
  const View x(input);
  const DType dtype = wide(x.dtype, x.dtype);
  const Shape shape = ClassRows("_multi_margin_loss", x, x.ndim - 1).shape;
  const Tensor loss = empty(shape, dtype, input), keep = empty(shape, DType::kBool, input);
  const auto run = [&](auto type) {
    using C = decltype(type);
    uint8_t* counted = reinterpret_cast<uint8_t*>(View(keep).data);
    const Rows<C> rows("_multi_margin_loss", x, target, weight, mask, margin, counted);
    forward(rows, p == 2, reinterpret_cast<C*>(View(loss).data));
  };
  dtype == DType::kDouble ? run(double{}) : run(float{});
  return {loss, keep};
}

Tensor multi_margin_loss_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                  const std::optional<Tensor>& weight, const std::optional<Tensor>& mask,
                                  double margin, int64_t p) {
  constexpr char kName[] = "_multi_margin_loss_backward";
  const View g(grad), x(input);
  const Tensor dx = output_like(x.shape(), x.dtype, input, x);
  const auto run = [&](auto type) {
    using C = decltype(type);
    const Rows<C> rows(kName, x, target, weight, mask, margin, nullptr);
    STD_TORCH_CHECK(g.is_floating() && rows.of.shape.is(g.ndim, g.sizes), kName,
                    ": grad must be floating, one for each row");
    const std::unique_ptr<double[]> upstream(new double[std::max<int64_t>(1, rows.rows)]);
    read_all(g, rows.of.shape, upstream.get());
    Sink<C> sink;
    sink.bind(View(dx), rows.shape, rows.order);
    backward(rows, p == 2, upstream.get(), sink);
  };
  x.dtype == DType::kDouble ? run(double{}) : run(float{});
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_multi_margin_loss", TORCH_BOX(&multi_margin_loss));
  m.impl("_multi_margin_loss_backward", TORCH_BOX(&multi_margin_loss_backward));
}

}  // namespace safeops::cpu
