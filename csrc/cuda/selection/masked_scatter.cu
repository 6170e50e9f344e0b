// masked_scatter, masked_select: the first as such, and as the backward of the second.
// out[i] = mask[i] and rank(i) < source.numel() ? source[rank(i)] : input[i], the rank counted in the order of the
// elements, whatever their layout. Backward: the same selection of the gradient, and its kept elements packed.
// I/O: read mask, read input, read source, write out.
#include "selection.cuh"

namespace safeops::cuda {
namespace {

struct Merge {
  Ranks ranks;
  Plan<2> source;
  bool dense;  // input, out and source
};

// Operands: order, mask, input, out.
template <class T>
__global__ void __launch_bounds__(kThreads, 7)
    merge_kernel(const __grid_constant__ Plan<4> plan, const __grid_constant__ Merge merge) {
  const int64_t tile = next_tile(merge.ranks);
  if (tile >= merge.ranks.tiles) return;
  const Flags flags = flags_of<1>(plan, merge.ranks, tile);
  const int64_t first = rank_of_first(merge.ranks, tile, flags);
  const auto run = [&](auto at_once, const auto& source, const auto& input, const auto& out) {
    each_of_tile<false, at_once()>(
        flags, tile, plan.numel, first,
        [&](int64_t i, bool kept, int64_t rank) {
          return load<T>(kept && rank < merge.source.numel ? source(rank) : input(i));
        },
        [&](int64_t i, bool, int64_t, T value) { store(const_cast<char*>(out(i)), value); });
  };
  if (merge.dense)
    run(std::integral_constant<int, kDense<T>>(), Dense<T>{merge.source.base[1]}, Dense<T>{plan.base[2]},
        Dense<T>{plan.base[3]});
  else
    run(std::integral_constant<int, 4>(), [&](int64_t i) { return at(merge.source, 1, i); },
        [&](int64_t i) { return at(plan, 2, i); }, [&](int64_t i) { return at(plan, 3, i); });
}

struct Part {
  Ranks ranks;
  char *d_input, *d_source;
  int64_t available;
  bool dense;  // grad
};

// Operands: order, mask, grad. Both gradients are contiguous.
template <class T>
__global__ void __launch_bounds__(kThreads, 7) part_kernel(const __grid_constant__ Plan<3> plan, Part part) {
  const int64_t tile = next_tile(part.ranks);
  if (tile >= part.ranks.tiles) return;
  const Flags flags = flags_of<1>(plan, part.ranks, tile);
  const int64_t first = rank_of_first(part.ranks, tile, flags);
  const auto run = [&](auto at_once, const auto& grad) {
    each_of_tile<false, at_once()>(
        flags, tile, plan.numel, first, [&](int64_t i, bool, int64_t) { return load<T>(grad(i)); },
        [&](int64_t i, bool kept, int64_t rank, T value) {
          const bool taken = kept && rank < part.available;
          store(part.d_input + i * sizeof(T), taken ? T(0) : value);
          if (taken) store(part.d_source + rank * sizeof(T), value);
        });
  };
  if (part.dense) run(std::integral_constant<int, kDense<T>>(), Dense<T>{plan.base[2]});
  else run(std::integral_constant<int, 4>(), [&](int64_t i) { return at(plan, 2, i); });
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
  const Merge merge{make_ranks(out.shape, m, input, workspace, count, stream), packed,
                    is_dense(plan, x.width) && is_dense(packed, x.width, 1)};
  by_width(x.width, [&](auto bits) {
    start(merge_kernel<decltype(bits)>, blocks_of(merge.ranks), stream, plan, merge);
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
  if (bytes) cudaMemsetAsync(d_source.data_ptr(), 0, bytes, stream);
  if (g.shape.numel() == 0) return {d_input, d_source};
  Tensor workspace, count;
  const Plan<3> plan = plan_in_order<2>(g.shape, {m.all(), g.all()});
  const Part part{make_ranks(g.shape, m, grad, workspace, count, stream), static_cast<char*>(d_input.data_ptr()),
                  static_cast<char*>(d_source.data_ptr()), bytes / g.width, is_dense(plan, g.width)};
  by_width(g.width, [&](auto bits) {
    start(part_kernel<decltype(bits)>, blocks_of(part.ranks), stream, plan, part);
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
