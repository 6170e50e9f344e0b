// Total variation: for each image the sum of |x - its neighbour| over the pairs of kept neighbours along the spatial
// dims, and how many pixels are kept; the gradient is g sum sign(x - neighbour).
//
// I/O: forward reads x and the mask once from memory, as does the backward, which writes dx. A pixel is read again for
// each of its neighbours, from the cache.
#include <memory>
#include <optional>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kUnit = 65536;  // elements of a unit of work, about
constexpr int64_t kPiece = 256;   // elements whose differences are added in C

// ---- loops over a piece: x, a neighbour of each, and which are kept (null: all)

template <class C, bool kMask>
void add_loop(const C* x, const C* y, const uint8_t* keep, const uint8_t* other, int64_t n, double* sum) {
  for (int64_t at = 0; at < n; at += kPiece) {
    C total = 0;
    const int64_t last = std::min(at + kPiece, n);
    _Pragma("omp simd reduction(+ : total)")
    for (int64_t i = at; i < last; ++i) {
      const C d = std::fabs(x[i] - y[i]);
      total += kMask ? select_or_zero((keep[i] & other[i]) != 0, d) : d;
    }
    *sum += static_cast<double>(total);
  }
}

// to += g sign(x - y): 0 of equal ones, NaN of NaN. (g inside the loop: a pixel of no pair has 0, if g is NaN, too.)
template <class C, bool kMask>
void sign_loop(const C* x, const C* y, const uint8_t* keep, const uint8_t* other, int64_t n, C g, C* to) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C d = x[i] - y[i], slope = g * (d > 0 ? C(1) : d < 0 ? C(-1) : d);
    to[i] += kMask ? select_or_zero((keep[i] & other[i]) != 0, slope) : slope;
  }
}

inline void count_loop(const uint8_t* keep, int64_t n, int64_t* count) {
  int64_t kept = 0;
  _Pragma("omp simd reduction(+ : kept)")
  for (int64_t i = 0; i < n; ++i) kept += keep[i] != 0;
  *count += kept;
}

// ---- the walk

// n pixels from place `at` of the walk.
template <class C>
struct Piece {
  int64_t image, at, n;
  const C* x;
  const uint8_t* keep;  // null: all
};

// Images in the order of their memory. A row is the nearest spatial dim with all that is nearer (channels, where they
// come last): along it the neighbour of a pixel is `step` further on, and along every other dim in another row.
template <class C>
struct Images {
  struct Dim { int64_t size, step; };

  Shape shape;
  Order order;
  int64_t images, pixels;  // of an image
  int64_t row, rows, block, blocks;  // elements of a row; rows of an image, of a unit; units of an image
  Dim dims[kMaxDims];  // spatial ones, the row's first
  int ndims = 0;
  bool masked;
  Source<C> x;
  Source<uint8_t> mask;

  Images(const View& x_, const OptionalTensor& mask_) : shape(x_.shape()), masked(mask_) {
    STD_TORCH_CHECK(shape.ndim == 4 || shape.ndim == 5, "_total_variation: needs (N, C, H, W) or (N, C, D, H, W)");
    bool of_image[kMaxDims];
    for (int d = 0; d < shape.ndim; ++d) of_image[d] = d > 0;
    order = Order::by_strides(shape, x_.strides, of_image, true);
    images = shape.size[0], pixels = order.numel(), row = pixels;
    for (int64_t i = 0, step = 1; i < order.ndim; step *= order.size[i++]) {
      if (order.dim[i] < 2) continue;
      if (ndims == 0) row = step * order.size[i];
      dims[ndims++] = {order.size[i], step};
    }
    order.push(0, images);
    rows = row ? pixels / row : 0;
    block = std::max<int64_t>(1, kUnit / std::max<int64_t>(row, 1));
    blocks = (rows + block - 1) / block;
    x.bind(x_, shape, order);
    if (mask_) mask.bind(View(*mask_), shape, order);
  }

  struct Buffers {
    alignas(64) C x[kBuffer], y[kBuffer], to[kBuffer];
    alignas(64) uint8_t keep[kBuffer], other[kBuffer];
  };

