// The loop over a list of floating tensors on CUDA: one launch for up to kMany tensors (members) of any sizes and
// dtypes. A table passed by value says which warp has which part of which member. An op defines a functor:
//
//   struct Op {
//     static constexpr bool kWrites = false;
//     template <class Codec> static constexpr bool kPairs = false;  // true: read_pairs(state, packets) replaces read
//     template <class Codec> struct State { ... };  // a lane's state; it begins value-initialised
//     __device__ bool begin();                      // false: nothing to do
//     template <class Codec>                        // one element; returns true if special() must see it
//     __device__ bool read(State<Codec>&, Raw raw) const;
//     template <class Codec>                        // that element, or another of the same read; left: numel minus
//     __device__ void special(State<Codec>&, Raw raw, int64_t left) const;                // its row-major index
//     template <class Codec>                        // at the end, called by all 32 lanes
//     __device__ void finish(const State<Codec>&, int member) const;
//     static constexpr int kShared = 0;             // bytes of shared memory; if > 0, each block calls fold
//     __device__ void fold(int64_t block, int warps) const;  // block: its number over all launches; warps: with work
//   };
//
// With kWrites, `Raw write<Codec>(Raw raw) const` replaces read, special and finish.
//
// Tensors that are dense in some order of their dims are read in 16-byte packets, whatever the alignment of their first
// element. Other tensors (strided or expanded views) are read element by element, each in a launch of its own.
//
// Bytes in flight: four packets a thread, 2 KiB a warp. The 48 KiB that an SM of an H200 needs take 24 warps, so at
// most 80 registers a thread.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/engine/packets.cuh"
#include "table.cuh"

namespace safeops::cuda {

constexpr int kPackets = 4;   // packets that a lane has in flight
constexpr int64_t kStep = kPackets * 32 * 16;  // bytes that a warp has in flight
// Warps of a launch; an H200 holds about as many at once. A constant: the order of a sum must not depend on the GPU.
constexpr int64_t kWarps = 4096;
constexpr uint32_t kBlockWarps = kThreads / 32;

// ---- device

// Returns the index of the member that `warp` works on: the last one whose first warp is at most `warp`. (Empty members
// have no warps.)
template <int kMost>
__device__ inline int member_of(const Batch<kMost>& batch, uint32_t warp) {
  int low = 0, high = batch.members - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (batch.member[middle].first <= warp) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Memory that is about to be written must not go through the read-only cache.
template <class T, class Op>
__device__ inline T fetch(const char* p) {
  if constexpr (Op::kWrites) return __ldcs(reinterpret_cast<const T*>(p));
  else return load<T>(p);
}

template <class Codec, class Op, class State, class Left>
__device__ inline void one(const Op& op, State& state, char* p, const Left& left) {
  const auto raw = fetch<typename Codec::Raw, Op>(p);
  if constexpr (Op::kWrites) store(p, op.template write<Codec>(raw));
  else if (op.template read<Codec>(state, raw)) op.template special<Codec>(state, raw, left());
}

// Processes 32 U packets, U per lane, from element `at` on.
template <int U, class Codec, class Op, class State, class Left>
__device__ inline void packets(const Op& op, State& state, char* base, int64_t at, const Left& left) {
  using Raw = typename Codec::Raw;
  constexpr int size = sizeof(Raw), K = 16 / size;
  const int64_t first = at + threadIdx.x % 32 * K;
  char* p = base + first * size;
  uint4 packet[U];
#pragma unroll
  for (int u = 0; u < U; ++u) packet[u] = fetch<uint4, Op>(p + u * 512);
  bool ask = false;
  if constexpr (Op::template kPairs<Codec>) ask = op.template read_pairs<Codec>(state, packet);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if constexpr (Op::kWrites) {
      Raw raw[K];
#pragma unroll
      for (int k = 0; k < K; ++k) raw[k] = op.template write<Codec>(packet_get<Raw>(packet[u], k));
      store(p + u * 512, packet_of(raw));
    } else if constexpr (!Op::template kPairs<Codec>) {
#pragma unroll
      for (int k = 0; k < K; ++k) ask |= op.template read<Codec>(state, packet_get<Raw>(packet[u], k));
    }
  }
  if constexpr (!Op::kWrites) {
    if (!ask) return;
#pragma unroll 1
    for (int j = 0; j < U * K; ++j) {
      const int step = j / K * 32 * K + j % K;
      op.template special<Codec>(state, load<Raw>(p + step * size), left(first + step));
    }
  }
}

// Processes elements [begin, end) of a dense tensor.
template <class Codec, class Op, class State, class Left>
__device__ inline void dense(const Op& op, State& state, char* base, int64_t begin, int64_t end, const Left& left) {
  constexpr int size = sizeof(typename Codec::Raw), K = 16 / size;
  const auto singles = [&](int64_t from, int64_t to) {
#pragma unroll 1
    for (int64_t i = from + threadIdx.x % 32; i < to; i += 32)
      one<Codec>(op, state, base + i * size, [&left, i] { return left(i); });
  };
  const int misaligned = uintptr_t(base + begin * size) % 16 / size;
  int64_t at = begin + (misaligned ? K - misaligned : 0);
  at = at < end ? at : end;
  singles(begin, at);
#pragma unroll 1
  for (; at + 32 * K * kPackets <= end; at += 32 * K * kPackets) packets<kPackets, Codec>(op, state, base, at, left);
#pragma unroll 1
  for (; at + 32 * K <= end; at += 32 * K) packets<1, Codec>(op, state, base, at, left);
  singles(at, end);
}

template <bool kDense, class Op, int kMost>
__device__ inline void scan_part(const Batch<kMost>& batch, const Walk& walk, const Op& op, uint32_t warp) {
  const int index = member_of(batch, warp);
  const Member& m = batch.member[index];
  // A tile is the part of a warp. Tiles begin at aligned packets; the elements before the first aligned packet belong
  // to the first tile.
  const int64_t tile = batch.tile / size_of(m.type), head = kDense ? -uintptr_t(m.base) % 16 / size_of(m.type) : 0;
  const int64_t last = head + (warp - m.first + 1) * tile, begin = warp == m.first ? 0 : last - tile;
  const int64_t end = last < m.numel ? last : m.numel;
  const auto run = [&](auto codec) {
    using Codec = decltype(codec);
    typename Op::template State<Codec> state{};
    const auto left = [&](int64_t i) { return m.numel - (walk.ndim ? at(walk, 1, i) - walk.base[1] : i); };
    if constexpr (kDense) {
      dense<Codec>(op, state, m.base, begin, end, left);
    } else {
#pragma unroll 1
      for (int64_t i = begin + threadIdx.x % 32; i < end; i += 32)
        one<Codec>(op, state, const_cast<char*>(at(walk, 0, i)), [&left, i] { return left(i); });
    }
    if constexpr (!Op::kWrites) op.template finish<Codec>(state, batch.first + index);
  };
  if (m.type == kF16) run(F16());
  else if (m.type == kBF16) run(BF16());
  else if (m.type == kF32) run(F32());
  else run(F64());
}

template <class Op, bool kDense, int kMost>
__global__ void __launch_bounds__(kThreads, 6)
    scan_kernel(const __grid_constant__ Batch<kMost> batch, const __grid_constant__ Walk walk, Op op) {
  const uint32_t first = blockIdx.x * kBlockWarps, warp = first + threadIdx.x / 32;
  if (warp < batch.warps && op.begin()) scan_part<kDense>(batch, walk, op, warp);
  if constexpr (Op::kShared)
    op.fold(batch.before + blockIdx.x, batch.warps - first < kBlockWarps ? batch.warps - first : kBlockWarps);
}

// ---- host

// The launches for a list of tensors. ordered: the op needs the row-major index of an element.
class Launches {
 public:
  Launches(const std::vector<Tensor>& tensors, const char* op, bool ordered) {
    for (const Tensor& t : tensors) {
      float_type(t, op, "each tensor");
      check_device(t, tensors[0], op, "a tensor");
    }
    const int most = most_members();
    bool open = false;  // true: the last launch may take further tensors
    for (const Tensor& t : tensors) {
      const safeops::View view(t);
      Walk walk;
      const bool dense = make_walk(view, walk), shares_launch = dense && (walk.ndim == 0 || !ordered);
      if (!shares_launch || !open || launches_.back().head.members == most) {
        launches_.push_back({});
        launches_.back().head.first = int(members_.size());
        launches_.back().dense = dense;
        if (!shares_launch) launches_.back().walk = walk;
      }
      ++launches_.back().head.members;
      members_.push_back({view.data, view.shape().numel(), 0, Type(view.dtype)});
      open = shares_launch;
    }
    for (Launch& launch : launches_) {
      divide(launch.head);
      launch.head.before = blocks_;
      blocks_ += blocks_for(launch.head.warps, kBlockWarps);
    }
  }

