// The gradients of 1 - SSIM. Each window has a slope by each of its four moments; a pixel's gradient is the weighted sum
// of those of the windows that see it:
//     ds = sum w by_mean_s + 2 s sum w by_squares_s,  the same of d;  dx = ds + dd,  dy = ds - dd
// The moments are made anew, a row of windows after the other.
// I/O: reads x, y, mask, and the map's gradient; writes dx, dy.
#include "cpu/images/similarity.h"

namespace safeops::cpu {

namespace {

// The slopes of n windows, an array each of E s, E s^2, E d, E d^2; of_loss: the map's gradient, or one number for all.
template <class C, bool kMap, bool kShare, bool kCounted>
void slopes_loop(const SimilarityRow<C>& row, const C* map, C of_loss, C of_contrast, int64_t n, int64_t step, C* out) {
  const SimilarityRow<C> r = row;
  C *by_s = out, *by_ss = out + step, *by_d = out + 2 * step, *by_dd = out + 3 * step;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const Similarity<C> at = Similarity<C>::template at<kShare, kCounted>(r, i);
    const C g = kMap ? map[i] : of_loss;
    const C luminance = g * (1 - at.contrast), contrast = g * (1 - at.luminance) + of_contrast;
    const C ss = -contrast * at.contrast / at.below, dd = contrast * (2 - at.contrast) / at.below;
    const C s = -2 * luminance * at.luminance * at.total_s / at.bottom - 2 * at.mean_s * ss;
    const C d = 2 * luminance * at.total_d * (2 - at.luminance) / at.bottom - 2 * at.mean_d * dd;
    const auto store = [&](C* to, C slope) {
      if constexpr (kShare) slope *= at.inverse;
      to[i] = kCounted ? select_or_zero(r.counted[i] != 0, slope) : slope;
    };
    store(by_s, s), store(by_ss, ss), store(by_d, d), store(by_dd, dd);
  }
}

// A pixel that no window sees has gradient 0, also where it is NaN: all its sums are 0.
template <class C, bool kMask>
void gradient_loop(const C* sums, int64_t step, const C* s, const C* d, const uint8_t* keep, int64_t n, C scale, C* dx,
                   C* dy) {
  const C *by_s = sums, *by_ss = sums + step, *by_d = sums + 2 * step, *by_dd = sums + 3 * step;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C ds = (by_s[i] + 2 * s[i] * by_ss[i]) * scale, dd = (by_d[i] + 2 * d[i] * by_dd[i]) * scale;
    C first = ds + dd, second = ds - dd;
    if constexpr (kMask) {
      const bool unseen = (by_s[i] == 0) & (by_ss[i] == 0) & (by_d[i] == 0) & (by_dd[i] == 0);
      const bool alive = (keep[i] != 0) & !unseen;
      first = select_or_zero(alive, first), second = select_or_zero(alive, second);
    }
    dx[i] = first, dy[i] = second;
  }
}

// What comes in: the gradient of each window, or of the sums of each plane.
template <class C>
struct Upstream {
  bool by_window;
  View view;
  Source<C> map;
  int64_t classes;

  Upstream(const Tensor& grad, const Images<C>& images, bool by_window_)
      : by_window(by_window_), view(grad), classes(images.shape.size[1]) {
    const int64_t sizes[] = {images.shape.size[0], classes, images.window_rows, images.window_columns};
    const int64_t planes[] = {3, sizes[0], sizes[1]};
    const bool good = by_window ? Shape(4, sizes).is(view.ndim, view.sizes)
                                : Shape(3, planes).is(view.ndim, view.sizes) && view.dtype == DType::kDouble;
    STD_TORCH_CHECK(good, "_ssim_backward: grad must be a result of _ssim");
    if (by_window) map.bind(view, Shape(4, sizes), Order::contiguous(Shape(4, sizes)));
  }

  C of_plane(int64_t k, int64_t plane) const {
    const double* g = reinterpret_cast<const double*>(view.data);
    const int64_t n = plane / classes, c = plane % classes;
    return static_cast<C>(g[k * view.strides[0] + n * view.strides[1] + c * view.strides[2]]);
  }
};

template <class C>
struct Backward {
  const Images<C>& images;
  const Upstream<C>& upstream;
  const Sink<C>*dx, *dy;  // null where not wanted
  Moments<C> moments;
  Pixels<C> pixels;
  int64_t step;
  Ring<C> ring;
  std::unique_ptr<C[]> slopes, sums, map, first, second;
  alignas(64) C buffer[kBuffer];
  decltype(pick<&slopes_loop<C, false, false, false>>()) loops[2][3] = {
      {pick<&slopes_loop<C, false, false, false>>(), pick<&slopes_loop<C, false, true, false>>(),
       pick<&slopes_loop<C, false, true, true>>()},
      {pick<&slopes_loop<C, true, false, false>>(), pick<&slopes_loop<C, true, true, false>>(),
       pick<&slopes_loop<C, true, true, true>>()}};
  decltype(pick<&gradient_loop<C, false>>()) all = pick<&gradient_loop<C, false>>(),
                                             kept = pick<&gradient_loop<C, true>>();

