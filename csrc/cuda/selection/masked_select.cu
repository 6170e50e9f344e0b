// masked_select: the kept elements of input, in their order. The one op whose size the host must know: it waits for the
// count. Its backward is masked_scatter.
// I/O: read mask twice, read input, write out.
#include "selection.cuh"

namespace safeops::cuda {
namespace {

// Operands: order, mask.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ Plan<2> mask, const __grid_constant__ Ranks ranks) {
  const int64_t tile = next_tile(ranks);
  if (tile < ranks.tiles) rank_of_first(ranks, tile, flags_of<1>(mask, ranks, tile));
}

struct Pack {
  Ranks ranks;
  char* out;
  bool dense;  // input
};

// Operands: order, mask, input. By now every tile's status counts all up to it.
template <class T>
__global__ void __launch_bounds__(kThreads, 7)
    pack_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ Pack pack) {
  const int64_t tile = warp_number();
  if (tile >= pack.ranks.tiles) return;
  const char* before = reinterpret_cast<const char*>(pack.ranks.status + tile - 1);
  const int64_t first = tile ? int64_t(load<uint64>(before) >> 2) : 0;
  const Flags flags = flags_of<1>(plan, pack.ranks, tile);
  const auto run = [&](auto at_once, const auto& input) {
    each_of_tile<true, at_once()>(
        flags, tile, plan.numel, first, [&](int64_t i, bool, int64_t) { return load<T>(input(i)); },
        [&](int64_t, bool, int64_t rank, T value) { store(pack.out + rank * sizeof(T), value); });
  };
  if (pack.dense) run(std::integral_constant<int, kDense<T>>(), Dense<T>{plan.base[2]});
  else run(std::integral_constant<int, 4>(), [&](int64_t i) { return at(plan, 2, i); });
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
  Tensor workspace, count;
  const Ranks ranks = make_ranks(full, m, input, workspace, count, stream);
  start(count_kernel, blocks_of(ranks), stream, plan_in_order<1>(full, {m.all()}), ranks);
  cudaMemcpyAsync(&total, ranks.count, sizeof(total), cudaMemcpyDeviceToHost, stream);
  const cudaError_t waited = cudaStreamSynchronize(stream);
  STD_TORCH_CHECK(waited == cudaSuccess, kOp, ": waiting for the count failed: ", cudaGetErrorString(waited));
  const int64_t elements = pairs ? total / 2 : total;
  const Tensor out = new_like(Shape(1, &elements), input);
  if (total == 0) return out;
  const Plan<3> plan = plan_in_order<2>(full, {m.all(), x.all()});
  by_width(x.width, [&](auto bits) {
    const Pack pack{ranks, static_cast<char*>(out.data_ptr()), is_dense(plan, x.width)};
    start(pack_kernel<decltype(bits)>, blocks_of(ranks), stream, plan, pack);
  });
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_masked_select", TORCH_BOX(&masked_select)); }

}  // namespace safeops::cuda
