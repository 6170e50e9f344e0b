// What the masked selection ops share on CUDA: the rank of each kept element, found in the launch that needs it while
// the mask is read once. A tile adds up what the tiles before it have published (decoupled look-back: Merrill and
// Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016). Nothing waits for the host and no launch
// depends on data: a CUDA graph can hold it. Ranks are integers: two runs give the same bits.
#pragma once

#include "cuda/engine/bits.cuh"
#include "cuda/engine/packets.cuh"

namespace safeops::cuda {

constexpr int kTile = 2048;  // elements that a warp ranks: 64 bytes of mask under way in each lane

struct Ranks {
  const char* flat;  // the mask, if it can be read by 16 bytes
  unsigned* ticket;  // how many tiles have been handed out
  uint64* status;    // of each tile: a count, and in the two lowest bits what it counts
  char* count;       // kept in all, an int64
  int64_t tiles;
};

enum : uint64 { kAbsent, kOfTile, kUpToTile };  // nothing yet, the tile's own, or those of all tiles up to it

// Strong accesses, seen by every SM. Relaxed, for the one word is the whole message: nothing else that was written must
// be seen with it, and a later word at the same place is never followed by an earlier one.
#ifdef __CUDACC__  // tests/kernels/emulate has these for the host
__device__ inline uint64 load_relaxed(const uint64* p) {
  uint64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(p)) : "memory");
  return value;
}
__device__ inline void store_relaxed(uint64* p, uint64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(value) : "memory");
}
#endif

// All of the functions below are for whole warps.

// The next tile. Tiles are handed out in order, so that all before one are under way whatever the order in which blocks
// start: a warp that waits for them waits for warps that run.
__device__ inline int64_t next_tile(const Ranks& ranks) {
  unsigned ticket = 0;
  if (threadIdx.x % 32 == 0) ticket = atomicAdd(ranks.ticket, 1u);
  return __shfl_sync(kWarp, ticket, 0);
}

__device__ inline unsigned warp_sum(unsigned value) {
  return warp_reduce(value, [](unsigned a, unsigned b) { return a + b; });
}

// A tile's mask: bit b of word h is element h * 1024 + lane * 32 + b.
struct Flags {
  unsigned word[2];
  __device__ unsigned count() const { return warp_sum(__popc(word[0]) + __popc(word[1])); }
};

// Operand kMask of the plan is the mask.
template <int kMask, int N>
__device__ inline Flags flags_of(const Plan<N>& plan, const Ranks& ranks, int64_t tile) {
  const int lane = threadIdx.x % 32;
  const int64_t start = tile * kTile;
  Flags flags;
  if (ranks.flat && start + kTile <= plan.numel) {
    uint4 bytes[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) bytes[u] = load<uint4>(ranks.flat + start + u * 512 + lane * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Lane l has the 16 bits of packets l and 32 + l; its word is packets 2 l and 2 l + 1.
      const unsigned both = mask_bits(bytes[2 * h]) | mask_bits(bytes[2 * h + 1]) << 16;
      const unsigned low = __shfl_sync(kWarp, both, 2 * lane % 32) >> (lane / 16 * 16);
      const unsigned high = __shfl_sync(kWarp, both, 2 * lane % 32 + 1) >> (lane / 16 * 16);
      flags.word[h] = (low & 0xffff) | high << 16;
    }
    return flags;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    flags.word[h] = 0;
    for (int j = 0; j < 32; ++j) {
      const int64_t i = start + h * 1024 + j * 32 + lane;
      const unsigned bits = __ballot_sync(kWarp, i < plan.numel && load<uint8_t>(at(plan, kMask, i)) != 0);
      if (lane == j) flags.word[h] = bits;
    }
  }
  return flags;
}

// How many elements are kept before the tile; `own` are kept in it. It publishes `own` first, so that the tiles behind
// it need not wait while it looks back, then the count of all up to it, so that they need not look further.
__device__ inline int64_t kept_before(uint64* status, int64_t tile, unsigned own) {
  const int lane = threadIdx.x % 32;
  const auto publish = [&](uint64 count, uint64 of) {
    if (lane == 0) store_relaxed(status + tile, count << 2 | of);
  };
  if (tile == 0) {
    publish(own, kUpToTile);
    return 0;
  }
  publish(own, kOfTile);
  int64_t before = 0;
  for (int64_t last = tile - 1;; last -= 32) {  // lane l reads the status of tile last - l
    uint64 word;
    unsigned ends, needed;
    do {  // until all have published, from `last` back to the nearest one with the count of all up to it
      word = last >= lane ? load_relaxed(status + (last - lane)) : uint64(kUpToTile);
      ends = __ballot_sync(kWarp, (word & 3) == kUpToTile);
      needed = ends ? ends ^ (ends - 1) : kWarp;
    } while ((__ballot_sync(kWarp, (word & 3) != kAbsent) & needed) != needed);
    before += warp_sum((needed & ~ends) >> lane & 1 ? unsigned(word >> 2) : 0);
    if (ends == 0) continue;
    const int nearest = __popc(needed) - 1;
    const unsigned low = __shfl_sync(kWarp, unsigned(word >> 2), nearest);
    const unsigned high = __shfl_sync(kWarp, unsigned(word >> 34), nearest);
    before += int64_t(uint64(high) << 32 | low);
    break;
  }
  publish(uint64(before) + own, kUpToTile);
  return before;
}

