// 1 - SSIM of windows, and their contrast' (common/similarity.h defines both).
// I/O: read x, y, mask; write the map, or a few numbers.
#include <tuple>

#include "common/reducer.h"
#include "cpu/images/similarity.h"

namespace safeops::cpu {

namespace {

// Computes base + sign (1 - SSIM), and contrast', of n windows; both are 0 for a window that does not count.
template <class C, bool kDivide, bool kCounted>
void similarity_loop(const SimilarityRow<C>& row, int64_t n, C base, C sign, C* loss, C* contrast) {
  const SimilarityRow<C> r = row;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const Similarity<C> at = r.template at<kDivide>(i, r.template inverse<kDivide, kCounted>(i));
    const C value = base + sign * at.loss();
    loss[i] = kCounted ? select_or_zero(r.counted[i] != 0, value) : value;
    contrast[i] = kCounted ? select_or_zero(r.counted[i] != 0, at.contrast) : at.contrast;
  }
}

template <class C>
void sum_loop(const C* values, int64_t n, double* sum) {
  double total = 0;
  _Pragma("omp simd reduction(+ : total)")
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(values[i]);
  *sum += total;
}

template <class C>
struct Forward {
  const Images<C>& images;
  const Sink<C>* map;  // output: the map of SSIM or of 1 - SSIM; null if `sums` are computed
  bool similarity;
  double* sums;
  Moments<C> moments;
  std::unique_ptr<C[]> contrast, loss;
  decltype(pick<&similarity_loop<C, false, false>>())
      all = pick<&similarity_loop<C, false, false>>(),
      kept = pick<&similarity_loop<C, true, true>>(), padded = pick<&similarity_loop<C, true, false>>();
  decltype(pick<&sum_loop<C>>()) add = pick<&sum_loop<C>>();
  decltype(pick<&rows_loop<uint8_t, int64_t>>()) count = pick<&rows_loop<uint8_t, int64_t>>();

  Forward(const Images<C>& images_, const Sink<C>* map_, bool similarity_, double* sums_, int64_t tile_rows,
          int64_t tile_columns)
      : images(images_), map(map_), similarity(similarity_), sums(sums_), moments(images_, tile_rows, tile_columns),
        contrast(new C[moments.step]()), loss(new C[moments.step]()) {}

  void run(const Tile& tile, int64_t tile_index) {
    moments.begin(tile);
    const auto loop = images.masked ? kept : images.incomplete ? padded : all;
    const C base = map && similarity ? 1 : 0, sign = map && similarity ? -1 : 1;
    double total[3] = {};
    for (int64_t i = 0; i < tile.slices * tile.rows; ++i) {
      moments.advance();
      const int64_t slice = tile.plane * images.window_slices + i / tile.rows, row = tile.row + i % tile.rows;
      const int64_t at = (slice * images.window_rows + row) * images.window_columns + tile.column;
      loop(SimilarityRow<C>(moments), tile.columns, base, sign, loss.get(), contrast.get());
      if (map) {
        write(at, tile.columns);
        continue;
      }
      add(loss.get(), tile.columns, total);
      add(contrast.get(), tile.columns, total + 1);
      int64_t counted = tile.columns;
      if (images.masked) count(moments.counted.get(), 1, tile.columns, &counted);
      total[2] += static_cast<double>(counted);
    }
    if (!map) std::copy_n(total, 3, sums + 3 * tile_index);
  }

 private:
  void write(int64_t at, int64_t n) const {
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t m = std::min(kChunk, n - done);
      std::copy_n(loss.get() + done, m, map->target(at + done, loss.get() + done));
    }
  }
};

// Returns (map, empty), (sums of each plane, empty), or (mean or sum of all windows, its derivative by one window's
// value).
template <class C>
std::tuple<Tensor, Tensor> forward(const Images<C>& images, const Reducer& by, bool similarity, const Tensor& like) {
  const int64_t tiles = images.tiles_of_plane(images.window_rows, images.window_columns);
  const auto run = [&](const Sink<C>* map, double* sums) {
    const auto start = [&](int64_t tile_rows, int64_t tile_columns) {
      return std::make_unique<Forward<C>>(images, map, similarity, sums, tile_rows, tile_columns);
    };
    images.for_tiles(images.window_slices, images.window_rows, images.window_columns, start);
  };
  if (by.kind == Reducer::kNone) {
    const Tensor out = new_output(images.map, dtype_v<C>, like);
    Sink<C> map;
    map.bind(View(out), images.map, Order::contiguous(images.map));
    run(&map, nullptr);
    return {out, empty_vector(DType::kDouble, like)};
  }
  const std::unique_ptr<double[]> sums(new double[images.planes * tiles * 3]());
  run(nullptr, sums.get());
  const int64_t shape[] = {3, images.shape.size[0], images.shape.size[1]};
  const Tensor out = empty(Shape(3, shape), DType::kDouble, like);
  double *to = reinterpret_cast<double*>(View(out).data), all[3] = {};
  for (int64_t p = 0; p < images.planes; ++p)
    for (int k = 0; k < 3; ++k) {
      double total = 0;
      for (int64_t t = p * tiles; t < (p + 1) * tiles; ++t) total += sums[3 * t + k];
      to[k * images.planes + p] = total, all[k] += total;
    }
  if (by.kind == Reducer::kPlanes) return {out, empty_vector(DType::kDouble, like)};
  const Tensor value = empty(Shape(), dtype_v<C>, like), result_slope = empty(Shape(), DType::kDouble, like);
  const double loss = all[0], count = all[2], slope = by.slope(count);
  *reinterpret_cast<C*>(View(value).data) = static_cast<C>(by.value(similarity ? count - loss : loss, count));
  *reinterpret_cast<double*>(View(result_slope).data) = similarity ? -slope : slope;
  return {value, result_slope};
}

std::tuple<Tensor, Tensor> ssim(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                                int64_t reduction, bool similarity, bool empty_nan, double data_range,
                                int64_t win_size, double win_sigma, double k1, double k2, bool same) {
  const View x(input), y(target);
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const Reducer by{reduction, empty_nan};
  if (x.dtype == DType::kDouble || y.dtype == DType::kDouble)
    return forward(Images<double>(x, y, mask, options), by, similarity, input);
  return forward(Images<float>(x, y, mask, options), by, similarity, input);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_ssim", TORCH_BOX(&ssim)); }

}  // namespace safeops::cpu
