// I/O: forward read index, read what it names, write out. Backward: write a key of 8 bytes for each index, sort the
// keys, write zeros, read keys and grad, write dx where something was named.
#include "indexed.cuh"

#include "cuda/engine/packets.cuh"

#define CCCL_DISABLE_NVTX  // ranges for a profiler, at each call
#include <cub/device/device_radix_sort.cuh>  // takes long to compile: included nowhere else

namespace safeops::cuda {
namespace {

// Where the operands of a launch have element i.
template <int N>
__device__ inline void locate(const Plan<N>& plan, uint32_t i, char* (&p)[N]) {
  int64_t offset[N];
  offsets_at<1>(plan, i, offset);
#pragma unroll
  for (int o = 0; o < N; ++o) p[o] = plan.base[o] + offset[o];
}

__device__ inline int64_t number_at(const char* p, bool narrow) {
  return narrow ? int64_t(int32_t(load<uint32_t>(p))) : int64_t(load<uint64>(p));
}

__device__ inline bool within(int64_t number, int64_t length) { return uint64(number) < uint64(length); }

// ---- forward

template <class T>
struct LookUp {
  int64_t length, step;  // of the indexed dim, the step in bytes
  bool narrow;
  T fill;
};

// Operands: out, index, input where the indexed dim begins.
template <class T>
__global__ void __launch_bounds__(kThreads)
    look_up_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ LookUp<T> look) {
  constexpr int U = kAtOnce<T>;
  const uint32_t numel = uint32_t(plan.numel), first = blockIdx.x * (kThreads * U) + threadIdx.x;
  char* p[U][3];
  int64_t number[U];
  T value[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const uint32_t i = first + u * kThreads;
    locate(plan, i < numel ? i : 0, p[u]);
    number[u] = i < numel ? number_at(p[u][1], look.narrow) : -1;
  }
#pragma unroll
  for (int u = 0; u < U; ++u)
    value[u] = within(number[u], look.length) ? load<T>(p[u][2] + number[u] * look.step) : look.fill;
#pragma unroll
  for (int u = 0; u < U; ++u)
    if (first + u * kThreads < numel) store(p[u][0], value[u]);
}

// Neighbours that one number names and that lie together are moved in packets. Returns their width.
int64_t widen(Plan<3>& plan, int64_t width, int64_t step) {
  if (plan.stride[0][0] != width || plan.stride[1][0] != 0 || plan.stride[2][0] != width) return width;
  int64_t places = step | place(plan.base[0]) | place(plan.base[2]) | plan.size[0] * width;
  for (int dim = 1; dim < plan.ndim; ++dim) places |= plan.stride[0][dim] | plan.stride[2][dim];
  const int64_t wide = packet_width(places, width);
  plan.size[0] /= wide / width;
  plan.numel /= wide / width;
  plan.stride[0][0] = plan.stride[2][0] = wide;
  return wide;
}

// ---- backward: the keys

struct Keys {
  char *keys, *origin;  // where both operands begin, of the whole launch
  int64_t length, step, total;
  int position_bits;
  bool narrow;
};

// key = destination << position_bits | position; what is out of range goes to destination `total`, behind all others.
// Operands: keys, index, destination where the indexed dim begins (an address whose distance from `origin` counts).
__global__ void __launch_bounds__(kThreads)
    key_kernel(const __grid_constant__ Plan<3> plan, const __grid_constant__ Keys keys) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= uint32_t(plan.numel)) return;
  char* p[3];
  locate(plan, i, p);
  const int64_t number = number_at(p[1], keys.narrow), position = (p[0] - keys.keys) / 8;
  const int64_t destination = within(number, keys.length) ? p[2] - keys.origin + number * keys.step : keys.total;
  store(p[0], uint64(destination) << keys.position_bits | uint64(position));
}

// Sorts n keys by their bits from `begin` to `end`; keys equal in those keep their order. Works in `keys` and `other`,
// and returns which of the two holds the result. Nothing waits. `like` says where workspace is allocated.
uint64* sort_keys(uint64* keys, uint64* other, int64_t n, int begin, int end, const Tensor& like, cudaStream_t stream) {
  cub::DoubleBuffer<uint64> buffers(keys, other);
  size_t bytes = 0;
  const auto sort = [&](void* workspace) {
    const cudaError_t error = cub::DeviceRadixSort::SortKeys(workspace, bytes, buffers, n, begin, end, stream);
    STD_TORCH_CHECK(error == cudaSuccess, "safeops: sorting failed: ", cudaGetErrorString(error));
  };
  sort(nullptr);  // says how much it needs
  const int64_t words = int64_t(bytes / 8 + 1);
  const Tensor workspace = safeops::empty(Shape(1, &words), DType::kLong, like);
  sort(workspace.data_ptr());
  return buffers.Current();
}