  Backward(const Images<C>& images_, const Upstream<C>& upstream_, const Sink<C>* dx_, const Sink<C>* dy_,
           int64_t columns)
      : images(images_), upstream(upstream_), dx(dx_), dy(dy_), moments(images_, columns + images_.size - 1),
        pixels(images_, columns), step(moments.step), ring(images_.size, 4 * step), slopes(new C[4 * step]()),
        sums(new C[4 * step]()), map(new C[step]()), first(new C[step]()), second(new C[step]()) {
    if (upstream.by_window) upstream.map.prime(buffer);
  }

  // The gradients of a tile of pixels.
  void run(const Tile& tile, int64_t) {
    const int64_t size = images.size, back = size - 1 - images.before;  // the first window that sees a pixel
    const int64_t top = tile.row - back, left = tile.column - back;
    const int64_t from = std::max<int64_t>(top, 0), to = std::min(tile.row + tile.rows + images.before,
                                                                  images.window_rows);
    const int64_t start = std::max<int64_t>(left, 0), stop = std::min(tile.column + tile.columns + images.before,
                                                                      images.window_columns);
    const Tile windows{tile.plane, from, to - from, start, stop - start};
    std::fill_n(slopes.get(), 4 * step, C(0));  // where there are no windows
    moments.begin(windows);
    pixels.level = moments.pixels.level;
    ring.pushed = 0;
    for (int64_t r = top; r < tile.row + tile.rows + images.before; ++r) {
      C* next = ring.push();
      if (r < from || r >= to) {
        std::fill_n(next, ring.length, C(0));
      } else {
        moments.advance();
        differentiate(windows, r, slopes.get() + start - left);
        const C* row = slopes.get();
        images.blur.across(&row, images.weights.get(), size, tile.columns, step, next);
      }
      if (ring.pushed >= size) write(tile, r - images.before);
    }
  }

 private:
  void differentiate(const Tile& windows, int64_t row, C* out) {
    const auto loop = loops[upstream.by_window][images.masked ? 2 : images.shared ? 1 : 0];
    if (upstream.by_window) {
      const int64_t base = (windows.plane * images.window_rows + row) * images.window_columns + windows.column;
      for (int64_t at = 0; at < windows.columns; at += kChunk) {
        const int64_t n = std::min(kChunk, windows.columns - at);
        std::copy_n(upstream.map.fetch(base + at, n, base + at + images.window_columns, buffer), n, map.get() + at);
      }
      loop(SimilarityRow<C>(moments), map.get(), 0, 0, windows.columns, step, out);
    } else {
      loop(SimilarityRow<C>(moments), nullptr, upstream.of_plane(0, windows.plane),
           upstream.of_plane(1, windows.plane), windows.columns, step, out);
    }
  }

  void write(const Tile& tile, int64_t row) {
    images.blur.down(ring.last(), images.weights.get(), images.size, tile.columns, step, sums.get());
    pixels.read(tile.plane, row, tile.column, tile.columns);
    (images.masked ? kept : all)(sums.get(), step, pixels.s.get(), pixels.d.get(), pixels.keep.get(), tile.columns,
                                 images.scale, first.get(), second.get());
    const int64_t at = (tile.plane * images.height + row) * images.width + tile.column;
    if (dx) store(*dx, at, tile.columns, first.get());
    if (dy) store(*dy, at, tile.columns, second.get());
  }

  static void store(const Sink<C>& sink, int64_t at, int64_t n, C* values) {
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t m = std::min(kChunk, n - done);
      C* to = sink.target(at + done, values + done);
      if (to != values + done) std::copy_n(values + done, m, to);
      sink.commit(at + done, m, values + done);
    }
  }
};

template <class C>
void backward(const Images<C>& images, const Upstream<C>& upstream, const Tensor* dx, const Tensor* dy) {
  Sink<C> first, second;
  if (dx) first.bind(View(*dx), images.shape, images.order);
  if (dy) second.bind(View(*dy), images.shape, images.order);
  images.for_tiles(images.height, images.width, [&](int64_t columns) {
    return std::make_unique<Backward<C>>(images, upstream, dx ? &first : nullptr, dy ? &second : nullptr, columns);
  });
}

std::tuple<Tensor, Tensor> ssim_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                         const std::optional<Tensor>& mask, double data_range, int64_t win_size,
                                         double win_sigma, double k1, double k2, bool same, bool by_window,
                                         bool need_input, bool need_target) {
  const View x(input), y(target);
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const Tensor dy = need_target ? output_like(y.shape(), y.dtype, target, y) : empty_vector(y.dtype, target);
  const auto run = [&](const auto& images) {
    using C = std::remove_reference_t<decltype(images.scale + 0)>;
    backward(images, Upstream<std::decay_t<C>>(grad, images, by_window), need_input ? &dx : nullptr,
             need_target ? &dy : nullptr);
  };
  if (x.dtype == DType::kDouble || y.dtype == DType::kDouble)
    run(Images<double>(x, y, mask, options));
  else
    run(Images<float>(x, y, mask, options));
  return {dx, dy};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_ssim_backward", TORCH_BOX(&ssim_backward)); }

}  // namespace safeops::cpu
