// masked_compact: values[k] = the k-th kept row of input, index[k] = its number, count = how many there are.
// I/O: read mask, write index, read it, read the kept rows, write values. Backward: write zeros, read grad and index,
// write the kept rows of dx.
#include "selection.cuh"

namespace safeops::cuda {
namespace {

struct Numbers {
  Ranks ranks;
  char* index;
  int64_t capacity;
};

// Operands: order, mask.
__global__ void __launch_bounds__(kThreads)
    number_kernel(const __grid_constant__ Plan<2> mask, const __grid_constant__ Numbers numbers) {
  const int64_t tile = next_tile(numbers.ranks);
  if (tile >= numbers.ranks.tiles) return;
  const Flags flags = flags_of<1>(mask, numbers.ranks, tile);
  const int64_t first = rank_of_first(numbers.ranks, tile, flags);
  if (first >= numbers.capacity) return;
  each_of_tile<true>(
      flags, tile, mask.numel, first, [](int64_t i, bool, int64_t) { return i; },
      [&](int64_t, bool, int64_t rank, int64_t i) {
        if (rank < numbers.capacity) store(numbers.index + rank * sizeof(int64_t), uint64(i));
      });
}

template <class T>
struct Take {
  Plan<2> lead;  // order, input: the dims that number the rows
  char *count, *index, *values;
  int64_t numel, columns;  // a slot of no columns still has its index
  T fill;
};

// Operands: order, input; of the dims behind those of the mask. Unused slots are marked here.
template <class T>
__global__ void __launch_bounds__(kThreads)
    take_kernel(const __grid_constant__ Plan<2> inner, const __grid_constant__ Take<T> take) {
  constexpr int U = kAtOnce<T>;
  const int64_t first = int64_t(blockIdx.x) * (kThreads * U) + threadIdx.x, used = int64_t(load<uint64>(take.count));
  int64_t row[U], column[U];
  T value[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t i = first + u * kThreads, k = take.columns == 1 ? i : i / take.columns;
    column[u] = i - k * take.columns;
    row[u] = -1;
    value[u] = take.fill;
    if (i >= take.numel) continue;
    char* index = take.index + k * sizeof(int64_t);
    if (k < used) row[u] = int64_t(load<uint64>(index));
    else if (column[u] == 0) store(index, ~uint64(0));
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (row[u] >= 0 && inner.numel)
      value[u] = load<T>(at(take.lead, 1, row[u]) + (at(inner, 1, column[u]) - inner.base[1]));
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < take.numel && inner.numel) store(take.values + i * sizeof(T), value[u]);
  }
}

struct Put {
  Plan<2> slots;  // order, index
  char* dx;
  int64_t rows, columns;
};

// Operands: order, grad. No two slots have the same row: each element of dx is written once, or stays 0.
template <class T>
__global__ void __launch_bounds__(kThreads)
    put_kernel(const __grid_constant__ Plan<2> grad, const __grid_constant__ Put put) {
  constexpr int U = kAtOnce<T>;
  const int64_t first = int64_t(blockIdx.x) * (kThreads * U) + threadIdx.x;
  char* to[U];
  T value[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t i = first + u * kThreads, k = put.columns == 1 ? i : i / put.columns;
    const int64_t row = i < grad.numel ? int64_t(load<uint64>(at(put.slots, 1, k))) : -1;
    to[u] = row < 0 || row >= put.rows ? nullptr : put.dx + (row * put.columns + (i - k * put.columns)) * sizeof(T);
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (to[u]) value[u] = load<T>(at(grad, 1, first + u * kThreads));
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (to[u]) store(to[u], value[u]);
}

// The innermost dim of operand 1 in packets, if its elements lie together. `places` are the offsets it is added to.
// Returns the packets' width.
int64_t widen(Plan<2>& plan, int64_t places, int64_t width) {
  if (plan.stride[1][0] != width) return width;
  places |= place(plan.base[1]) | plan.size[0] * width;
  for (int dim = 1; dim < plan.ndim; ++dim) places |= plan.stride[1][dim];
  const int64_t wide = packet_width(places, width);
  plan.size[0] /= wide / width;
  plan.numel /= wide / width;
  plan.stride[1][0] = wide;
  return wide;
}

std::tuple<Tensor, Tensor, Tensor> masked_compact(const Tensor& input, const Tensor& mask, int64_t capacity,
                                                  double fill_value) {
  constexpr const char* kOp = "safeops::_masked_compact";
  STD_TORCH_CHECK(dtype_of(mask) == DType::kBool, kOp, ": mask must be bool");
  STD_TORCH_CHECK(capacity >= 0, kOp, ": capacity must not be negative, got ", capacity);
  check_device(mask, input, kOp, "mask");
  Bits x(input);
  const Bits m(mask);
  const int leading = m.shape.ndim;
  STD_TORCH_CHECK(leading <= x.shape.ndim, kOp, ": the mask has more dims than the input");
  STD_TORCH_CHECK(m.shape.is(leading, x.shape.size), kOp, ": the mask must have the input's leading sizes");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Shape slots(1, &capacity), out = slots;
  for (int d = leading; d < x.shape.ndim; ++d) out.size[out.ndim++] = x.shape.size[d];
  const Tensor values = new_like(out, input), index = safeops::empty(slots, DType::kLong, input);
  const uint64_t fill = safeops::fill_bits(fill_value, input);
  const int64_t width = x.width;
  x.in_bytes();
  const cudaStream_t stream = current_stream(input);
  Tensor workspace, count;
  const Ranks ranks = make_ranks(m.shape, m, input, workspace, count, stream);
  const Numbers numbers{ranks, static_cast<char*>(index.data_ptr()), capacity};
  if (ranks.tiles) start(number_kernel, blocks_of(ranks), stream, plan_in_order<1>(m.shape, {m.all()}), numbers);
  if (capacity) {
    Plan<2> inner = plan_in_order<1>(Shape(x.shape.ndim - leading, x.shape.size + leading),
                                     {x.dims(leading, x.shape.ndim)});
    const Plan<2> lead = plan_in_order<1>(m.shape, {x.dims(0, leading)});
    char* to = static_cast<char*>(values.data_ptr());
    int64_t places = place(to);
    for (int dim = 0; dim < lead.ndim; ++dim) places |= lead.stride[1][dim];
    by_any_width(inner.numel && lead.numel ? widen(inner, places, width) : width, [&](auto bits) {
      using T = decltype(bits);
      const int64_t columns = inner.numel ? inner.numel : 1;
      const Take<T> take{lead, ranks.count, numbers.index, to, capacity * columns, columns, filled<T>(fill, width)};
      start(take_kernel<T>, blocks_for(take.numel, kThreads * kAtOnce<T>), stream, inner, take);
    });
  }
  check_launch(kOp);
  return {values, index, count};
}

Tensor masked_compact_backward(const Tensor& grad, const Tensor& index, const std::vector<int64_t>& size) {
  constexpr const char* kOp = "safeops::_masked_compact_backward";
  Bits g(grad);
  const Bits slots(index);
  STD_TORCH_CHECK(dtype_of(index) == DType::kLong && slots.shape.ndim == 1 && g.shape.ndim >= 1 &&
                      slots.shape.size[0] == g.shape.size[0],
                  kOp, ": index must be int64, one number a slot of grad");
  check_device(index, grad, kOp, "index");
  const Shape shape(static_cast<int>(size.size()), size.data());
  const int leading = shape.ndim - (g.shape.ndim - 1);
  STD_TORCH_CHECK(leading >= 0, kOp, ": grad has more dims than size");
  for (int d = leading; d < shape.ndim; ++d)
    STD_TORCH_CHECK(shape.size[d] == g.shape.size[d - leading + 1], kOp, ": grad and size differ");
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const Tensor dx = new_like(shape, grad);
  const int64_t rows = Shape(leading, shape.size).numel(), width = g.width, bytes = shape.numel() * width;
  g.in_bytes();
  const cudaStream_t stream = current_stream(grad);
  if (bytes) cudaMemsetAsync(dx.data_ptr(), 0, bytes, stream);
  if (bytes == 0 || g.shape.numel() == 0) return dx;
  Plan<2> plan = plan_in_order<1>(g.shape, {g.all()});
  char* to = static_cast<char*>(dx.data_ptr());
  const int64_t columns = g.shape.numel() / g.shape.size[0], wide = widen(plan, place(to) | columns * width, width);
  const Put put{plan_in_order<1>(slots.shape, {slots.all()}), to, rows, columns / (wide / width)};
  by_any_width(wide, [&](auto bits) {
    using T = decltype(bits);
    start(put_kernel<T>, blocks_for(plan.numel, kThreads * kAtOnce<T>), stream, plan, put);
  });
  check_launch(kOp);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_masked_compact", TORCH_BOX(&masked_compact));
  m.impl("_masked_compact_backward", TORCH_BOX(&masked_compact_backward));
}

}  // namespace safeops::cuda