// ---- backward: the sums
//
// Entries of one destination lie together: a run. A thread adds up the runs among kEntries entries of its columns. One
// that begins and ends there is written to dx. The sum of one that began before, or goes on behind, is left as an entry
// for the next launch, which treats the two of each thread as this one treats grad; until one thread has them all. So a
// destination that every entry names (padding) takes no longer than others, each is written once, and its sum is a tree
// of a fixed shape. Where a thread leaves less than two entries it names `total`, which nobody writes.

constexpr int kEntries = 32;

struct Sums {
  Plan<2> columns;   // order, grad: the dims beside the indexed one
  const char* keys;  // sorted
  int64_t entries, total, width, inner;  // width: columns
  int position_bits;
  Type type, dx_type;
  char* dx;
  char *next_keys, *next;  // two entries a thread: keys, and Values for each column
};

// A thread's columns: one of any type, or (Fixed) a packet.
template <class V>
struct One {
  using Value = V;
  static constexpr int kElements = 1;
  typename Dynamic<V>::Word raw;
  __device__ void read(const char* p, Type type, bool) { raw = load_raw<typename Dynamic<V>::Word>(p, type); }
  __device__ V get(int, Type type) const { return Dynamic<V>::decode(raw, type); }
  static __device__ void write(char* p, const V* value, Type type) {
    store_raw(p, type, Dynamic<V>::encode(value[0], type));
  }
};

// Operands: order, grad; of the entries.
template <class Hold>
__global__ void __launch_bounds__(kThreads, 6)  // packets: 6 x 128 x 64 bytes under way
    sum_kernel(const __grid_constant__ Plan<2> entries, const __grid_constant__ Sums sums) {
  using V = typename Hold::Value;
  using Left = std::conditional_t<Hold::kElements == 1, One<V>, Fixed<std::conditional_t<sizeof(V) == 8, F64, F32>>>;
  constexpr Type kLeft = sizeof(V) == 8 ? kF64 : kF32;
  constexpr int K = Hold::kElements, U = 4;
  const int64_t id = int64_t(blockIdx.x) * kThreads + threadIdx.x, across = sums.width / K;
  const int64_t begin = id / across * kEntries, column = id % across * K;
  if (begin >= sums.entries) return;
  const int n = begin + kEntries < sums.entries ? kEntries : int(sums.entries - begin);
  const int64_t line = column / sums.inner, grad = at(sums.columns, 1, column) - sums.columns.base[1];
  const int size = size_of(sums.dx_type);
  char* dx = sums.dx + (line * sums.total * sums.inner + (column - line * sums.inner)) * size;
  const uint64 none = uint64(sums.total), positions = (uint64(1) << sums.position_bits) - 1;
  const auto key = [&](int i) { return load<uint64>(sums.keys + (begin + i) * sizeof(uint64)); };
  const auto destination = [&](int i) { return key(i) >> sums.position_bits; };

  uint64 run = destination(0);
  bool begun = begin > 0 && destination(-1) == run;  // by an earlier thread
  V sum[K];
  const auto clear = [&] {
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] = V(-0.0);  // x + -0.0 is x, for -0.0 too
  };
  const auto place = [&](int slot) { return begin / kEntries * 2 + slot; };  // among what is left
  const auto name = [&](int slot, uint64 destination) {
    if (column == 0 && sums.next_keys) store(sums.next_keys + place(slot) * sizeof(uint64), destination);
  };
  const auto leave = [&](int slot) {
    name(slot, run);
    if (run == none) return;
    char* to = sums.next + (place(slot) * sums.width + column) * sizeof(V);
#pragma unroll
    for (int k = 0; k < K; k += Left::kElements) Left::write(to + k * sizeof(V), sum + k, kLeft);
  };
  const auto finish = [&] {  // the run has ended
    if (begun) leave(0);
    else if (run != none) Hold::write(dx + int64_t(run) * sums.inner * size, sum, sums.dx_type);
  };

  name(0, none);
  name(1, none);
  clear();
