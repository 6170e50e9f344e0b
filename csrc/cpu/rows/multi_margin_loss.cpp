// loss = 1/C sum max(margin - x_y + x_j, 0)^p over the classes j != y of a row with class y; and its gradient.
// I/O: forward reads x and the places, backward reads them and writes dx.
#include <memory>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"
#include "cpu/engine/row_sums.h"
#include "cpu/rows/classification.h"

namespace safeops::cpu {

namespace {

// ---- loops over the classes of several rows: d = base + x with base = margin - x_y, spread over the row

// max(d, 0)^p
template <class C, bool kSquare>
void values_loop(const C* base, const C* x, int64_t n, C* values) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C d = base[i] + x[i], kept = d <= 0 ? C(0) : d;  // NaN stays
    values[i] = kSquare ? kept * kept : kept;
  }
}

// p max(d, 0)^(p - 1)
template <class C, bool kSquare>
void slopes_loop(const C* base, const C* x, int64_t n, C* slopes) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C d = base[i] + x[i];
    slopes[i] = d <= 0 ? C(0) : kSquare ? 2 * d : C(1);
  }
}

// g slope, but 0 where the slope is 0, even for an infinite g.
template <class C>
void scale_loop(const C* g, int64_t n, C* slopes) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) slopes[i] = slopes[i] == 0 ? C(0) : g[i] * slopes[i];
}

// Repeats the value of each row n times. It writes in full blocks, the last of which may end after the row.
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

// Rows (..., C), contiguous: several short ones are read at once, a long one in pieces.
template <class C>
struct Rows {
  Shape shape;
  Order order;
  int64_t classes, rows = 1, batch;  // batch: rows that are read at once
  const int64_t* places;             // the class of each row, negative where the row does not exist
  C margin;
  Source<C> x;

  Rows(const View& x_, const View& places_, double margin_)
      : shape(x_.shape()), order(Order::contiguous(shape)), margin(static_cast<C>(margin_)) {
    STD_TORCH_CHECK(shape.ndim > 0, "_multi_margin_loss: input must be (..., C)");
    const Shape per_row(shape.ndim - 1, shape.size);
    STD_TORCH_CHECK(places_.dtype == DType::kLong && places_.contiguous() && per_row.is(places_.ndim, places_.sizes),
                    "_multi_margin_loss: place must be contiguous int64, one for each row");
    classes = shape.size[shape.ndim - 1], rows = per_row.numel();
    batch = std::max<int64_t>(1, kChunk / std::max<int64_t>(classes, 1));
    places = reinterpret_cast<const int64_t*>(places_.data);
    for (int64_t row = 0; row < rows; ++row)
      STD_TORCH_CHECK(places[row] < classes, "_multi_margin_loss: a place is out of range");
    x.bind(x_, shape, order);
  }

  double mean_of() const { return static_cast<double>(std::max<int64_t>(classes, 1)); }

  struct Buffers { alignas(64) C x[kBuffer], to[kBuffer], spread[kBuffer], target[kBuffer], per_row[kChunk]; };

  // body(first row, number of rows, buffers)
  template <class Body>
  void run(const Body& body) const {
    parallel((rows + batch - 1) / batch, batch * classes, [&](int64_t begin, int64_t end) {
      const auto buffers = std::make_unique<Buffers>();
      x.prime(buffers->x), x.prime(buffers->target);
      for (int64_t task = begin; task < end; ++task)
        body(task * batch, std::min(batch, rows - task * batch), *buffers);
    });
  }

