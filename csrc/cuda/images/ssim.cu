// ssim, ssim_loss, ms_ssim: 1 - SSIM of each window (common/similarity.h), as a map or as three numbers of each plane:
// its sum, that of contrast', and how many windows count. A block has a tile of windows; a second launch adds up the
// tiles of a plane.
// I/O: reads x, y, mask, where tiles meet more than once; writes the map, or three numbers of a plane.
#include "moments.cuh"
#include "parts.cuh"
#include "ssim_volumes.h"

namespace safeops::cuda {
namespace {

// Where to: a map, or (3, planes, tiles) sums.
struct Result {
  Field map;
  char* sums;
};

struct Sums {
  double loss, contrast, count;
};

template <class C, int kSize, bool kShared>
__global__ void __launch_bounds__(kTileThreads, kMinBlocks<kSize>)
    ssim_kernel(const __grid_constant__ Images<C> images, const __grid_constant__ Result result) {
  using T = Tile<C, kSize, kShared>;
  constexpr int kRun = T::kRun;
  T tile(images);
  tile.read(tile.row * kWindows<C> - images.before, tile.column * kWindows<C> - images.before);
  tile.across();
  const int column = threadIdx.x % kWindows<C>, at = threadIdx.x / kWindows<C> * kRun;
  C loss = 0, contrast = 0, count = 0;  // of one run: fp32 holds its sums
  if (at < kWindows<C>) {
    C sum[T::kArrays][kRun] = {};
    tile.down(at, column, sum);
    const Field& map = result.map;
    char* first = map.base + tile.n * map.n + tile.c * map.c;
    first += tile.map_row(at) * map.row + tile.map_column(column) * map.column;
    tile.each_window(sum, at, column, [&](int k, bool counted, const Similarity<C>& it, C) {
      if (map.base) store(first + k * map.row, counted ? it.loss() : C(0));
      else if (counted) loss += it.loss(), contrast += it.contrast, count += 1;
    });
  }
  if (result.map.base) return;
  // (in the place of the pixels, which no thread still reads)
  const Sums total = block_reduce<kTileThreads>(
      Sums{loss, contrast, count}, reinterpret_cast<Sums*>(tile.s), [](Sums a, const Sums& b) {
        a.loss += b.loss, a.contrast += b.contrast, a.count += b.count;
        return a;
      });
  if (threadIdx.x) return;
  char* p = result.sums + int64_t(blockIdx.x) * sizeof(double);
  const int64_t step = int64_t(gridDim.x) * sizeof(double);
  store(p, total.loss), store(p + step, total.contrast), store(p + 2 * step, total.count);
}

Tensor ssim(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask, double data_range,
            int64_t win_size, double win_sigma, double k1, double k2, bool same, bool by_window) {
  constexpr const char* kOp = "safeops::_ssim";
  const Options options{data_range, win_size, win_sigma, k1, k2, same};
  const Checked is(input, target, mask, options, kOp);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const int64_t planes = is.shape.size[0] * is.shape.size[1];
  const int64_t shape[] = {3, is.shape.size[0], is.shape.size[1]};
  const Type type = is.wide ? kF64 : kF32;
  const Tensor out =
      by_window ? safeops::empty(is.map, DType(type), input) : safeops::empty(Shape(3, shape), DType::kDouble, input);
  if (is.shape.ndim == 5) {
    ssim_of_volumes(out, input, target, mask, options, is, by_window);
    check_launch(kOp);
    return out;
  }
  const cudaStream_t stream = current_stream(input);
  const auto run = [&](auto compute, auto known, auto shared) {
    using C = decltype(compute);
    const auto images = make_images<C>(input, target, mask, options, is, is.map.size + 2, kWindows<C>);
    const unsigned blocks = blocks_of(images, is);
    const auto launch = [&](const Result& to) {
      const int bytes = Tile<C, known(), shared()>::bytes(int(win_size));
      start_blocks(ssim_kernel<C, known(), shared()>, blocks, kTileThreads, bytes, stream, images, to);
    };
    const int64_t tiles = planes ? blocks / planes : 0, parts = 3 * planes * tiles;
    char* const sums = static_cast<char*>(out.data_ptr());
    if (by_window) {
      if (blocks) launch({field(out, type, is.map), nullptr});
    } else if (tiles == 1) {
      launch({Field(), sums});
    } else if (planes) {  // (the sums of no tiles are 0)
      const Tensor workspace = safeops::empty(Shape(1, &parts), DType::kDouble, input);
      if (tiles) launch({Field(), static_cast<char*>(workspace.data_ptr())});
      merge_parts({static_cast<char*>(workspace.data_ptr()), sums, tiles}, 3 * planes, stream);
    }
  };
  by_kind(is.wide, is.shared, win_size, run);
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_ssim", TORCH_BOX(&ssim)); }

}  // namespace safeops::cuda
