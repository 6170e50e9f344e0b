// loss = 1/C sum max(margin - x_y + x_j, 0)^p over the classes j of a row but its own, y; and its gradient.
// I/O: forward reads x and the places, backward reads them and writes dx.
#include <memory>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"
#include "cpu/rows/classification.h"

namespace safeops::cpu {

namespace {

constexpr int64_t kPiece = 256;  // numbers that are added in C

// ---- loops over classes, of which none is the row's own; base = margin - x_y

template <class C, bool kSquare>
inline double sum_of(const C* x, int64_t n, C base) {
  double sum = 0;
  for (int64_t at = 0; at < n; at += kPiece) {
    C total = 0;
    const int64_t last = std::min(at + kPiece, n);
    _Pragma("omp simd reduction(+ : total)")
    for (int64_t i = at; i < last; ++i) {
      const C d = base + x[i], kept = d <= 0 ? C(0) : d;  // NaN stays
      total += kSquare ? kept * kept : kept;
    }
    sum += static_cast<double>(total);
  }
  return sum;
}

// dx = g slope, 0 where the slope is (if g is inf, too); the sum of the slopes.
template <class C, bool kSquare>
inline double slopes_of(const C* x, int64_t n, C base, C g, C* dx) {
  double sum = 0;
  for (int64_t at = 0; at < n; at += kPiece) {
    C total = 0;
    const int64_t last = std::min(at + kPiece, n);
    _Pragma("omp simd reduction(+ : total)")
    for (int64_t i = at; i < last; ++i) {
      const C d = base + x[i], slope = d <= 0 ? C(0) : kSquare ? 2 * d : C(1);
      total += slope;
      dx[i] = d <= 0 ? C(0) : g * slope;
    }
    sum += static_cast<double>(total);
  }
  return sum;
}

// What a thread does with classes [first, first + n) of a row whose own is `place`: not with that one itself.
template <class Each>
inline void for_others(int64_t place, int64_t first, int64_t n, const Each& each) {
  const int64_t own = std::clamp<int64_t>(place - first, 0, n), rest = own + (place >= first && place < first + n);
  each(0, own), each(rest, n - rest);
}

template <class C, bool kSquare>
void sum_loop(const C* x, int64_t place, int64_t first, int64_t n, C base, double* sum) {
  for_others(place, first, n, [&](int64_t at, int64_t m) { *sum += sum_of<C, kSquare>(x + at, m, base); });
}

template <class C, bool kSquare>
void slopes_loop(const C* x, int64_t place, int64_t first, int64_t n, C base, C g, C* dx, double* sum) {
  for_others(place, first, n,
             [&](int64_t at, int64_t m) { *sum += slopes_of<C, kSquare>(x + at, m, base, g, dx + at); });
}

// ---- the rows

// Rows (..., C) in the order of their places; several short ones are read at once, a long one in pieces.
template <class C>
struct Rows {
  Shape shape;
  Order order;
  int64_t classes, rows = 1, many;  // many: rows that are read at once
  const int64_t* places;            // of each row's own class, negative where the row does not exist
  C margin;
  Source<C> x;

  Rows(const View& x_, const View& places_, double margin_)
      : shape(x_.shape()), order(Order::contiguous(shape)), margin(static_cast<C>(margin_)) {
    STD_TORCH_CHECK(shape.ndim > 0, "_multi_margin_loss: input must be (..., C)");
    const Shape of_rows(shape.ndim - 1, shape.size);
    STD_TORCH_CHECK(places_.dtype == DType::kLong && places_.contiguous() && of_rows.is(places_.ndim, places_.sizes),
                    "_multi_margin_loss: place must be contiguous int64, one for each row");
    classes = shape.size[shape.ndim - 1], rows = of_rows.numel();
    many = std::max<int64_t>(1, kChunk / std::max<int64_t>(classes, 1));
    places = reinterpret_cast<const int64_t*>(places_.data);
    for (int64_t row = 0; row < rows; ++row)
      STD_TORCH_CHECK(places[row] < classes, "_multi_margin_loss: a place is out of range");
    x.bind(x_, shape, order);
  }

