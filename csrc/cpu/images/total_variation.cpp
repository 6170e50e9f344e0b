// Total variation. The sum over an image adds |x - neighbour| for each pair of kept neighbours along the spatial dims.
// The result is this sum for each image, its mean over the images that have a kept pixel, or the sum over all images.
// The gradient of x is g sum sign(x - neighbour).
//
// I/O: forward and backward read x and the mask once from memory, and again from the cache for each neighbour; backward
// writes dx.
#include <tuple>

#include "common/reducer.h"
#include "cpu/images/neighbours.h"

namespace safeops::cpu {

namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr int64_t kPiece = 256;  // elements whose differences are added up in C, before the sum is added to a double

// ---- Loops over a piece: x, a neighbour of each pixel, and their masks (null: all are kept).

template <class C, bool kMask>
void add_loop(const C* x, const C* y, Keep<C> keep, Keep<C> other, int64_t n, double* sum) {
  for (int64_t at = 0; at < n; at += kPiece) {
    C total = 0;
    const int64_t last = std::min(at + kPiece, n);
    _Pragma("omp simd reduction(+ : total)")
    for (int64_t i = at; i < last; ++i) {
      const C d = std::fabs(x[i] - y[i]);
      total += kMask ? kept(d, keep[i] & other[i]) : d;
    }
    *sum += static_cast<double>(total);
  }
}

// Returns sign(d) with one comparison; sign(0) = 0, sign(NaN) = NaN.
template <class C>
C sign(C d) { return std::fabs(d) > 0 ? std::copysign(C(1), d) : d; }

// to += g sign(x - y) for each kept pair: a pixel without a pair has gradient 0, even if g is NaN.
template <class C, bool kMask>
void sign_loop(const C* x, const C* y, Keep<C> keep, Keep<C> other, int64_t n, C g, C* to) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C slope = g * sign(x[i] - y[i]);
    to[i] += kMask ? kept(slope, keep[i] & other[i]) : slope;
  }
}

// to += g (sign(x - y) + sign(x - z)). Without kAdd it is `to =`, so that the output need not be zeroed first.
template <class C, bool kMask, bool kAdd>
void signs_loop(const C* x, const C* y, const C* z, Keep<C> keep, Keep<C> keep_y, Keep<C> keep_z, int64_t n, C g,
                C* to) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    C first = sign(x[i] - y[i]), second = sign(x[i] - z[i]);
    if constexpr (kMask) first = kept(first, keep_y[i]), second = kept(second, keep_z[i]);
    C slope = g * (first + second);
    if constexpr (kMask) slope = kept(slope, keep[i] & (keep_y[i] | keep_z[i]));
    to[i] = kAdd ? to[i] + slope : slope;
  }
}

// ---- forward

// Returns (sum of each image, empty) or (mean or sum over the images, its derivative with respect to one image's sum).
template <class C>
std::tuple<Tensor, Tensor> forward(const PixelRows<C>& images, const Reducer& by, const Tensor& like) {
  const auto add = images.masked ? pick<&add_loop<C, true>>() : pick<&add_loop<C, false>>();
  const bool none = by.kind == Reducer::kNone;
  const Tensor value = empty(Shape(none, &images.images), dtype_v<C>, like);
  const Tensor result_slope = none ? empty_vector(DType::kDouble, like) : empty(Shape(), DType::kDouble, like);
  const int64_t tasks = images.images * images.blocks;
  const std::unique_ptr<double[]> sums(new double[tasks]());
  const std::unique_ptr<int64_t[]> counts(new int64_t[tasks]());
  images.run([&](int64_t task, const PixelPiece<C>& piece, auto& buffers) {
    for (int k = 0; k < images.ndims; ++k) {
      const Neighbours<C> y = images.neighbours(piece, k, buffers);
      add(piece.x, y.after, piece.keep, y.keep_after, y.last, &sums[task]);
    }
    counts[task] += piece.kept;
  });
  C* to = reinterpret_cast<C*>(View(value).data);
  double total = 0, exist = 0;
  for (int64_t n = 0; n < images.images; ++n) {  // adds in the order of the pixels, whatever the threads did
    double sum = 0;
    int64_t kept = 0;
    for (int64_t task = n * images.blocks; task < (n + 1) * images.blocks; ++task)
      sum += sums[task], kept += counts[task];
    if (none) to[n] = static_cast<C>(by.value(sum, static_cast<double>(kept)));
    total += sum, exist += kept > 0;
  }
  if (none) return {value, result_slope};
  *to = static_cast<C>(by.value(total, exist));
  *reinterpret_cast<double*>(View(result_slope).data) = by.slope(exist);
  return {value, result_slope};
}

