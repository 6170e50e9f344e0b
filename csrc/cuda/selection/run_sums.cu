// I/O: read keys and grad, write dx at each destination.
//
// Keys are sorted, so that the entries of one destination are consecutive: a run. A thread takes a tile of kEntries
// entries, for one column or a packet of columns, and sums each run in its tile.
// (1) If the run begins and ends in the tile, its sum is written to dx.
// (2) If it begins before the tile or continues after it, its sum becomes an entry of the next launch. Each thread has
//     two such entries, for its first and its last run; an unused one gets the destination `total`, which is dropped.
// The next launch sums these entries in the same way, until one thread has them all. So a destination that all entries
// name (padding) takes no longer than others; each destination is written once; and the order of a sum is fixed.
#include "run_sums.cuh"

#include "cuda/engine/packets.cuh"

namespace safeops::cuda {
namespace {

constexpr int kEntries = 32;

// The columns of a thread: OneColumn is one column of any type; Fixed (packets.cuh) is a packet of columns of one type.
template <class V>
struct OneColumn {
  using Value = V;
  static constexpr int kElements = 1;
  typename Dynamic<V>::Word raw;
  __device__ void read(const char* p, Type type, bool) { raw = load_raw<typename Dynamic<V>::Word>(p, type); }
  __device__ V get(int, Type type) const { return Dynamic<V>::decode(raw, type); }
  static __device__ void write(char* p, const V* value, Type type) {
    store_raw(p, type, Dynamic<V>::encode(value[0], type));
  }
};

// Operands of `entries`: order, grad.
template <class Hold>
__global__ void __launch_bounds__(kThreads, 6)  // packets: 6 x 128 x 64 bytes in flight
    sum_kernel(const __grid_constant__ Plan<2> entries, const __grid_constant__ Sums sums) {
  using V = typename Hold::Value;
  using Partial = std::conditional_t<Hold::kElements == 1, OneColumn<V>,
                                     Fixed<std::conditional_t<sizeof(V) == 8, F64, F32>>>;
  constexpr Type kPartialType = sizeof(V) == 8 ? kF64 : kF32;
  constexpr int K = Hold::kElements, U = 4;
  const int64_t id = int64_t(blockIdx.x) * kThreads + threadIdx.x, across = sums.width / K;
  // Neighbouring threads take neighbouring columns of a tile if columns are contiguous, else neighbouring tiles.
  const bool along = sums.columns.stride[1][0] > size_of(sums.type);
  const int64_t tiles = (sums.entries + kEntries - 1) / kEntries;
  const int64_t begin = (along ? id % tiles : id / across) * kEntries, column = (along ? id / tiles : id % across) * K;
  if (begin >= sums.entries || column >= sums.width) return;
  const int n = begin + kEntries < sums.entries ? kEntries : int(sums.entries - begin);
  const int64_t line = column / sums.inner, grad = at(sums.columns, 1, column) - sums.columns.base[1];
  const int size = size_of(sums.dx_type);
  char* dx = sums.dx + (line * sums.total * sums.inner + (column - line * sums.inner)) * size;
  const uint64 no_destination = uint64(sums.total), positions = (uint64(1) << sums.position_bits) - 1;
  const auto key = [&](int i) { return load<uint64>(sums.keys + (begin + i) * sizeof(uint64)); };
  const auto destination = [&](int i) { return key(i) >> sums.position_bits; };

  uint64 run = destination(0);
  bool began_before = begin > 0 && destination(-1) == run;  // the run begins before this thread's tile
  V sum[K];
  const auto clear = [&] {
#pragma unroll
    for (int k = 0; k < K; ++k) sum[k] = V(-0.0);  // x + -0.0 is x, for -0.0 too
  };
  const auto partial_index = [&](int slot) { return begin / kEntries * 2 + slot; };  // index among the partial sums
  const auto store_key = [&](int slot, uint64 destination) {
    if (column == 0 && sums.next_keys) store(sums.next_keys + partial_index(slot) * sizeof(uint64), destination);
  };
  const auto store_partial = [&](int slot) {
    store_key(slot, run);
    if (run == no_destination) return;
    char* to = sums.next + (partial_index(slot) * sums.width + column) * sizeof(V);
#pragma unroll
    for (int k = 0; k < K; k += Partial::kElements) Partial::write(to + k * sizeof(V), sum + k, kPartialType);
  };
  const auto finish = [&] {  // called at the end of a run
    if (began_before) store_partial(0);
    else if (run != no_destination) Hold::write(dx + int64_t(run) * sums.inner * size, sum, sums.dx_type);
  };

  store_key(0, no_destination);
  store_key(1, no_destination);
  clear();
#pragma unroll 1
  for (int start = 0; start < n; start += U) {
    uint64 target[U];
    Hold value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) target[u] = key(start + u < n ? start + u : n - 1);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      // With position_bits 0, entries are sums of an earlier launch, and entry i is at position i.
      const int64_t position = sums.position_bits ? int64_t(target[u] & positions) : begin + start + u;
      target[u] >>= sums.position_bits;
      value[u] = Hold();
      if (start + u >= n || target[u] == no_destination) continue;
      const char* from = K > 1 ? entries.base[1] + position * entries.stride[1][0] : at(entries, 1, position);
      value[u].read(from + grad, sums.type, false);
    }
    // Not unrolled, since the body is long. Each step takes element 0 of target and value, and moves the others down.
#pragma unroll 1
    for (int i = start; i < n && i < start + U; ++i) {
      if (target[0] != run) {
        finish();
        run = target[0];
        began_before = false;
        clear();
      }
      if (run != no_destination) {
#pragma unroll
        for (int k = 0; k < K; ++k) sum[k] += value[0].get(k, sums.type);
      }
#pragma unroll
      for (int u = 0; u + 1 < U; ++u) {
        target[u] = target[u + 1];
        value[u] = value[u + 1];
      }
    }
  }
  if (begin + n == sums.entries || destination(n) != run) {
    finish();
  } else {
    if (began_before) {
      store_partial(0);
      clear();  // slot 1 gets an empty sum of the same destination, so that the run stays consecutive
    }
    store_partial(1);
  }
}