  double mean_of() const { return static_cast<double>(std::max<int64_t>(classes, 1)); }

  struct Buffers { alignas(64) C x[kBuffer], to[kBuffer], own[kBuffer]; };

  // body(first row, how many, buffers)
  template <class Body>
  void run(const Body& body) const {
    parallel((rows + many - 1) / many, many * classes, [&](int64_t begin, int64_t end) {
      const auto buffers = std::make_unique<Buffers>();
      x.prime(buffers->x), x.prime(buffers->own);
      for (int64_t unit = begin; unit < end; ++unit)
        body(unit * many, std::min(many, rows - unit * many), *buffers);
    });
  }

  // body(row, place, first class, how many, x, margin - x_y, where in the walk they lie) for what is read at once of
  // the rows that exist; after(where in the walk, how many) for all that is.
  template <class Body, class After>
  void for_pieces(int64_t row, int64_t count, Buffers& buffers, const Body& body, const After& after) const {
    for (int64_t first = 0; first < classes; first += kChunk) {
      const int64_t n = std::min(kChunk, classes - first), at = row * classes + first;
      const C* from = x.fetch(at, count * n, at + kAhead, buffers.x);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t place = places[row + r];
        if (place < 0) continue;
        const bool here = classes == n;
        const C own = here ? from[r * n + place] : *x.fetch(row * classes + place, 1, shape.numel(), buffers.own);
        body(row + r, place, first, n, from + r * n, margin - own, r * n);
      }
      after(at, count * n);
    }
  }
};

template <class C>
void forward(const Rows<C>& rows, bool square, C* out) {
  const auto add = square ? pick<&sum_loop<C, true>>() : pick<&sum_loop<C, false>>();
  rows.run([&](int64_t row, int64_t count, auto& buffers) {
    double sums[kChunk] = {};
    const auto piece = [&](int64_t r, int64_t place, int64_t first, int64_t n, const C* x, C base, int64_t) {
      add(x, place, first, n, base, &sums[r - row]);
    };
    rows.for_pieces(row, count, buffers, piece, [](int64_t, int64_t) {});
    for (int64_t r = 0; r < count; ++r) out[row + r] = static_cast<C>(sums[r] / rows.mean_of());
  });
}

template <class C>
void backward(const Rows<C>& rows, bool square, const double* grad, const Sink<C>& sink) {
  const auto add = square ? pick<&slopes_loop<C, true>>() : pick<&slopes_loop<C, false>>();
  rows.run([&](int64_t row, int64_t count, auto& buffers) {
    double slopes = 0;  // of a long row, whose own class may come before others
    const bool whole = rows.classes <= kChunk;
    const auto scaled = [&](int64_t r) { return grad[r] / rows.mean_of(); };
    const auto only_add = [&](int64_t, int64_t place, int64_t first, int64_t n, const C* x, C base, int64_t) {
      add(x, place, first, n, base, C(0), buffers.to, &slopes);
    };
    if (!whole) rows.for_pieces(row, count, buffers, only_add, [](int64_t, int64_t) {});
    std::fill_n(buffers.to, kBuffer, C(0));
    const auto write = [&](int64_t r, int64_t place, int64_t first, int64_t n, const C* x, C base, int64_t at) {
      double here = 0;
      add(x, place, first, n, base, static_cast<C>(scaled(r)), buffers.to + at, &here);
      const double total = whole ? here : slopes;
      if (place >= first && place < first + n)
        buffers.to[at + place - first] = total == 0 ? C(0) : static_cast<C>(-total * scaled(r));
    };
    rows.for_pieces(row, count, buffers, write, [&](int64_t at, int64_t n) {
      C* to = sink.target(at, buffers.to);
      if (to != buffers.to) std::copy_n(buffers.to, n, to);
      sink.commit(at, n, buffers.to);
      if (!whole) std::fill_n(buffers.to, kBuffer, C(0));
    });
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
