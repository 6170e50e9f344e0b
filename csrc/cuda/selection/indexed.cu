// I/O: forward: reads index and the elements that it names, writes out. Backward, where line_sums.cu does not take the
// operands: writes zeros to dx. Then, if each line has one index (place): reads index and grad, writes grad's elements
// to dx. Else (add_sorted): writes a key of 8 bytes for each index, sorts the keys, reads keys and grad, writes dx at
// each destination.
#include "indexed.cuh"
#include "line_sums.cuh"
#include "run_sums.cuh"

#define CCCL_DISABLE_NVTX  // it would add profiler ranges to each call
#include <cub/device/device_radix_sort.cuh>  // takes long to compile: included nowhere else

namespace safeops::cuda {
namespace {

// Sets p[o] to the address of element i of operand o.
template <int N>
__device__ inline void locate(const Plan<N>& plan, uint32_t i, char* (&p)[N]) {
  int64_t offset[N];
  offsets_at<1>(plan, i, offset);
#pragma unroll
  for (int o = 0; o < N; ++o) p[o] = plan.base[o] + offset[o];
}

// ---- forward

template <class T>
struct LookUp {
  int64_t length, step;  // size of the indexed dim, and its stride in bytes
  bool narrow;
  T fill;
};

// The plan's operands: out, index, and input at index 0 of the indexed dim.
template <class T>
__global__ void __launch_bounds__(kThreads)
    look_up_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ LookUp<T> look) {
  constexpr int U = kInFlight<T>;
  const uint32_t numel = uint32_t(plan.numel), first = blockIdx.x * (kThreads * U) + threadIdx.x;
  char* p[U][3];
  int64_t index[U];
  T value[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const uint32_t i = first + u * kThreads;
    locate(plan, i < numel ? i : 0, p[u]);
    index[u] = i < numel ? index_at(p[u][1], look.narrow) : -1;
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    value[u] = in_range(index[u], look.length) ? load<T>(p[u][2] + index[u] * look.step) : look.fill;
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u * kThreads < numel) store(p[u][0], value[u]);
}

// Turns elements into packets, if one index names contiguous elements. Returns the width of a packet in bytes.
int64_t widen(Plan<3>& plan, int64_t width, int64_t step) {
  if (plan.stride[0][0] != width || plan.stride[1][0] != 0 || plan.stride[2][0] != width) return width;
  int64_t offsets = step | address(plan.base[0]) | address(plan.base[2]) | plan.size[0] * width;
  for (int dim = 1; dim < plan.ndim; ++dim) offsets |= plan.stride[0][dim] | plan.stride[2][dim];
  const int64_t wide = packet_width(offsets, width);
  plan.size[0] /= wide / width;
  plan.numel /= wide / width;
  plan.stride[0][0] = plan.stride[2][0] = wide;
  return wide;
}

// ---- backward

struct Place {
  int64_t length, step;  // size of the indexed dim, and its stride in bytes
  Type type, dx_type;
  bool narrow;
};

// The plan's operands: dx at index 0 of the indexed dim, index, and grad. No destination is named twice.
__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ Place place) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= uint32_t(plan.numel)) return;
  char* p[3];
  locate(plan, i, p);
  const int64_t index = index_at(p[1], place.narrow);
  if (!in_range(index, place.length)) return;
  using Any = Dynamic<double>;
  const double value = Any::decode(load_raw<uint64>(p[2], place.type), place.type);
  store_raw(p[0] + index * place.step, place.dx_type, Any::encode(value, place.dx_type));
}

struct Keys {
  char *keys, *origin;  // base addresses of the operands 0 and 2, before the plan is split into parts
  int64_t length, step, total;
  int position_bits;
  bool narrow;
};

// Writes key = destination << position_bits | position for each index. An index out of range gets the destination
// `total`, which sorts after all others. The plan's operands: keys, index, and the destination at index 0 of the
// indexed dim. The last is never accessed: its address minus `origin` is the destination.
__global__ void __launch_bounds__(kThreads)
    key_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ Keys keys) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= uint32_t(plan.numel)) return;
  char* p[3];
  locate(plan, i, p);
  const int64_t index = index_at(p[1], keys.narrow), position = (p[0] - keys.keys) / 8;
  const int64_t destination = in_range(index, keys.length) ? p[2] - keys.origin + index * keys.step : keys.total;
  store(p[0], uint64(destination) << keys.position_bits | uint64(position));
}

// Sorts n keys by their bits from `begin` to `end`; equal keys keep their order. It uses `keys` and `other`, returns
// the one that holds the result, and does not wait. Workspace is allocated like `like`.
uint64* sort_keys(uint64* keys, uint64* other, int64_t n, int begin, int end, const Tensor& like, cudaStream_t stream) {
  cub::DoubleBuffer<uint64> buffers(keys, other);
  size_t bytes = 0;
  const auto sort = [&](void* workspace) {
    const cudaError_t error = cub::DeviceRadixSort::SortKeys(workspace, bytes, buffers, n, begin, end, stream);
    STD_TORCH_CHECK(error == cudaSuccess, "safeops: sorting failed: ", cudaGetErrorString(error));
  };
  sort(nullptr);  // computes the size of the workspace
  const int64_t words = int64_t(bytes / 8 + 1);
  const Tensor workspace = safeops::empty(Shape(1, &words), DType::kLong, like);
  sort(workspace.data_ptr());
  return buffers.Current();
}

