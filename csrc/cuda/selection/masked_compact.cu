// masked_compact: values[k] = the k-th kept row of input, index[k] = its row number, count = the number of kept rows.
// I/O: read mask, write index, read it, read the kept rows, write values. Backward: read grad and index, write dx.
#include "selection.cuh"

namespace safeops::cuda {
namespace {

template <class T>
struct Compaction {
  char *index, *values;  // values: null for rows of several elements, which take_kernel moves
  int64_t capacity;
  Layout mask, input;
  T fill;
};
using Row = uint16_t;  // stands for a row that is numbered but not moved; its size sets that of a tile

// Numbers the kept rows, and moves rows of one element. The plan's operands: 0 only defines the order of the walk
// (plan_in_order), 1 is the mask, 2 is input.
template <class T>
__global__ void __launch_bounds__(kBlock, 3)
    number_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ Compaction<T> compaction,
                  const __grid_constant__ Ranks ranks) {
  Tile<T> tile;
  if (!tile.take(ranks))
    return tile.fill(ranks, compaction.capacity, [&](int64_t i) {
      store(compaction.values + i * sizeof(T), compaction.fill);
      store(compaction.index + i * sizeof(int64_t), ~uint64(0));
    });
  tile.read_mask(plan, compaction.mask);
  TileElements<T> input;
  if (compaction.values) input.request(plan, 2, compaction.input, tile);
  tile.rank(ranks);
  if (compaction.values) input.receive(plan, 2, compaction.input, tile);
  const int n = slots_for(compaction.capacity, tile.first, tile.kept_count),
            skip = skip_of<T>(compaction.values, tile.first);
  uint16_t* positions = reinterpret_cast<uint16_t*>(shared_memory() + Tile<T>::kShared);
#pragma unroll
  for (int u = 0; u < kTilePackets<T>; ++u)
    tile.each(u, [&](int e, bool kept, int rank) {
      if (!kept) return;
      positions[rank] = uint16_t((u * kBlock + threadIdx.x) * kPacket<T> + e);
      if (compaction.values) tile.room()[skip + rank] = input.get(u, e);
    });
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kBlock)
    store(compaction.index + (tile.first + i) * sizeof(int64_t), uint64(tile.start + positions[i]));
  if (compaction.values) write_run(tile.room(), compaction.values, tile.first, n, skip);
}

template <class T>
struct Take {
  Plan<2> lead;  // 0 defines the order, 1 is input: over the dims that number the rows
  char *count, *index, *values;
  int64_t numel, columns;  // columns: elements of a row; 1 if it has none, since its slot still has an index
  T fill;
};

// Moves rows of several elements, and writes index -1 to unused slots. inner's operands: 0 defines the order, 1 is
// input, over the dims after those of the mask.
template <class T>
__global__ void __launch_bounds__(kThreads)
    take_kernel(const __grid_constant__ Plan<2> inner, const __grid_constant__ Take<T> take) {
  constexpr int U = 4;
  const int64_t first = int64_t(blockIdx.x) * (kThreads * U) + threadIdx.x, used = int64_t(load<uint64>(take.count));
  int64_t row[U], column[U];
  T value[U];
  // The index is loaded before `used` is known; an unused slot ignores what it gets. Another warp may write that index
  // meanwhile, so both accesses are strong, and do not go through the read-only cache.
  uint64* index = reinterpret_cast<uint64*>(take.index);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t i = first + u * kThreads, k = take.columns == 1 ? i : i / take.columns;
    column[u] = i - k * take.columns;
    row[u] = i < take.numel ? int64_t(load_relaxed(index + k)) : -1;
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t i = first + u * kThreads;
    value[u] = take.fill;
    if (i >= take.numel) continue;
    const int64_t k = take.columns == 1 ? i : i / take.columns;
    if (k >= used) row[u] = -1;
    if (k >= used && column[u] == 0) store_relaxed(index + k, ~uint64(0));
    if (row[u] >= 0 && inner.numel)
      value[u] = load<T>(at(take.lead, 1, row[u]) + (at(inner, 1, column[u]) - inner.base[1]));
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t i = first + u * kThreads;
    if (i < take.numel && inner.numel) store(take.values + i * sizeof(T), value[u]);
  }
}

struct Put {
  char *index, *dx;
  int64_t step, columns, numel;  // step: bytes between the row numbers of two slots; numel: of dx
};