  // body(unit, pieces of the unit, buffers)
  template <class Body>
  void run(const Body& body) const {
    parallel(images * blocks, block * row * 4, [&](int64_t begin, int64_t end) {
      const auto buffers = std::make_unique<Buffers>();
      x.prime(buffers->x), x.prime(buffers->y);
      if (masked) mask.prime(buffers->keep), mask.prime(buffers->other);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t image = unit / blocks, first = unit % blocks * block, base = image * pixels;
        for (int64_t r = first; r < std::min(first + block, rows); ++r) {
          for (int64_t at = r * row; at < (r + 1) * row; at += kChunk) {
            const int64_t n = std::min(kChunk, (r + 1) * row - at);
            body(unit, read(image, base + at, n, base + at, buffers->x, buffers->keep), *buffers);
          }
        }
      }
    });
  }

  // body(x, neighbours, kept, neighbours' kept, how many, from which of the piece on), for each neighbour that the
  // piece's pixels have: the next along each dim; with `both`, the one before, too.
  template <class Body>
  void for_neighbours(const Piece<C>& p, bool both, Buffers& buffers, const Body& body) const {
    const int64_t at = p.at - p.image * pixels;
    for (int k = 0; k < ndims; ++k) {
      for (const int64_t step : {dims[k].step, -dims[k].step}) {
        if (step < 0 && !both) continue;
        int64_t first = 0, last = p.n;
        if (k == 0) {  // the row's own: all but its first, or last, pixels
          const int64_t from = at % row;
          step > 0 ? last = std::min(last, row - step - from) : first = std::max(first, -step - from);
        } else {
          const int64_t place = at / dims[k].step % dims[k].size;
          if (place == (step > 0 ? dims[k].size - 1 : 0)) continue;
        }
        if (first >= last) continue;
        const Piece<C> y = read(p.image, p.at + first + step, last - first, p.at + first, buffers.y, buffers.other);
        body(p.x + first, y.x, p.keep + (masked ? first : 0), y.keep, last - first, first);
      }
    }
  }

 private:
  Piece<C> read(int64_t image, int64_t at, int64_t n, int64_t ahead, C* to, uint8_t* keep) const {
    ahead += kAhead;
    return {image, at, n, x.fetch(at, n, ahead, to), masked ? mask.fetch(at, n, ahead, keep) : nullptr};
  }
};

// ---- forward

// (2, N): the sums, and the counts
template <class C>
void forward(const Images<C>& images, double* out) {
  const auto add = images.masked ? pick<&add_loop<C, true>>() : pick<&add_loop<C, false>>();
  const auto count = pick<&count_loop>();
  const int64_t units = images.images * images.blocks;
  const std::unique_ptr<double[]> sums(new double[units]());
  const std::unique_ptr<int64_t[]> counts(new int64_t[units]());
  images.run([&](int64_t unit, const Piece<C>& piece, auto& buffers) {
    images.for_neighbours(piece, false, buffers, [&](auto x, auto y, auto keep, auto other, int64_t n, int64_t) {
      add(x, y, keep, other, n, &sums[unit]);
    });
    if (images.masked)
      count(piece.keep, piece.n, &counts[unit]);
    else
      counts[unit] += piece.n;
  });
  for (int64_t n = 0; n < images.images; ++n) {  // in the order of the pixels, whatever the threads did
    double sum = 0;
    int64_t kept = 0;
    for (int64_t unit = n * images.blocks; unit < (n + 1) * images.blocks; ++unit)
      sum += sums[unit], kept += counts[unit];
    out[n] = sum, out[images.images + n] = static_cast<double>(kept);
  }
}

// ---- backward

template <class C>
void backward(const Images<C>& images, const View& grad, const View& dx) {
  const auto add = images.masked ? pick<&sign_loop<C, true>>() : pick<&sign_loop<C, false>>();
  Sink<C> sink;
  sink.bind(dx, images.shape, images.order);
  images.run([&](int64_t, const Piece<C>& piece, auto& buffers) {
    const C g = static_cast<C>(reinterpret_cast<const double*>(grad.data)[piece.image * grad.strides[1]]);
    C* to = sink.target(piece.at, buffers.to);
    std::fill_n(to, piece.n, C(0));
    images.for_neighbours(piece, true, buffers, [&](auto x, auto y, auto keep, auto other, int64_t n, int64_t first) {
      add(x, y, keep, other, n, g, to + first);
    });
    sink.commit(piece.at, piece.n, buffers.to);
  });
}

// ---- the ops

Tensor total_variation(const Tensor& input, const OptionalTensor& mask) {
  const View x(input);
  const int64_t sizes[] = {2, x.ndim ? x.sizes[0] : 0};
  const Tensor out = empty(Shape(2, sizes), DType::kDouble, input);
  double* to = reinterpret_cast<double*>(View(out).data);
  x.dtype == DType::kDouble ? forward(Images<double>(x, mask), to) : forward(Images<float>(x, mask), to);
  return out;
}

Tensor total_variation_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& mask) {
  const View g(grad), x(input);
  STD_TORCH_CHECK(g.dtype == DType::kDouble && g.ndim == 2 && x.ndim && g.sizes[0] == 2 && g.sizes[1] == x.sizes[0],
                  "_total_variation_backward: grad must be float64 of shape (2, N)");
  const Tensor out = output_like(x.shape(), x.dtype, input, x);
  const View dx(out);
  x.dtype == DType::kDouble ? backward(Images<double>(x, mask), g, dx) : backward(Images<float>(x, mask), g, dx);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_total_variation", TORCH_BOX(&total_variation));
  m.impl("_total_variation_backward", TORCH_BOX(&total_variation_backward));
}

}  // namespace safeops::cpu
