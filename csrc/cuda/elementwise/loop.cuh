// The elementwise loop on CUDA. An op defines a functor:
//
//   struct Op {
//     using Value = float;                          // the compute type
//     static constexpr int kOut = 1, kIn = 2;       // number of outputs and of inputs
//     static constexpr bool kMask = false;          // one more operand: a byte mask, nonzero is true
//     static constexpr bool kRolled = false;        // true: the loop over a packet's elements is not unrolled
//     __device__ void prepare();                    // once per thread, after its loads are issued
//     __device__ void operator()(const Value* in, bool mask, Value* out) const;
//   };
//
// and gets three kernels. The first that takes the operands runs:
//   flat     all operands are dense in one order and have one dtype: 16-byte accesses, no index arithmetic
//   rows     operands are broadcast (a padding mask, a per-row divisor, the stride-0 gradient of .sum()), or dtypes up
//            to fp32 are mixed: 16-byte accesses, one index computation per packet
//   general  any strides, any dtypes: one element at a time; 2^31 elements and more in several launches
//
// Bytes in flight per thread, in `flat`: fp16/bf16 masked_fill 2 data packets + 1 mask packet = 48; safe_div 2 x 2
// packets = 64; its backward 3 packets = 48. An SM of an H200 needs 48 KiB in flight, which takes 1024 resident
// threads: hence at most 64 registers a thread, or more threads (kMinBlocks).
#pragma once

#include "cuda/engine/launch.cuh"
#include "cuda/engine/packets.cuh"
#include "cuda/engine/plan.h"

namespace safeops::cuda {

// Blocks of 128 threads on an SM. 8 blocks leave 64 registers a thread. An op with one fp32 input has only 32 bytes in
// flight per thread, so it needs 12.
template <class Op>
constexpr int kMinBlocks = Op::kIn == 1 && !Op::kMask && sizeof(typename Op::Value) == 4 ? 12 : 8;
template <class Op>
constexpr int operands() {
  return Op::kOut + Op::kIn + Op::kMask;
}

// Applies op to the K elements of a packet, and writes result o of element k to out[o][k]. get(i, k) is element k of
// input i, masked(k) that of the mask.
template <class Op, int K, class Get, class Masked>
__device__ inline void apply(const Op& op, Get get, Masked masked, typename Op::Value (&out)[Op::kOut][K]) {
  using Value = typename Op::Value;
  constexpr int kOut = Op::kOut, kIn = Op::kIn;
  if constexpr (Op::kRolled) {
    // Registers cannot be indexed by the counter of a rolled loop. So each step applies the op to element 0, moves the
    // others down by one, and puts the result last.
    static_assert(!Op::kMask && kIn >= kOut);
    Value packet_values[kIn][K], value[kIn], result[kOut];
#pragma unroll
    for (int i = 0; i < kIn; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) packet_values[i][k] = get(i, k);
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < kIn; ++i) value[i] = packet_values[i][0];
      op(value, false, result);
#pragma unroll
      for (int i = 0; i < kIn; ++i) {
#pragma unroll
        for (int j = 0; j + 1 < K; ++j) packet_values[i][j] = packet_values[i][j + 1];
        if (i < kOut) packet_values[i][K - 1] = result[i < kOut ? i : 0];
      }
    }
#pragma unroll
    for (int o = 0; o < kOut; ++o)
#pragma unroll
      for (int k = 0; k < K; ++k) out[o][k] = packet_values[o][k];
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Value value[kIn], result[kOut];
#pragma unroll
      for (int i = 0; i < kIn; ++i) value[i] = get(i, k);
      op(value, masked(k), result);
#pragma unroll
      for (int o = 0; o < kOut; ++o) out[o][k] = result[o];
    }
  }
}

// ---- flat
//
// A warp owns a tile of 32 * kUnroll packets. Each lane reads every 32nd packet, so that an access of the warp covers
// 512 consecutive bytes. The 16 mask bytes that a lane reads belong to the data of other lanes: it sends them as bits,
// by one shuffle per packet. An unaligned input (x[1:]) is read in aligned packets, then shifted.

template <class Op, class Codec>
struct Tile {
  static constexpr int kPacket = 16 / sizeof(typename Codec::Raw);  // elements of a packet
  static constexpr int kUnroll = Op::kMask ? 16 / kPacket : Op::kIn > 2 || Op::kRolled ? 1 : 2;
  static constexpr int kElements = 32 * kUnroll * kPacket;
  // True if inputs need not be aligned to 16 bytes. (With a mask and 8-byte elements a lane holds 8 packets: no
  // registers are left for shifting.)
  static constexpr bool kUnaligned = kUnroll < 8;
};