// A block puts a tile of dx together in shared memory: zeros, and over them the elements of grad that belong to the
// tile. Row numbers ascend from slot to slot (unused slots, -1, come last), so that these elements are consecutive in
// grad. All threads together search for their beginning and end: in 2^25 elements by 4 steps. Operands: order, grad.
template <class T>
__global__ void __launch_bounds__(kBlock, 4)
    put_kernel(const __grid_constant__ Plan<2> grad, const __grid_constant__ Put put) {
  const uint64 begin = uint64(blockIdx.x) * kTile<T>, size = std::min<uint64>(kTile<T>, put.numel - begin);
  unsigned* sums = reinterpret_cast<unsigned*>(shared_memory());
  T* room = reinterpret_cast<T*>(shared_memory() + 64);
#pragma unroll
  for (int u = 0; u < kTilePackets<T>; ++u) reinterpret_cast<uint4*>(room)[u * kBlock + threadIdx.x] = uint4{};
  const auto dx_index = [&](int64_t i) {  // index in dx of element i of grad; of an unused slot: beyond every tile
    const int64_t k = put.columns == 1 ? i : i / put.columns;
    return load<uint64>(put.index + k * put.step) * put.columns + (i - k * put.columns);
  };
  int64_t from = 0, to = 0;  // number of grad's elements before the tile, and before its end, or up to `more` less
  for (int64_t more = grad.numel; more > 0;) {
    const int64_t pitch = more / (kBlock + 1) + 1, ahead = (threadIdx.x + 1) * pitch - 1;
    const unsigned counts = (from + ahead < grad.numel && dx_index(from + ahead) < begin) +
                           ((to + ahead < grad.numel && dx_index(to + ahead) < begin + size) << 16);
    const unsigned both = block_reduce<kBlock>(counts, sums, [](unsigned a, unsigned b) { return a + b; });
    from += (both & 0xffff) * pitch;
    to += (both >> 16) * pitch;
    more = pitch - 1;
    __syncthreads();
  }
  const auto run = [&](auto at_once, const auto& element) {
    constexpr int U = at_once();
    for (int64_t first = from + threadIdx.x; first < to; first += kBlock * U) {
      uint64 offset[U];
      T value[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = std::min(first + u * kBlock, to - 1);
        offset[u] = dx_index(i) - begin;
        value[u] = load<T>(element(i));
      }
#pragma unroll
      for (int u = 0; u < U; ++u)  // the last element may be written more than once, with the same value
        if (offset[u] < size) room[offset[u]] = value[u];
    }
  };
  if (grad.ndim == 1)
    run(std::integral_constant<int, sizeof(T) == 2 || sizeof(T) == 4 ? 8 : 4>(),
        [&](int64_t i) { return grad.base[1] + i * grad.stride[1][0]; });
  else
    run(std::integral_constant<int, 2>(), [&](int64_t i) { return at(grad, 1, i); });
  __syncthreads();
  write_run(room, put.dx, begin, int(size), 0);
}

// Turns the elements of operand 1 into packets along the innermost dim, if they are contiguous there. offsets: the
// bitwise or of further offsets that must be multiples of a packet. Returns the width of a packet in bytes.
int64_t widen(Plan<2>& plan, int64_t offsets, int64_t width) {
  if (plan.stride[1][0] != width) return width;
  offsets |= address(plan.base[1]) | plan.size[0] * width;
  for (int dim = 1; dim < plan.ndim; ++dim) offsets |= plan.stride[1][dim];
  const int64_t wide = packet_width(offsets, width);
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
  Plan<2> inner = plan_in_order<1>(Shape(x.shape.ndim - leading, x.shape.size + leading),
                                   {x.dims(leading, x.shape.ndim)});
  const Plan<2> lead = plan_in_order<1>(m.shape, {x.dims(0, leading)});
  const bool moved = inner.numel == 1 && lead.numel > 0;
  char *to = static_cast<char*>(values.data_ptr()), *index_data = static_cast<char*>(index.data_ptr());
  Tensor workspace, count;
  const Ranks ranks =
      make_ranks(lead.numel, moved ? width : sizeof(Row), moved ? capacity : 0, input, workspace, count, stream);
  const auto number = [&](auto type, const Operand& row) {
    using T = decltype(type);
    const Plan<3> plan = plan_in_order<2>(m.shape, {m.all(), row});
    const T unused = moved ? filled<T>(fill, width) : T();
    const Compaction<T> job{index_data, moved ? to : nullptr, capacity, layout_of(plan, 1, 1),
                         layout_of(plan, 2, width), unused};
    start_tiles<T>(number_kernel<T>, ranks, kTile<T> * int(sizeof(uint16_t)), stream, plan, job);
  };
  if (ranks.tiles && moved) by_any_width(width, [&](auto type) { number(type, x.dims(0, leading)); });
  else if (ranks.tiles) number(Row(), Operand{});
  if (capacity && !moved) {
    int64_t offsets = address(to);
    for (int dim = 0; dim < lead.ndim; ++dim) offsets |= lead.stride[1][dim];
    by_any_width(inner.numel && lead.numel ? widen(inner, offsets, width) : width, [&](auto type) {
      using T = decltype(type);
      const int64_t columns = inner.numel ? inner.numel : 1;
      const Take<T> take{lead, ranks.count, index_data, to, capacity * columns, columns, filled<T>(fill, width)};
      start(take_kernel<T>, blocks_for(take.numel, kThreads * 4), stream, inner, take);
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
  const int64_t width = g.width, bytes = shape.numel() * width;
  g.in_bytes();
  const cudaStream_t stream = current_stream(grad);
  if (bytes && g.shape.numel() == 0) cudaMemsetAsync(dx.data_ptr(), 0, bytes, stream);
  if (bytes == 0 || g.shape.numel() == 0) return dx;
  Plan<2> plan = plan_in_order<1>(g.shape, {g.all()});
  char* to = static_cast<char*>(dx.data_ptr());
  const int64_t columns = g.shape.numel() / g.shape.size[0], wide = widen(plan, address(to) | columns * width, width);
  const Put put{slots.data, to, slots.stride[0] * 8, columns / (wide / width), bytes / wide};
  by_any_width(wide, [&](auto bits) {
    using T = decltype(bits);
    constexpr int kShared = 64 + kTile<T> * int(sizeof(T));
    start_blocks(put_kernel<T>, blocks_for(put.numel, kTile<T>), kBlock, kShared, stream, plan, put);
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