#pragma unroll 1
  for (int start = 0; start < n; start += U) {
    uint64 named[U];
    Hold value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) named[u] = key(start + u < n ? start + u : n - 1);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      // what an earlier launch left lies in its place
      const int64_t position = sums.position_bits ? int64_t(named[u] & positions) : begin + start + u;
      named[u] >>= sums.position_bits;
      value[u] = Hold();
      if (start + u >= n || named[u] == none) continue;
      const char* from = K > 1 ? entries.base[1] + position * entries.stride[1][0] : at(entries, 1, position);
      value[u].read(from + grad, sums.type, false);
    }
#pragma unroll 1
    for (int i = start; i < n && i < start + U; ++i) {  // a loop, past which they move: unrolled it is long
      if (named[0] != run) {
        finish();
        run = named[0];
        begun = false;
        clear();
      }
      if (run != none) {
#pragma unroll
        for (int k = 0; k < K; ++k) sum[k] += value[0].get(k, sums.type);
      }
#pragma unroll
      for (int u = 0; u + 1 < U; ++u) {
        named[u] = named[u + 1];
        value[u] = value[u + 1];
      }
    }
  }
  if (begin + n == sums.entries || destination(n) != run) {
    finish();
  } else {
    if (begun) {
      leave(0);
      clear();  // behind it nothing, which does not break the run
    }
    leave(1);
  }
}

// Columns in packets: grad and dx have one type, and packets of both lie together and are aligned.
bool in_packets(const Plan<2>& entries, const Sums& sums) {
  const Plan<2>& columns = sums.columns;
  const int64_t size = size_of(sums.type);
  if (sums.type != sums.dx_type || columns.stride[1][0] != size) return false;
  int64_t places = place(columns.base[1]) | place(sums.dx) | columns.size[0] * size | sums.inner * size;
  for (int dim = 1; dim < columns.ndim; ++dim) places |= columns.stride[1][dim];
  if (entries.numel > 1) places |= entries.stride[1][0];
  return places % 16 == 0 && entries.ndim == 1;
}

void launch_sums(Plan<2> entries, Sums sums, const Tensor& like, cudaStream_t stream) {
  const bool wide = sums.type == kF64 || sums.dx_type == kF64;
  const Type type = wide ? kF64 : kF32;
  const auto launch = [&](auto hold, int64_t tiles) {
    using Hold = decltype(hold);
    start(sum_kernel<Hold>, blocks_for(tiles * (sums.width / Hold::kElements), kThreads), stream, entries, sums);
  };
  Tensor keys, values;  // what the next launch reads
  for (bool first = true;; first = false) {
    const int64_t tiles = (sums.entries + kEntries - 1) / kEntries, n = tiles > 1 ? 2 * tiles : 0;
    const int64_t sizes[2] = {n, sums.width}, steps[2] = {sums.width * size_of(type), size_of(type)};
    const Tensor next_keys = safeops::empty(Shape(1, sizes), DType::kLong, like);
    const Tensor next = safeops::empty(Shape(2, sizes), DType(type), like);
    sums.next_keys = n ? static_cast<char*>(next_keys.data_ptr()) : nullptr;
    sums.next = static_cast<char*>(next.data_ptr());
    if (!first || !in_packets(entries, sums))
      wide ? launch(One<double>(), tiles) : launch(One<float>(), tiles);
    else if (sums.type == kF16)
      launch(Fixed<F16>(), tiles);
    else if (sums.type == kBF16)
      launch(Fixed<BF16>(), tiles);
    else if (sums.type == kF32)
      launch(Fixed<F32>(), tiles);
    else
      launch(Fixed<F64>(), tiles);
    if (n == 0) return;
    keys = next_keys;
    values = next;
    entries = plan_in_order<1>(Shape(1, sizes), {Operand{sums.next, kBool, 1, sizes, steps}});
    sums.columns = plan_in_order<1>(Shape(1, sizes + 1), {Operand{sums.next, kBool, 1, sizes + 1, steps + 1}});
    sums.keys = sums.next_keys;
    sums.entries = n;
    sums.position_bits = 0;
    sums.type = type;
  }
}