  // Each piece of `count` rows: loop() fills buffers.to, which is then set to 0 for a row's target class and in rows
  // that do not exist. Then body(first class, classes in the piece, its offset in the walk, its sums by row).
  template <class Loop, class Body>
  void for_pieces(int64_t row, int64_t count, Buffers& b, Loop loop, const Body& body) const {
    const auto spread = pick<&spread_loop<C>>();
    const SumGroups<C, double> sum;
    double sums[kChunk];
    for (int64_t first = 0; first < classes; first += kChunk) {
      const int64_t n = std::min(kChunk, classes - first), at = row * classes + first;
      const C* from = x.fetch(at, count * n, at + kAhead, b.x);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t place = std::max<int64_t>(0, places[row + r]);
        const bool one_piece = classes == n;
        b.per_row[r] =
            margin - (one_piece ? from[r * n + place] : *x.fetch(row * classes + place, 1, kNever, b.target));
      }
      spread(b.per_row, count, n, b.spread);
      loop(b.spread, from, count * n, b.to);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t place = places[row + r] - first;
        if (places[row + r] < 0)
          std::fill_n(b.to + r * n, n, C(0));
        else if (place >= 0 && place < n)
          b.to[r * n + place] = 0;
      }
      sum(b.to, count, n, 1, sums);
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
    for (int64_t r = 0; r < count; ++r) out[row + r] = static_cast<C>(total[r] / rows.mean_of());
  });
}

template <class C>
void backward(const Rows<C>& rows, bool square, const double* grad, const Sink<C>& sink) {
  const auto slopes = square ? pick<&slopes_loop<C, true>>() : pick<&slopes_loop<C, false>>();
  const auto spread = pick<&spread_loop<C>>();
  const auto scale = pick<&scale_loop<C>>();
  const bool one_piece = rows.classes <= kChunk;
  rows.run([&](int64_t row, int64_t count, auto& b) {
    double slope = 0;  // of a long row, whose target class may come before others
    const auto add = [&](int64_t, int64_t, int64_t, const double* sums) { slope += sums[0]; };
    if (!one_piece) rows.for_pieces(row, count, b, slopes, add);
    // dx_j = g / C slope_j for j != y, dx_y = -sum of the others
    const auto write = [&](int64_t first, int64_t n, int64_t at, const double* sums) {
      for (int64_t r = 0; r < count; ++r) b.per_row[r] = static_cast<C>(grad[row + r] / rows.mean_of());
      spread(b.per_row, count, n, b.spread);
      scale(b.spread, count * n, b.to);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t place = rows.places[row + r] - first;
        const double total = one_piece ? sums[r] : slope;
        if (place >= 0 && place < n && rows.places[row + r] >= 0 && total != 0)
          b.to[r * n + place] = static_cast<C>(-total * (grad[row + r] / rows.mean_of()));
      }
      C* to = sink.target(at, b.to);
      if (to != b.to) std::copy_n(b.to, count * n, to);
      sink.commit(at, count * n, b.to);
    };
    rows.for_pieces(row, count, b, slopes, write);
  });
}

// ---- the ops

Tensor multi_margin_loss(const Tensor& input, const Tensor& place, double margin, int64_t p) {
  const View x(input), places(place);
  const DType dtype = wide(x.dtype, x.dtype);
  const Tensor loss = empty(places.shape(), dtype, input);
  void* out = View(loss).data;
  if (dtype == DType::kDouble)
    forward(Rows<double>(x, places, margin), p == 2, static_cast<double*>(out));
  else
    forward(Rows<float>(x, places, margin), p == 2, static_cast<float*>(out));
  return loss;
}

Tensor multi_margin_loss_backward(const Tensor& grad, const Tensor& input, const Tensor& place, double margin,
                                  int64_t p) {
  const View g(grad), x(input), places(place);
  STD_TORCH_CHECK(g.is_floating() && places.shape().is(g.ndim, g.sizes),
                  "_multi_margin_loss_backward: grad must be floating, one for each row");
  const Tensor dx = output_like(x.shape(), x.dtype, input, x);
  const std::unique_ptr<double[]> upstream(new double[std::max<int64_t>(1, places.shape().numel())]);
  read_all(g, places.shape(), upstream.get());
  const auto run = [&](auto type) {
    using C = decltype(type);
    const Rows<C> rows(x, places, margin);
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
