// masked_scatter, and the backward of masked_select.
// out[i] = mask[i] and rank(i) < source.numel() ? source[rank(i)] : input[i], where ranks count kept elements in the
// order of the shape. The backward masks the gradient for input, and packs its kept elements for source.
// I/O: read mask, read input, read source, write out.
#include "selection.cuh"

namespace safeops::cuda {
namespace {

struct Merge {
  Plan<2> source;
  Layout mask, input, from;  // from: layout of the source
  bool packed;               // out is contiguous and aligned
};

// Operands of plan: 0 only defines the order of the walk (plan_in_order); then mask, input, out.
template <class T>
__global__ void __launch_bounds__(kBlock, 3)
    merge_kernel(const __grid_constant__ Plan<4> plan, const __grid_constant__ Merge merge,
                 const __grid_constant__ Ranks ranks) {
  Tile<T> tile;
  tile.take(ranks);
  tile.read_mask(plan, merge.mask);
  TileElements<T> elements;
  elements.request(plan, 2, merge.input, tile);
  tile.rank(ranks);
  elements.receive(plan, 2, merge.input, tile);
  const char* source = merge.source.base[1];
  const int n = slots_for(merge.source.numel, tile.first, tile.kept_count);
  const int skip = merge.from ? skip_of<T>(source, tile.first) : 0;
  if (merge.from) request_run(tile.room(), source, tile.first, n, skip);
  else gather<2>(tile.room(), merge.source, 1, tile.first, n);
  await_requests();
  __syncthreads();
  elements.replace(tile, [&](T value, bool kept, int rank) {
    return kept && rank < n ? tile.room()[skip + rank] : value;
  });
  elements.write(plan.base[3], merge.packed, tile, plan.numel, [&](int64_t i) { return at(plan, 3, i); });
}

struct Gradients {
  char *d_input, *d_source;
  int64_t available;
  Layout mask, grad;
};

// The plan's operands: order, mask, grad. d_input and d_source are contiguous.
template <class T>
__global__ void __launch_bounds__(kBlock, sizeof(T) > 2 ? 3 : 2)
    part_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ Gradients gradients,
                const __grid_constant__ Ranks ranks) {
  Tile<T> tile;
  if (!tile.take(ranks))
    return tile.fill(ranks, gradients.available, [&](int64_t i) { store(gradients.d_source + i * sizeof(T), T(0)); });
  tile.read_mask(plan, gradients.mask);
  TileElements<T> elements;
  elements.request(plan, 2, gradients.grad, tile);
  tile.rank(ranks);
  elements.receive(plan, 2, gradients.grad, tile);
  const int n = slots_for(gradients.available, tile.first, tile.kept_count),
            skip = skip_of<T>(gradients.d_source, tile.first);
  elements.replace(tile, [&](T value, bool kept, int rank) {
    if (kept) tile.room()[skip + rank] = value;
    return kept && rank < n ? T(0) : value;
  });
  __syncthreads();
  write_run(tile.room(), gradients.d_source, tile.first, n, skip);
  elements.write(gradients.d_input, true, tile, plan.numel,
                 [&](int64_t i) { return gradients.d_input + i * sizeof(T); });
}

Tensor masked_scatter(const Tensor& input, const Tensor& source, const Tensor& mask) {
  constexpr const char* kOp = "safeops::_masked_scatter";
  STD_TORCH_CHECK(dtype_code(input) == dtype_code(source), kOp, ": input and source must have one dtype");
  check_device(source, input, kOp, "source");
  const Bits m = mask_of(mask, input, kOp);
  const Shape full = broadcast(View(input).shape(), View(mask).shape());
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor result = laid_like(full, input);
  if (full.numel() == 0) return result;
  Bits x(input), s(source), out(result);
  x.split(), s.split(), out.split();
  const cudaStream_t stream = current_stream(input);
  Tensor workspace, count;
  const Plan<4> plan = plan_in_order<3>(out.shape, {m.all(), x.all(), out.all()});
  const Plan<2> packed = plan_in_order<1>(s.shape, {s.all()});
  const Merge merge{packed, layout_of(plan, 1, 1), layout_of(plan, 2, x.width), layout_of(packed, 1, x.width),
                    layout_of(plan, 3, x.width) == kPacked};
  const Ranks ranks = make_ranks(plan.numel, x.width, 0, input, workspace, count, stream);
  by_width(x.width, [&](auto bits) {
    using T = decltype(bits);
    start_tiles<T>(merge_kernel<T>, ranks, 0, stream, plan, merge);
  });
  check_launch(kOp);
  return result;
}

std::tuple<Tensor, Tensor> masked_scatter_backward(const Tensor& grad, const Tensor& mask,
                                                   const std::vector<int64_t>& source_size) {
  constexpr const char* kOp = "safeops::_masked_scatter_backward";
  const Bits m = mask_of(mask, grad, kOp);
  const Shape source(static_cast<int>(source_size.size()), source_size.data());
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  Bits g(grad);
  const Tensor d_input = new_like(g.shape, grad), d_source = new_like(source, grad);
  const int64_t bytes = source.numel() * g.width;
  g.split();
  const cudaStream_t stream = current_stream(grad);
  if (g.shape.numel() == 0) {
    if (bytes) cudaMemsetAsync(d_source.data_ptr(), 0, bytes, stream);
    return {d_input, d_source};
  }
  Tensor workspace, count;
  const Plan<3> plan = plan_in_order<2>(g.shape, {m.all(), g.all()});
  const Gradients gradients{static_cast<char*>(d_input.data_ptr()), static_cast<char*>(d_source.data_ptr()),
                            bytes / g.width, layout_of(plan, 1, 1), layout_of(plan, 2, g.width)};
  const Ranks ranks = make_ranks(plan.numel, g.width, gradients.available, grad, workspace, count, stream);
  by_width(g.width, [&](auto bits) {
    using T = decltype(bits);
    start_tiles<T>(part_kernel<T>, ranks, 0, stream, plan, gradients);
  });
  check_launch(kOp);
  return {d_input, d_source};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_masked_scatter", TORCH_BOX(&masked_scatter));
  m.impl("_masked_scatter_backward", TORCH_BOX(&masked_scatter_backward));
}

}  // namespace safeops::cuda