int bits_of(uint64_t n) {
  int bits = 0;
  while (n >> bits) ++bits;
  return bits;
}

void place(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, char* dx,
           cudaStream_t stream) {
  Bits source = grad, indices = along_lines(index, grad.shape, dim), target = grad;
  target.data = dx;
  target.width = size_of(dx_type);
  contiguous_strides(size, target.stride);
  source.in_bytes(), indices.in_bytes(), target.in_bytes();
  const Place one{size.size[dim], target.stride[dim], type, dx_type, index.width == 4};
  target.stride[dim] = 0;
  for_each_part(make_plan<3>(grad.shape, {target.all(), indices.all(), source.all()}), [&](Plan<3>& plan) {
    set_dividers(plan, 1);
    start(place_kernel, blocks_for(plan.numel, kThreads), stream, plan, one);
  });
}

// Adds up the entries of each destination in the order of the index.
void add_sorted(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type,
                const Tensor& dx, cudaStream_t stream) {
  const int64_t entries = index.shape.numel();
  // If the index is a vector, it names whole lines: an entry is a line of grad, whose elements are columns. Else an
  // entry is one element of grad, with one column.
  const bool lines = index.shape.ndim == 1;
  int64_t strides[safeops::kMaxDims];
  contiguous_strides(size, strides);
  const int64_t step = lines ? 1 : strides[dim], total = lines ? size.size[dim] : size.numel();
  const int position_bits = bits_of(uint64_t(entries - 1)), end = position_bits + bits_of(uint64_t(total));
  STD_TORCH_CHECK(end <= 64, "safeops: more indices than a key has room for");

  const int64_t two[2] = {2, entries};
  const Tensor keys = safeops::empty(Shape(2, two), DType::kLong, dx);
  char* first = static_cast<char*>(keys.data_ptr());
  Bits indices = index, target = index, destination = index;
  indices.in_bytes();
  target.data = first;
  contiguous_strides(index.shape, target.stride);
  target.width = 8;
  target.in_bytes();
  destination.data = static_cast<char*>(dx.data_ptr());
  for (int d = 0; d < index.shape.ndim; ++d) destination.stride[d] = lines || d == dim ? 0 : strides[d];
  destination.width = 1;
  const Keys key_layout{first, destination.data, size.size[dim], step, total, position_bits, index.width == 4};
  for_each_part(make_plan<3>(index.shape, {target.all(), indices.all(), destination.all()}), [&](Plan<3>& plan) {
    set_dividers(plan, 1);
    start(key_kernel, blocks_for(plan.numel, kThreads), stream, plan, key_layout);
  });
  uint64* unsorted = reinterpret_cast<uint64*>(first);
  const uint64* sorted = sort_keys(unsorted, unsorted + entries, entries, position_bits, end, dx, stream);

  Bits columns = grad;
  columns.in_bytes();
  Shape inner;
  int64_t inner_strides[safeops::kMaxDims];
  for (int d = 0; lines && d < size.ndim; ++d) {
    if (d == dim) continue;
    inner.size[inner.ndim] = size.size[d];
    inner_strides[inner.ndim++] = columns.stride[d];
  }
  const Operand line{grad.data, kBool, inner.ndim, inner.size, inner_strides};
  const Plan<2> along = plan_in_order<1>(index.shape, {lines ? columns.dims(dim, dim + 1) : columns.all()});
  sum_runs(along,
           {plan_in_order<1>(inner, {line}), reinterpret_cast<const char*>(sorted), entries, total, inner.numel(),
            lines ? strides[dim] : 1, position_bits, type, dx_type, static_cast<char*>(dx.data_ptr())},
           dx, stream);
}

}  // namespace

void look_up(const Shape& shape, const Bits& x, int dim, const Bits& index, uint64_t fill, char* out,
             cudaStream_t stream) {
  if (shape.numel() == 0) return;
  Bits source = x, indices = along_lines(index, shape, dim), target = x;
  source.shape = target.shape = shape;
  target.data = out;
  contiguous_strides(shape, target.stride);
  source.in_bytes(), indices.in_bytes(), target.in_bytes();
  const int64_t length = x.shape.size[dim], step = source.stride[dim];
  source.stride[dim] = 0;
  Plan<3> full_plan = make_plan<3>(shape, {target.all(), indices.all(), source.all()});
  by_any_width(widen(full_plan, x.width, step), [&](auto bits) {
    using T = decltype(bits);
    const LookUp<T> look{length, step, index.width == 4, filled<T>(fill, x.width)};
    for_each_part(full_plan, [&](Plan<3>& plan) {
      set_dividers(plan, 1);
      start(look_up_kernel<T>, blocks_for(plan.numel, kThreads * kInFlight<T>), stream, plan, look);
    });
  });
}

void add_up(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, const Tensor& dx,
            cudaStream_t stream) {
  const int64_t bytes = size.numel() * size_of(dx_type);
  char* data = static_cast<char*>(dx.data_ptr());
  if (bytes == 0) return;
  const bool empty = grad.shape.numel() == 0, alone = !empty && grad.shape.size[dim] == 1;
  if (!empty && !alone && add_lines(grad, type, dim, index, size, dx_type, data, stream)) return;
  cudaMemsetAsync(data, 0, bytes, stream);
  if (alone) place(grad, type, dim, index, size, dx_type, data, stream);
  else if (!empty) add_sorted(grad, type, dim, index, size, dx_type, dx, stream);
}

}  // namespace safeops::cuda