// ---- backward

template <class C, bool kMask>
void backward(const PixelRows<C>& images, const View& grad, const View& result_slope, const View& dx) {
  const auto add = pick<&sign_loop<C, kMask>>();
  const auto add_both = pick<&signs_loop<C, kMask, true>>(), write_both = pick<&signs_loop<C, kMask, false>>();
  Sink<C> sink;
  sink.bind(dx, images.shape, images.order);
  images.run([&](int64_t, const PixelPiece<C>& p, auto& buffers) {
    const C* upstream = reinterpret_cast<const C*>(grad.data);
    const C g = result_slope.ndim == 0 ? static_cast<C>(*upstream * *reinterpret_cast<const double*>(result_slope.data))
                                : upstream[p.image * grad.strides[0]];
    C* to = sink.target(p.at, buffers.to);
    bool written = false;
    for (int k = images.ndims - 1; k >= 0; --k) {  // the row's dim last: there not all pixels have two neighbours
      const Neighbours<C> y = images.neighbours(p, k, buffers);
      const auto one = [&](const C* other, Keep<C> keep, int64_t from, int64_t end) {
        if (from < end) add(p.x + from, other + from, kMask ? p.keep + from : nullptr, kMask ? keep + from : nullptr,
                            end - from, g, to + from);
      };
      const bool all = y.first == 0 && y.last == p.n;
      if (!written && !all) std::fill_n(to, p.n, C(0));
      if (y.first < y.last) {
        const int64_t i = y.first;
        (written || !all ? add_both : write_both)(p.x + i, y.before + i, y.after + i, kMask ? p.keep + i : nullptr,
                                                  kMask ? y.keep_before + i : nullptr,
                                                  kMask ? y.keep_after + i : nullptr, y.last - i, g, to + i);
      }
      one(y.before, y.keep_before, std::max(y.first, y.last), p.n);
      one(y.after, y.keep_after, 0, std::min(y.first, y.last));
      written = true;
    }
    if (!written) std::fill_n(to, p.n, C(0));
    if (sink.kind != Kind::kDirect) sink.commit(p.at, p.n, buffers.to);
  });
}

template <class C>
void backward(const View& x, const OptionalTensor& mask, const View& grad, const View& result_slope, const View& dx) {
  const PixelRows<C> images(x, mask);
  images.masked ? backward<C, true>(images, grad, result_slope, dx)
                : backward<C, false>(images, grad, result_slope, dx);
}

// ---- the ops

std::tuple<Tensor, Tensor> total_variation(const Tensor& input, const OptionalTensor& mask, int64_t reduction,
                                           bool empty_nan) {
  const View x(input);
  const Reducer by{reduction, empty_nan};
  return x.dtype == DType::kDouble ? forward(PixelRows<double>(x, mask), by, input)
                                   : forward(PixelRows<float>(x, mask), by, input);
}

// result_slope: the second result of _total_variation.
Tensor total_variation_backward(const Tensor& grad, const Tensor& result_slope, const Tensor& input,
                                const OptionalTensor& mask) {
  const View g(grad), s(result_slope), x(input);
  STD_TORCH_CHECK(g.dtype == wide(x.dtype, x.dtype) && (s.ndim ? g.shape().is(1, x.sizes) : g.ndim == 0) &&
                      s.dtype == DType::kDouble,
                  "_total_variation_backward: grad and result_slope must be of the results of _total_variation");
  const Tensor out = output_like(x.shape(), x.dtype, input, x);
  const View dx(out);
  x.dtype == DType::kDouble ? backward<double>(x, mask, g, s, dx) : backward<float>(x, mask, g, s, dx);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_total_variation", TORCH_BOX(&total_variation));
  m.impl("_total_variation_backward", TORCH_BOX(&total_variation_backward));
}

}  // namespace safeops::cpu