// How many elements are kept before the tile. The last tile stores the total.
__device__ inline int64_t rank_of_first(const Ranks& ranks, int64_t tile, const Flags& flags) {
  const unsigned own = flags.count();
  const int64_t before = kept_before(ranks.status, tile, own);
  if (tile == ranks.tiles - 1 && threadIdx.x % 32 == 0) store(ranks.count, uint64(before) + own);
  return before;
}

// For the elements i of a tile, or if kKept the kept ones: put(i, kept, rank, get(i, kept, rank)), 32 at a time and U
// such reads under way.
template <bool kKept, int U = 4, class Get, class Put>
__device__ inline void each_of_tile(const Flags& flags, int64_t tile, int64_t numel, int64_t rank, const Get& get,
                                    const Put& put) {
  const unsigned lane = threadIdx.x % 32, before = (1u << lane) - 1;
  const int64_t left = numel - tile * kTile;
  const int end = left < kTile ? int(left) : kTile;
#pragma unroll 1
  for (int j = 0; j < 64; j += U) {
    const unsigned word = j < 32 ? flags.word[0] : flags.word[1];
    const int64_t start = tile * kTile + j * 32 + lane;
    const int rest = end - j * 32 - int(lane);
    unsigned kept = 0, below[U], all = 0;  // kept: a bit for each element of this lane's
    decltype(get(start, true, rank)) value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const unsigned bits = __shfl_sync(kWarp, word, (j + u) % 32), own = bits >> lane & 1;
      below[u] = all + __popc(bits & before);
      all += __popc(bits);
      kept |= own << u;
      if (kKept ? own : u * 32 < rest) value[u] = get(start + u * 32, own, rank + below[u]);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool own = kept >> u & 1;
      if (kKept ? own : u * 32 < rest) put(start + u * 32, own, rank + below[u], value[u]);
    }
    rank += all;
  }
}

__device__ inline int64_t warp_number() { return int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; }

// Where an operand whose elements follow each other has element i: without the divisions of at().
template <class T>
struct Dense {
  char* base;
  __device__ char* operator()(int64_t i) const { return base + i * int64_t(sizeof(T)); }
};
template <class T>
constexpr int kDense = sizeof(T) == 8 ? 4 : 8;  // of those, elements that a lane has under way

// ---- host

// Whether the operands from `first` on, behind the order and the mask, are dense in that order. width: of an element.
template <int N>
bool is_dense(const Plan<N>& plan, int64_t width, int first = 2) {
  bool dense = plan.ndim == 1;
  for (int i = first; i < N; ++i) dense = dense && plan.stride[i][0] == width;
  return dense;
}

// A mask beside elements that may have been split in two.
inline Bits mask_of(const Tensor& mask, const Tensor& input, const char* op) {
  STD_TORCH_CHECK(dtype_of(mask) == DType::kBool, op, ": mask must be bool");
  check_device(mask, input, op, "mask");
  Bits bits(mask);
  if (element_bytes(input) == 16) bits.push(2, 0);
  return bits;
}

// What one launch of ranks works on. `workspace` must live until the launch is queued, and serves one launch only.
inline Ranks make_ranks(const Shape& shape, const Bits& mask, const Tensor& like, Tensor& workspace, Tensor& count,
                        cudaStream_t stream) {
  const int64_t tiles = (shape.numel() + kTile - 1) / kTile, words = tiles + 1;
  workspace = safeops::empty(Shape(1, &words), DType::kLong, like);
  count = safeops::empty(Shape(), DType::kLong, like);
  cudaMemsetAsync(workspace.data_ptr(), 0, words * sizeof(uint64), stream);
  if (tiles == 0) cudaMemsetAsync(count.data_ptr(), 0, sizeof(int64_t), stream);
  const Plan<2> plan = plan_in_order<1>(shape, {mask.all()});
  const bool flat = plan.ndim == 1 && plan.stride[1][0] == 1 && uintptr_t(plan.base[1]) % 16 == 0;
  uint64* first = static_cast<uint64*>(workspace.data_ptr());
  return {flat ? plan.base[1] : nullptr, reinterpret_cast<unsigned*>(first), first + 1,
          static_cast<char*>(count.data_ptr()), tiles};
}

inline unsigned blocks_of(const Ranks& ranks) { return blocks_for(ranks.tiles, kThreads / 32); }

}  // namespace safeops::cuda