template <class Op, class Codec>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Op>)
    flat_kernel(const __grid_constant__ Plan<operands<Op>()> plan, Op op) {
  using Raw = typename Codec::Raw;
  using Value = typename Codec::Value;
  using T = Tile<Op, Codec>;
  constexpr int K = T::kPacket, U = T::kUnroll, kOut = Op::kOut, kIn = Op::kIn;
  const int lane = threadIdx.x % 32;
  const int64_t start = (int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * T::kElements;
  if (start >= plan.numel) return;

  const auto misalignment = [&](int i) { return T::kUnaligned ? unsigned(uintptr_t(plan.base[kOut + i]) % 16) : 0; };
  unsigned shifted = 0;
#pragma unroll
  for (int i = 0; i < operands<Op>() - kOut; ++i) shifted |= misalignment(i);
  // A tile that is not full is processed element by element. If packets are shifted, so is a full tile that ends within
  // 16 elements of the tensor's end: its last load would reach up to 15 bytes past the tensor.
  if (start + T::kElements + (shifted ? 16 : 0) > plan.numel) {
    op.prepare();
    const int64_t end = start + T::kElements < plan.numel ? start + T::kElements : plan.numel;
#pragma unroll 1
    for (int64_t at = start + lane; at < end; at += 32) {
      Value in[kIn], out[kOut];
#pragma unroll
      for (int i = 0; i < kIn; ++i) in[i] = Codec::decode(load<Raw>(plan.base[kOut + i] + at * sizeof(Raw)));
      op(in, Op::kMask && load<uint8_t>(plan.base[operands<Op>() - 1] + at) != 0, out);
#pragma unroll
      for (int o = 0; o < kOut; ++o)
        if (plan.base[o]) store<Raw>(plan.base[o] + at * sizeof(Raw), Codec::encode(out[o]));
    }
    return;
  }

  uint4 mask{}, in[U][kIn];
  const int64_t offset = start * sizeof(Raw) + lane * 16;
  const auto from = [&](int i, int64_t bytes) { return plan.base[kOut + i] - misalignment(i) + bytes; };
  if constexpr (Op::kMask) mask = load<uint4>(from(kIn, start + lane * 16));
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int i = 0; i < kIn; ++i) in[u][i] = load<uint4>(from(i, offset + u * 512));
  if (Op::kMask && misalignment(kIn)) mask = shifted_packet(from(kIn, start + lane * 16), misalignment(kIn), mask);
#pragma unroll
  for (int i = 0; i < kIn; ++i) {
    if (misalignment(i) == 0) continue;
#pragma unroll
    for (int u = 0; u < U; ++u) in[u][i] = shifted_packet(from(i, offset + u * 512), misalignment(i), in[u][i]);
  }
  op.prepare();
  const unsigned bits = Op::kMask ? mask_bits(mask) : 0;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    // Packet u of this lane begins at element (32 u + lane) K of the tile. Lane (32 u + lane) K / 16 has its mask bits.
    const unsigned fill = Op::kMask ? __shfl_sync(kWarp, bits, 2 * K * u + lane * K / 16) >> (lane * K % 16) : 0;
    Value out[kOut][K];
    apply<Op, K>(op, [&](int i, int k) { return Codec::decode(packet_get<Raw>(in[u][i], k)); },
                 [&](int k) { return ((fill >> k) & 1) != 0; }, out);
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      if (plan.base[o]) Fixed<Codec>::write(plan.base[o] + offset + u * 512, out[o], Type());
  }
}

// ---- rows

template <class Op>
constexpr int kRowsUnroll = Op::kIn > 2 || Op::kRolled ? 1 : Op::kMask ? 4 : 2;

template <class Op, class Hold>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Op> > 10 ? 10 : kMinBlocks<Op>)
    rows_kernel(const __grid_constant__ Plan<operands<Op>()> plan, Op op) {
  using Value = typename Hold::Value;
  constexpr int N = operands<Op>(), kOut = Op::kOut, kIn = Op::kIn, K = Hold::kElements;
  constexpr int U = kRowsUnroll<Op>;
  const uint32_t packets = uint32_t(plan.numel / K);
  const uint32_t first = blockIdx.x * (kThreads * U) + threadIdx.x;
  bool repeated[N];
#pragma unroll
  for (int i = 0; i < N; ++i) repeated[i] = plan.stride[i][0] == 0;

  Hold in[U][kIn];
  uint64 mask[U];
  char* target[U][kOut];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const uint32_t index = first + u * kThreads;
    int64_t offset[N];
    offsets_at<K>(plan, index < packets ? index : 0, offset);  // beyond the end: reads packet 0, writes nothing
#pragma unroll
    for (int i = 0; i < kIn; ++i)
      in[u][i].read(plan.base[kOut + i] + offset[kOut + i], plan.type[kOut + i], repeated[kOut + i]);
    if constexpr (Op::kMask) {
      const char* p = plan.base[N - 1] + offset[N - 1];
      if (repeated[N - 1]) mask[u] = load<uint8_t>(p);
      else if constexpr (K == 8) mask[u] = load<uint64>(p);
      else mask[u] = load<uint32_t>(p);
    }
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      target[u][o] = index < packets && plan.base[o] ? plan.base[o] + offset[o] : nullptr;
  }
  op.prepare();
