// The gradients of 1 - SSIM:
//     (1) The moments of the windows are recomputed, row by row. Each window has a slope by each of its four moments:
//         by_s, by_d, by_ss, by_dd.
//     (2) A moment is a weighted sum over pixels, so a pixel's gradient is a sum over the windows that see it:
//         ds = sum w by_s + 2 s sum w by_ss,  dd = sum w by_d + 2 d sum w by_dd
//         The weights are symmetric, so these sums are a blur of the slopes.
//     (3) s and d are x + y and x - y over the data range: dx = (ds + dd) / range,  dy = (ds - dd) / range
// I/O: read x, y, mask, and the map's gradient; write dx, dy.
#include "common/reducer.h"
#include "cpu/images/similarity.h"

namespace safeops::cpu {

namespace {

// Writes the derivatives of n windows with respect to E s, E d, E s^2, E d^2, as four arrays. The upstream gradient of
// 1 - SSIM is loss_grad map[i] (kMap) or loss_grad; the upstream gradient of contrast' is contrast_grad.
template <class C, bool kMap, bool kDivide, bool kCounted>
void slopes_loop(const SimilarityRow<C>& row, const C* map, C loss_grad, C contrast_grad, int64_t n, int64_t step,
                 C* out) {
  const SimilarityRow<C> r = row;
  C *by_s = out, *by_d = out + step, *by_ss = out + 2 * step, *by_dd = out + 3 * step;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const C inverse = r.template inverse<kDivide, kCounted>(i);
    const C by_loss = kMap ? loss_grad * map[i] : loss_grad;
    const MomentSlopes<C> slope = r.template at<kDivide>(i, inverse).slopes(by_loss, contrast_grad);
    const auto store = [&](C* to, C value) {  // kDivide: a mean is its sum times `inverse`
      if constexpr (kDivide) value *= inverse;
      to[i] = kCounted ? select_or_zero(r.counted[i] != 0, value) : value;
    };
    store(by_s, slope.s), store(by_d, slope.d), store(by_ss, slope.ss), store(by_dd, slope.dd);
  }
}

// Computes dx, dy of n pixels from the blurred slopes. With a mask, a pixel that no window sees (all its sums are 0)
// has gradient 0, even if it is NaN.
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

// The upstream gradient: with respect to each window (no reduction), to the sums of each plane, or to the mean or sum
// of all windows.
template <class C>
struct Upstream {
  bool by_window;
  C map_sign;  // 1 for a map of 1 - SSIM, -1 for a map of SSIM
  View view, result_slope;  // result_slope: d(mean or sum)/d(one window); empty for maps and planes
  Source<C> map;
  int64_t classes;

  Upstream(const Tensor& grad, const Tensor& result_slope_, const Images<C>& images, int64_t reduction, bool similarity)
      : by_window(reduction == Reducer::kNone), map_sign(similarity ? -1 : 1), view(grad), result_slope(result_slope_),
        classes(images.shape.size[1]) {
    const bool planes = reduction == Reducer::kPlanes;
    const int64_t sums[] = {3, images.shape.size[0], classes};
    const Shape shape = by_window ? images.map : planes ? Shape(3, sums) : Shape();
    STD_TORCH_CHECK(shape.is(view.ndim, view.sizes) && view.dtype == (planes ? DType::kDouble : dtype_v<C>) &&
                        result_slope.ndim == (by_window || planes) && result_slope.dtype == DType::kDouble,
                    "_ssim_backward: grad and result_slope must be of the results of _ssim");
    if (by_window) map.bind(view, images.map, Order::contiguous(images.map));
  }