// True if columns can be read in packets: grad and dx have one type, and all packets of columns are contiguous and
// aligned in both.
bool in_packets(const Plan<2>& entries, const Sums& sums) {
  const Plan<2>& columns = sums.columns;
  const int64_t size = size_of(sums.type);
  if (sums.type != sums.dx_type || columns.stride[1][0] != size) return false;
  int64_t offsets = address(columns.base[1]) | address(sums.dx) | columns.size[0] * size | sums.inner * size;
  for (int dim = 1; dim < columns.ndim; ++dim) offsets |= columns.stride[1][dim];
  if (entries.numel > 1) offsets |= entries.stride[1][0];
  return offsets % 16 == 0 && entries.ndim == 1;
}

}  // namespace

void sum_runs(Plan<2> entries, Sums sums, const Tensor& like, cudaStream_t stream) {
  const bool wide = sums.type == kF64 || sums.dx_type == kF64;
  const Type type = wide ? kF64 : kF32;
  const auto launch = [&](auto hold, int64_t tiles) {
    using Hold = decltype(hold);
    start(sum_kernel<Hold>, blocks_for(tiles * (sums.width / Hold::kElements), kThreads), stream, entries, sums);
  };
  Tensor keys, values;  // the operands of the next launch
  for (bool first = true;; first = false) {
    const int64_t tiles = (sums.entries + kEntries - 1) / kEntries, n = tiles > 1 ? 2 * tiles : 0;
    const int64_t sizes[2] = {n, sums.width}, steps[2] = {sums.width * size_of(type), size_of(type)};
    const Tensor next_keys = safeops::empty(Shape(1, sizes), DType::kLong, like);
    const Tensor next = safeops::empty(Shape(2, sizes), DType(type), like);
    sums.next_keys = n ? static_cast<char*>(next_keys.data_ptr()) : nullptr;
    sums.next = static_cast<char*>(next.data_ptr());
    if (!first || !in_packets(entries, sums))
      wide ? launch(OneColumn<double>(), tiles) : launch(OneColumn<float>(), tiles);
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

}  // namespace safeops::cuda