int bits_of(uint64_t n) {
  int bits = 0;
  while (n >> bits) ++bits;
  return bits;
}

}  // namespace

void look_up(const Shape& shape, const Bits& x, int dim, const Bits& index, uint64_t fill, char* out,
             cudaStream_t stream) {
  if (shape.numel() == 0) return;
  Bits source = x, numbers = index, target = x;
  if (index.shape.ndim != shape.ndim) {  // a vector: the same for all lines
    for (int d = 0; d < shape.ndim; ++d) numbers.stride[d] = d == dim ? index.stride[0] : 0;
  }
  source.shape = numbers.shape = target.shape = shape;
  target.data = out;
  contiguous_strides(shape, target.stride);
  source.in_bytes(), numbers.in_bytes(), target.in_bytes();
  const int64_t length = x.shape.size[dim], step = source.stride[dim];
  source.stride[dim] = 0;
  Plan<3> whole = make_plan<3>(shape, {target.all(), numbers.all(), source.all()});
  by_any_width(widen(whole, x.width, step), [&](auto bits) {
    using T = decltype(bits);
    const LookUp<T> look{length, step, index.width == 4, filled<T>(fill, x.width)};
    for_each_part(whole, [&](Plan<3>& plan) {
      set_dividers(plan, 1);
      start(look_up_kernel<T>, blocks_for(plan.numel, kThreads * kAtOnce<T>), stream, plan, look);
    });
  });
}

void add_up(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, const Tensor& dx,
            cudaStream_t stream) {
  const int64_t bytes = size.numel() * size_of(dx_type), entries = index.shape.numel();
  if (bytes) cudaMemsetAsync(dx.data_ptr(), 0, bytes, stream);
  if (bytes == 0 || grad.shape.numel() == 0) return;
  // A vector of indices moves whole lines: columns. Else each index is an entry of its own, in one column.
  const bool lines = index.shape.ndim == 1;
  int64_t strides[safeops::kMaxDims];
  contiguous_strides(size, strides);
  const int64_t step = lines ? 1 : strides[dim], total = lines ? size.size[dim] : size.numel();
  const int position_bits = bits_of(uint64_t(entries - 1)), end = position_bits + bits_of(uint64_t(total));
  STD_TORCH_CHECK(end <= 64, "safeops: more indices than a key has room for");

  const int64_t two[2] = {2, entries};
  const Tensor keys = safeops::empty(Shape(2, two), DType::kLong, dx);
  char* first = static_cast<char*>(keys.data_ptr());
  Bits numbers = index, target = index, place = index;
  numbers.in_bytes();
  target.data = first;
  contiguous_strides(index.shape, target.stride);
  target.width = 8;
  target.in_bytes();
  place.data = static_cast<char*>(dx.data_ptr());
  for (int d = 0; d < index.shape.ndim; ++d) place.stride[d] = lines || d == dim ? 0 : strides[d];
  place.width = 1;
  const Keys named{first, place.data, size.size[dim], step, total, position_bits, index.width == 4};
  for_each_part(make_plan<3>(index.shape, {target.all(), numbers.all(), place.all()}), [&](Plan<3>& plan) {
    set_dividers(plan, 1);
    start(key_kernel, blocks_for(plan.numel, kThreads), stream, plan, named);
  });
  uint64* unsorted = reinterpret_cast<uint64*>(first);
  const uint64* sorted = sort_keys(unsorted, unsorted + entries, entries, position_bits, end, dx, stream);

  Bits columns = grad;
  columns.in_bytes();
  Shape beside;
  int64_t beside_strides[safeops::kMaxDims];
  for (int d = 0; lines && d < size.ndim; ++d) {
    if (d == dim) continue;
    beside.size[beside.ndim] = size.size[d];
    beside_strides[beside.ndim++] = columns.stride[d];
  }
  const Operand line{grad.data, kBool, beside.ndim, beside.size, beside_strides};
  const Plan<2> along = plan_in_order<1>(index.shape, {lines ? columns.dims(dim, dim + 1) : columns.all()});
  launch_sums(along,
              {plan_in_order<1>(beside, {line}), reinterpret_cast<const char*>(sorted), entries, total, beside.numel(),
               lines ? strides[dim] : 1, position_bits, type, dx_type, static_cast<char*>(dx.data_ptr())},
              dx, stream);
}

}  // namespace safeops::cuda