  C of_plane(int64_t k, int64_t plane) const {
    if (result_slope.ndim == 0)
      return k ? C(0) : static_cast<C>(*reinterpret_cast<const C*>(view.data) *
                                       *reinterpret_cast<const double*>(result_slope.data));
    const double* g = reinterpret_cast<const double*>(view.data);
    const int64_t n = plane / classes, c = plane % classes;
    return static_cast<C>(g[k * view.strides[0] + n * view.strides[1] + c * view.strides[2]]);
  }
};

template <class C>
struct Backward {
  const Images<C>& images;
  const Upstream<C>& upstream;
  const Sink<C>*dx, *dy;  // null: this gradient is not wanted
  Moments<C> moments;
  Pixels<C> pixels;
  int64_t step;
  Slices<C> rows, slices;  // the last rows of blurred slopes; for volumes the last slices
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
           int64_t tile_rows, int64_t tile_columns)
      : images(images_), upstream(upstream_), dx(dx_), dy(dy_),
        moments(images_, tile_rows + images_.size - 1, tile_columns + images_.size - 1), pixels(images_, tile_columns),
        step(moments.step), rows(images_.size, 4 * step),
        slices(images_.slices_of_window(), images_.volumes ? 4 * step * tile_rows : 0),
        slopes(new C[4 * step]()), sums(new C[4 * step]()), map(new C[step]()), first(new C[step]()),
        second(new C[step]()) {
    if (upstream.by_window) upstream.map.prime(buffer);
  }

  // Computes the gradients of a tile of pixels.
  void run(const Tile& tile_, int64_t) {
    tile = tile_;
    const int64_t back = images.size - 1 - images.before;  // from the first window that sees a pixel to the pixel
    const int64_t back_slice = images.volumes ? back : 0;
    const auto clamped_start = [](int64_t at, int64_t reach) { return std::max<int64_t>(at - reach, 0); };
    const auto clamped_end = [](int64_t at, int64_t reach, int64_t end) { return std::min(at + reach, end); };
    windows.plane = tile.plane;
    windows.slice = clamped_start(tile.slice, back_slice), windows.row = clamped_start(tile.row, back);
    windows.column = clamped_start(tile.column, back);
    windows.slices = clamped_end(tile.slice + tile.slices, images.before_slice, images.window_slices) - windows.slice;
    windows.rows = clamped_end(tile.row + tile.rows, images.before, images.window_rows) - windows.row;
    windows.columns = clamped_end(tile.column + tile.columns, images.before, images.window_columns) - windows.column;
    std::fill_n(slopes.get(), 4 * step, C(0));  // positions without a window stay 0
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
  Tile tile{}, windows{};  // windows: all windows that see a pixel of the tile

  // Blurs the derivatives of a slice of windows across and down. For images it writes the gradients; for volumes it
  // pushes the blurred slice.
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
    const auto loop = loops[upstream.by_window][images.masked ? 2 : images.incomplete ? 1 : 0];
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
    loop(SimilarityRow<C>(moments), map.get(), upstream.map_sign, 0, n, step, out);
  }

  // Writes the gradients of a row of pixels, from the blurred slopes in `sums`.
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
void backward(const Images<C>& images, const Tensor& grad, const Tensor& result_slope, int64_t reduction,
              bool similarity, const Tensor* dx, const Tensor* dy) {
  const Upstream<C> upstream(grad, result_slope, images, reduction, similarity);
  Sink<C> first, second;
  if (dx) first.bind(View(*dx), images.shape, images.order);
  if (dy) second.bind(View(*dy), images.shape, images.order);
  images.for_tiles(images.depth, images.height, images.width, [&](int64_t tile_rows, int64_t tile_columns) {
    return std::make_unique<Backward<C>>(images, upstream, dx ? &first : nullptr, dy ? &second : nullptr, tile_rows,
                                         tile_columns);
  });
}

std::tuple<Tensor, Tensor> ssim_backward(const Tensor& grad, const Tensor& result_slope, const Tensor& input,
                                         const Tensor& target, const std::optional<Tensor>& mask, int64_t reduction,
                                         double data_range, int64_t win_size, double win_sigma, double k1, double k2,
                                         bool same, bool need_input, bool need_target, bool similarity) {
  const View x(input), y(target);
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const Tensor dy = need_target ? output_like(y.shape(), y.dtype, target, y) : empty_vector(y.dtype, target);
  const auto run = [&](const auto& images) {
    backward(images, grad, result_slope, reduction, similarity, need_input ? &dx : nullptr,
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