#pragma unroll
  for (int u = 0; u < U; ++u) {
#pragma unroll
    for (int i = 0; i < kIn; ++i)
      if (repeated[kOut + i]) in[u][i].spread(plan.type[kOut + i]);
    if (Op::kMask && repeated[N - 1]) mask[u] *= 0x0101010101010101ull;
    Value out[kOut][K];
    const auto masked = [&](int k) { return Op::kMask && ((mask[u] >> (8 * k)) & 0xff) != 0; };
    // If the last input (a divisor) is repeated, every k reads its element 0, so that its inverse is computed once.
    const auto get = [&](int i, int k) { return in[u][i].get(k, plan.type[kOut + i]); };
    if (!Op::kMask && !std::is_same_v<Hold, Mixed> && repeated[N - 1])
      apply<Op, K>(op, [&](int i, int k) { return get(i, i == kIn - 1 ? 0 : k); }, masked, out);
    else
      apply<Op, K>(op, get, masked, out);
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      if (target[u][o]) Hold::write(target[u][o], out[o], plan.type[o]);
  }
}

// ---- general

template <class Op>
constexpr int kGeneralUnroll = Op::kRolled ? 1 : sizeof(typename Op::Value) == 8 ? 2 : 4;

template <class Op>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Op>)
    general_kernel(const __grid_constant__ Plan<operands<Op>()> plan, Op op) {
  using Value = typename Op::Value;
  using Any = Dynamic<Value>;
  constexpr int N = operands<Op>(), kOut = Op::kOut, kIn = Op::kIn, U = kGeneralUnroll<Op>;
  const uint32_t numel = uint32_t(plan.numel), first = blockIdx.x * (kThreads * U) + threadIdx.x;
  typename Any::Word raw[U][kIn];
  bool mask[U];
  char* target[U][kOut];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const uint32_t index = first + u * kThreads;
    int64_t offset[N];
    offsets_at<1>(plan, index < numel ? index : 0, offset);
#pragma unroll
    for (int i = 0; i < kIn; ++i)
      raw[u][i] = load_raw<typename Any::Word>(plan.base[kOut + i] + offset[kOut + i], plan.type[kOut + i]);
    mask[u] = Op::kMask && load<uint8_t>(plan.base[N - 1] + offset[N - 1]) != 0;
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      target[u][o] = index < numel && plan.base[o] ? plan.base[o] + offset[o] : nullptr;
  }
  op.prepare();
#pragma unroll
  for (int u = 0; u < U; ++u) {
    Value value[kIn], out[kOut];
#pragma unroll
    for (int i = 0; i < kIn; ++i) value[i] = Any::decode(raw[u][i], plan.type[kOut + i]);
    op(value, mask[u], out);
#pragma unroll
    for (int o = 0; o < kOut; ++o)
      if (target[u][o]) store_raw(target[u][o], plan.type[o], Any::encode(out[o], plan.type[o]));
  }
}

// ---- host

template <class Hold, class Op>
bool launch_rows(Plan<operands<Op>()>& plan, const Op& op, cudaStream_t stream) {
  constexpr int K = Hold::kElements, U = kRowsUnroll<Op>;
  if (!has_rows(plan, K, Op::kOut)) return false;
  set_dividers(plan, K);
  start(rows_kernel<Op, Hold>, blocks_for(plan.numel, int64_t(K) * kThreads * U), stream, plan, op);
  return true;
}

// All operands must have Codec's type. Returns false, without a launch, if they are not dense in one order, or not
// aligned.
template <class Codec, class Op>
bool launch_flat(Plan<operands<Op>()>& plan, const Op& op, cudaStream_t stream) {
  using T = Tile<Op, Codec>;
  if (!is_flat(plan, T::kUnaligned ? Op::kOut : operands<Op>())) return false;
  start(flat_kernel<Op, Codec>, blocks_for(plan.numel, int64_t(T::kElements) * (kThreads / 32)), stream, plan, op);
  return true;
}

template <class Codec, class Op>
bool launch_fixed(Plan<operands<Op>()>& plan, const Op& op, cudaStream_t stream) {
  if (launch_flat<Codec>(plan, op, stream)) return true;
  if constexpr (sizeof(typename Codec::Raw) < 8)
    return launch_rows<Fixed<Codec>>(plan, op, stream);
  else
    return false;
}

template <class Op>
void launch_general(const Plan<operands<Op>()>& full_plan, const Op& op, cudaStream_t stream) {
  for_each_part(full_plan, [&](Plan<operands<Op>()>& plan) {
    set_dividers(plan, 1);
    start(general_kernel<Op>, blocks_for(plan.numel, kThreads * kGeneralUnroll<Op>), stream, plan, op);
  });
}

}  // namespace safeops::cuda