  int64_t blocks() const { return blocks_; }

  template <class Op>
  void run(const Op& op, cudaStream_t stream) const {
    for (const Launch& launch : launches_) {
      if (launch.head.warps == 0) continue;
      if (!launch.dense) start_scan<false, kFew>(launch, op, stream);
      else if (launch.head.members <= kFew) start_scan<true, kFew>(launch, op, stream);
      else start_scan<true, kMany>(launch, op, stream);
    }
  }

 private:
  struct Launch {
    Head head;
    Walk walk;
    bool dense;
  };

  template <bool kDense, int kMost, class Op>
  void start_scan(const Launch& launch, const Op& op, cudaStream_t stream) const {
    Batch<kMost> batch;
    static_cast<Head&>(batch) = launch.head;
    std::copy_n(members_.begin() + launch.head.first, launch.head.members, batch.member);
    const unsigned blocks = blocks_for(batch.warps, kBlockWarps);
    start_blocks(scan_kernel<Op, kDense, kMost>, blocks, kThreads, Op::kShared, stream, batch, launch.walk, op);
  }

  // Sets the size of a tile from the bytes of the launch, so that a launch of small tensors uses all SMs, too.
  void divide(Head& head) {
    const auto first_member = members_.begin() + head.first;
    int64_t bytes = 0;
    std::for_each_n(first_member, head.members, [&](const Member& m) { bytes += m.numel * size_of(m.type); });
    head.tile = (bytes / kWarps / kStep + 1) * kStep;
    std::for_each_n(first_member, head.members, [&](Member& m) {
      const int64_t tile = head.tile / size_of(m.type);
      m.first = head.warps;
      head.warps += uint32_t((m.numel + tile - 1) / tile);
    });
  }

  std::vector<Member> members_;
  std::vector<Launch> launches_;
  int64_t blocks_ = 0;
};

}  // namespace safeops::cuda
