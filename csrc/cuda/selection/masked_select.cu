// masked_select: the kept elements of input, in their order. The host must know the size of out, so it waits for the
// count of kept elements. The backward of masked_select is masked_scatter.
// I/O: read mask, write it as bits, read them, read input, write out.
#include "selection.cuh"

namespace safeops::cuda {
namespace {

// count_kernel stores three arrays for pack_kernel. bits: the mask. before: for each tile, the number of elements kept
// before it in its part. parts: for each part, the number kept in it. A part is the tiles that one block counts. Parts
// are few, so each block of pack_kernel adds up the earlier ones itself.
#ifndef SAFEOPS_PARTS  // tests have fewer
#define SAFEOPS_PARTS 1024
#endif
constexpr int kParts = SAFEOPS_PARTS;
struct Counts {
  Layout mask;
  char *bits, *before, *parts;
  int64_t tiles, tiles_per_part;
};

// Operands of `mask`: order, mask.
template <class T>
__global__ void __launch_bounds__(kBlock, 4)
    count_kernel(const __grid_constant__ Plan<2> mask, const __grid_constant__ Counts counts) {
  Tile<T> tile;
  uint64 sum = 0;
  const int64_t begin = blockIdx.x * counts.tiles_per_part;
  for (int64_t t = begin; t < begin + counts.tiles_per_part && t < counts.tiles; ++t) {
    tile.begin(t);
    tile.read_mask(mask, counts.mask);
    tile.count_mask();
    tile.each_word([&](int w) { store(counts.bits + (t * tile.kWords + w) * 4, tile.words()[w].x); });
    if (threadIdx.x == 0) store(counts.before + t * sizeof(uint64), sum);
    sum += tile.kept_count;
    __syncthreads();
  }
  if (threadIdx.x == 0) store(counts.parts + blockIdx.x * sizeof(uint64), sum);
}

// The plan's operands: order, input.
template <class T>
__global__ void __launch_bounds__(kBlock, 4)
    pack_kernel(const __grid_constant__ Plan<2> plan, const __grid_constant__ Counts counts, char* out, Layout layout) {
  Tile<T> tile;
  tile.begin(blockIdx.x);
  tile.each_word([&](int w) {
    tile.words()[w].x = load<uint32_t>(counts.bits + (tile.number * tile.kWords + w) * 4);
  });
  TileElements<T> input;
  input.request(plan, 1, layout, tile);
  int64_t sum = 0;
  const int part = int(tile.number / counts.tiles_per_part);
#pragma unroll
  for (int p = threadIdx.x, u = 0; u < kParts; u += kBlock, p += kBlock)
    if (p < part) sum += int64_t(load<uint64>(counts.parts + p * sizeof(uint64)));
  const auto add = [](int64_t a, int64_t b) { return a + b; };
  tile.first = block_reduce<kBlock>(sum, tile.scratch(), add) +
               int64_t(load<uint64>(counts.before + tile.number * sizeof(uint64)));
  tile.count();
  input.receive(plan, 1, layout, tile);
  const int skip = skip_of<T>(out, tile.first);
  input.collect(tile, skip);
  __syncthreads();
  write_run(tile.room(), out, tile.first, tile.kept_count, skip);
}

Tensor masked_select(const Tensor& input, const Tensor& mask) {
  constexpr const char* kOp = "safeops::_masked_select";
  const Bits m = mask_of(mask, input, kOp);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Bits x(input);
  const bool pairs = x.width == 16;
  x.split();
  const Shape full = broadcast(x.shape, m.shape);
  const cudaStream_t stream = current_stream(input);
  int64_t total = 0;
  if (full.numel() == 0) return new_like(Shape(1, &total), input);
  const int64_t tiles = (full.numel() + tile_of(x.width) - 1) / tile_of(x.width),
                tiles_per_part = (tiles + kParts - 1) / kParts;
  const int64_t parts = (tiles + tiles_per_part - 1) / tiles_per_part,
                words = parts + tiles * (1 + tile_of(x.width) / 64);
  const Tensor workspace = safeops::empty(Shape(1, &words), DType::kLong, input);
  char* first = static_cast<char*>(workspace.data_ptr());
  char* before = first + parts * sizeof(uint64);
  const Plan<2> plan = plan_in_order<1>(full, {m.all()});
  const Counts counts{layout_of(plan, 1, 1), before + tiles * sizeof(uint64), before, first, tiles, tiles_per_part};
  by_width(x.width, [&](auto type) {
    using T = decltype(type);
    const int shared = Tile<T>::kShared - Tile<T>::kRoom + kTile<T> + 16;
    start_blocks(count_kernel<T>, unsigned(parts), kBlock, shared, stream, plan, counts);
  });
  int64_t kept[kParts];
  cudaMemcpyAsync(kept, first, parts * sizeof(uint64), cudaMemcpyDeviceToHost, stream);
  const cudaError_t status = cudaStreamSynchronize(stream);
  STD_TORCH_CHECK(status == cudaSuccess, kOp, ": waiting for the count failed: ", cudaGetErrorString(status));
  for (int64_t p = 0; p < parts; ++p) total += kept[p];
  const int64_t elements = pairs ? total / 2 : total;
  const Tensor out = new_like(Shape(1, &elements), input);
  if (total == 0) return out;
  const Plan<2> values = plan_in_order<1>(full, {x.all()});
  by_width(x.width, [&](auto type) {
    using T = decltype(type);
    start_blocks(pack_kernel<T>, unsigned(tiles), kBlock, Tile<T>::kShared, stream, values, counts,
                 static_cast<char*>(out.data_ptr()), layout_of(values, 1, x.width));
  });
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_masked_select", TORCH_BOX(&masked_select)); }

}  // namespace safeops::cuda
