// The gradients of 1 - SSIM. Each window has a slope by each of its four moments; a pixel's gradient is the weighted
// sum of those of the windows that see it:
//     ds = sum w by_mean_s + 2 s sum w by_squares_s,  the same of d;  dx = ds + dd,  dy = ds - dd
// The weights are symmetric, so that this sum is a blur as well. The moments are made anew, a row of windows after the
// other.
// I/O: reads x, y, mask, and the map's gradient; writes dx, dy.
#include "common/reducer.h"
#include "cpu/images/similarity.h"

namespace safeops::cpu {

namespace {

// The slopes of n windows, an array each by E s, E d, E s^2, E d^2; of_loss: of 1 - SSIM in the map, or in the result.
template <class C, bool kMap, bool kShare, bool kCounted>
void slopes_loop(const SimilarityRow<C>& row, const C* map, C of_loss, C of_contrast, int64_t n, int64_t step, C* out) {
  const SimilarityRow<C> r = row;
  C *by_s = out, *by_d = out + step, *by_ss = out + 2 * step, *by_dd = out + 3 * step;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C inverse = r.template inverse<kShare, kCounted>(i);
    const C by_loss = kMap ? of_loss * map[i] : of_loss;
    const MomentSlopes<C> slope = r.template at<kShare>(i, inverse).slopes(by_loss, of_contrast);
    const auto store = [&](C* to, C value) {  // the mean is the sum times the inverse
      if constexpr (kShare) value *= inverse;
      to[i] = kCounted ? select_or_zero(r.counted[i] != 0, value) : value;
    };
    store(by_s, slope.s), store(by_d, slope.d), store(by_ss, slope.ss), store(by_dd, slope.dd);
  }
}

// A pixel that no window sees has gradient 0, also where it is NaN: all its sums are 0.
template <class C, bool kMask>
void gradient_loop(const C* sums, int64_t step, const C* s, const C* d, const uint8_t* keep, int64_t n, C scale, C* dx,
                   C* dy) {
  const C *by_s = sums, *by_d = sums + step, *by_ss = sums + 2 * step, *by_dd = sums + 3 * step;
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

// What comes in: the gradient of each window, of the sums of each plane, or of what all windows come to.
template <class C>
struct Upstream {
  bool by_window;
  C of_map;  // -1 where the map is of SSIM, and not of 1 - SSIM
  View view, share;  // share: a window's in that, or empty
  Source<C> map;
  int64_t classes;

  Upstream(const Tensor& grad, const Tensor& share_, const Images<C>& images, int64_t reduction, bool similarity)
      : by_window(reduction == Reducer::kNone), of_map(similarity ? -1 : 1), view(grad), share(share_),
        classes(images.shape.size[1]) {
    const bool planes = reduction == Reducer::kPlanes;
    const int64_t sums[] = {3, images.shape.size[0], classes};
    const Shape shape = by_window ? images.map : planes ? Shape(3, sums) : Shape();
    STD_TORCH_CHECK(shape.is(view.ndim, view.sizes) && view.dtype == (planes ? DType::kDouble : dtype_v<C>) &&
                        share.ndim == (by_window || planes) && share.dtype == DType::kDouble,
                    "_ssim_backward: grad and share must be of the results of _ssim");
    if (by_window) map.bind(view, images.map, Order::contiguous(images.map));
  }

  C of_plane(int64_t k, int64_t plane) const {
    if (share.ndim == 0)
      return k ? C(0) : static_cast<C>(*reinterpret_cast<const C*>(view.data) *
                                       *reinterpret_cast<const double*>(share.data));
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
  Slices<C> rows, slices;  // the last rows, and of volumes the last slices, of blurred slopes
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
           int64_t tall, int64_t wide)
      : images(images_), upstream(upstream_), dx(dx_), dy(dy_),
        moments(images_, tall + images_.size - 1, wide + images_.size - 1), pixels(images_, wide), step(moments.step),
        rows(images_.size, 4 * step), slices(images_.slices_of_window(), images_.volumes ? 4 * step * tall : 0),
        slopes(new C[4 * step]()), sums(new C[4 * step]()), map(new C[step]()), first(new C[step]()),
        second(new C[step]()) {
    if (upstream.by_window) upstream.map.prime(buffer);
  }

  // The gradients of a tile of pixels.
  void run(const Tile& tile_, int64_t) {
    tile = tile_;
    const int64_t back = images.size - 1 - images.before;  // how far before a pixel the windows begin that see it
    const int64_t back_slice = images.volumes ? back : 0;
    const auto from = [](int64_t at, int64_t reach) { return std::max<int64_t>(at - reach, 0); };
    const auto to = [](int64_t at, int64_t reach, int64_t end) { return std::min(at + reach, end); };
    windows.plane = tile.plane;
    windows.slice = from(tile.slice, back_slice), windows.row = from(tile.row, back);
    windows.column = from(tile.column, back);
    windows.slices = to(tile.slice + tile.slices, images.before_slice, images.window_slices) - windows.slice;
    windows.rows = to(tile.row + tile.rows, images.before, images.window_rows) - windows.row;
    windows.columns = to(tile.column + tile.columns, images.before, images.window_columns) - windows.column;
    std::fill_n(slopes.get(), 4 * step, C(0));  // where there are no windows
    moments.begin(windows);
    pixels.level = moments.pixels.level;
    slices.pushed = 0;
    for (int64_t z = tile.slice - back_slice; z < tile.slice + tile.slices + images.before_slice; ++z) {
      blur_slice(z, back);
      if (!images.volumes || slices.pushed < slices.size) continue;
      for (int64_t r = 0; r < tile.rows; ++r) {
        images.blur.down(slices.last(4 * step * r), images.weights.get(), slices.size, tile.columns, step, sums.get());
        write(z - images.before_slice, tile.row + r);
      }
    }
  }

 private:
  Tile tile{}, windows{};  // the windows that see a pixel of the tile

  // The slopes of a slice of windows, blurred across and down: written, or of volumes pushed.
  void blur_slice(int64_t z, int64_t back) {
    C* out = images.volumes ? slices.push() : sums.get();
    if (z < windows.slice || z >= windows.slice + windows.slices) {
      std::fill_n(out, slices.length, C(0));
      return;
    }
    const C* w = images.weights.get();
    rows.pushed = 0;
    for (int64_t r = tile.row - back; r < tile.row + tile.rows + images.before; ++r) {
      C* next = rows.push();
      if (r < windows.row || r >= windows.row + windows.rows) {
        std::fill_n(next, rows.length, C(0));
      } else {
        moments.advance();
        differentiate(z, r, slopes.get() + windows.column - (tile.column - back));
        const C* row = slopes.get();
        images.blur.across(&row, w, images.size, tile.columns, step, next);
      }
      if (rows.pushed < images.size) continue;
      images.blur.down(rows.last(0), w, images.size, tile.columns, step, out);
      if (images.volumes)
        out += 4 * step;
      else
        write(z, r - images.before);
    }
  }

  void differentiate(int64_t slice, int64_t row, C* out) {
    const auto loop = loops[upstream.by_window][images.masked ? 2 : images.shared ? 1 : 0];
    const int64_t n = windows.columns;
    if (!upstream.by_window)
      return loop(SimilarityRow<C>(moments), nullptr, upstream.of_plane(0, tile.plane),
                  upstream.of_plane(1, tile.plane), n, step, out);
    const int64_t plane_row = (tile.plane * images.window_slices + slice) * images.window_rows + row;
    const int64_t base = plane_row * images.window_columns + windows.column;
    for (int64_t at = 0; at < n; at += kChunk) {
      const int64_t m = std::min(kChunk, n - at);
      std::copy_n(upstream.map.fetch(base + at, m, base + at + images.window_columns, buffer), m, map.get() + at);
    }
    loop(SimilarityRow<C>(moments), map.get(), upstream.of_map, 0, n, step, out);
  }

  // The gradients of a row of pixels, of the blurred slopes in `sums`.
  void write(int64_t slice, int64_t row) {
    pixels.read(tile.plane, slice, row, tile.column, tile.columns);
    (images.masked ? kept : all)(sums.get(), step, pixels.s.get(), pixels.d.get(), pixels.keep.get(), tile.columns,
                                 images.scale, first.get(), second.get());
    const int64_t plane_row = (tile.plane * images.depth + slice) * images.height + row;
    const int64_t at = plane_row * images.width + tile.column;
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
void backward(const Images<C>& images, const Tensor& grad, const Tensor& share, int64_t reduction, bool similarity,
              const Tensor* dx, const Tensor* dy) {
  const Upstream<C> upstream(grad, share, images, reduction, similarity);
  Sink<C> first, second;
  if (dx) first.bind(View(*dx), images.shape, images.order);
  if (dy) second.bind(View(*dy), images.shape, images.order);
  images.for_tiles(images.depth, images.height, images.width, [&](int64_t tall, int64_t wide) {
    return std::make_unique<Backward<C>>(images, upstream, dx ? &first : nullptr, dy ? &second : nullptr, tall, wide);
  });
}

std::tuple<Tensor, Tensor> ssim_backward(const Tensor& grad, const Tensor& share, const Tensor& input,
                                         const Tensor& target, const std::optional<Tensor>& mask, int64_t reduction,
                                         double data_range, int64_t win_size, double win_sigma, double k1, double k2,
                                         bool same, bool need_input, bool need_target, bool similarity) {
  const View x(input), y(target);
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const Tensor dy = need_target ? output_like(y.shape(), y.dtype, target, y) : empty_vector(y.dtype, target);
  const auto run = [&](const auto& images) {
    backward(images, grad, share, reduction, similarity, need_input ? &dx : nullptr, need_target ? &dy : nullptr);
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
