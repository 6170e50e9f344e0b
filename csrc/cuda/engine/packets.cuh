// Packets of 16 bytes: access to their elements, a mask's 16 bytes as bits, and the registers for an operand's packets.
#pragma once

#include "types.cuh"

namespace safeops::cuda {

// Returns element k of a 16-byte packet. In an unrolled loop k is a constant, so this reads a register or part of one.
template <class Raw>
__device__ inline Raw packet_get(const uint4& packet, int k) {
  const uint32_t word[4] = {packet.x, packet.y, packet.z, packet.w};
  if constexpr (sizeof(Raw) == 1) return Raw(word[k / 4] >> (8 * (k % 4)));
  if constexpr (sizeof(Raw) == 2) return Raw(word[k / 2] >> (16 * (k % 2)));
  if constexpr (sizeof(Raw) == 4) return word[k];
  if constexpr (sizeof(Raw) == 8) return word[2 * k] | uint64(word[2 * k + 1]) << 32;
  if constexpr (sizeof(Raw) == 16) return packet;
}
template <class Raw>
__device__ inline uint4 packet_of(const Raw* raw) {
  if constexpr (sizeof(Raw) == 16) return *reinterpret_cast<const uint4*>(raw);
  uint32_t word[4] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(Raw) == 1) {
      word[w] = raw[4 * w] | raw[4 * w + 1] << 8 | raw[4 * w + 2] << 16 | uint32_t(raw[4 * w + 3]) << 24;
    }
    if constexpr (sizeof(Raw) == 2) word[w] = raw[2 * w] | uint32_t(raw[2 * w + 1]) << 16;
    if constexpr (sizeof(Raw) == 4) word[w] = raw[w];
    if constexpr (sizeof(Raw) == 8) word[w] = uint32_t(raw[w / 2] >> (32 * (w % 2)));
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
template <class Raw>
__device__ inline uint4 packet_splat(uint4 packet) {  // repeats the first element
  Raw raw[16 / sizeof(Raw)];
#pragma unroll
  for (auto& r : raw) r = packet_get<Raw>(packet, 0);
  return packet_of(raw);
}

// Returns the 16 bytes at p + by, for by < 16. p is aligned to 16 bytes, and `first` is the packet at p. The packet at
// p + 16 is read here; it costs no memory traffic, since the next lane reads it as its `first`.
__device__ inline uint4 shifted_packet(const char* p, unsigned by, uint4 first) {
  const uint4 next = load<uint4>(p + 16);
  uint32_t word[8] = {first.x, first.y, first.z, first.w, next.x, next.y, next.z, next.w};
#pragma unroll
  for (int k = 0; k < 6; ++k) word[k] = by & 8 ? word[k + 2] : word[k];
#pragma unroll
  for (int k = 0; k < 5; ++k) word[k] = by & 4 ? word[k + 1] : word[k];
#pragma unroll
  for (int k = 0; k < 4; ++k) word[k] = uint32_t((uint64(word[k + 1]) << 32 | word[k]) >> (by % 4 * 8));
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Turns 16 mask bytes into 16 bits. Each byte becomes 0 or 1; then a multiplication gathers the bits of four bytes.
__device__ inline unsigned mask_bits(uint4 bytes) {
  const uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  unsigned bits = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) bits |= ((__vminu4(word[w], 0x01010101u) * 0x01020408u) >> 24) << (4 * w);
  return bits;
}

// Registers for one operand's elements: Fixed<Codec> is one packet of a type known at compile time. Mixed is 8 elements
// of fp16, bf16 or (in two packets) fp32. repeated: read() loads one element, which spread() then copies to all.
template <class Codec>
struct Fixed {
  using Value = typename Codec::Value;
  using Raw = typename Codec::Raw;
  static constexpr int kElements = 16 / sizeof(Raw);
  uint4 packet;
  __device__ void read(const char* p, Type, bool repeated) {
    if (repeated) packet.x = load<Raw>(p);  // `repeated` is never true for 8-byte types
    else packet = load<uint4>(p);
  }
  __device__ void spread(Type) { packet = packet_splat<Raw>(packet); }
  __device__ Value get(int k, Type) const { return Codec::decode(packet_get<Raw>(packet, k)); }
  static __device__ void write(char* p, const Value* value, Type) {
    Raw raw[kElements];
#pragma unroll
    for (int k = 0; k < kElements; ++k) raw[k] = Codec::encode(value[k]);
    store(p, packet_of(raw));
  }
};

struct Mixed {
  using Value = float;
  static constexpr int kElements = 8;
  uint4 packet[2];
  __device__ void read(const char* p, Type type, bool repeated) {
    if (repeated) {
      packet[0].x = load_raw<uint32_t>(p, type);
    } else {
      packet[0] = load<uint4>(p);
      if (type == kF32) packet[1] = load<uint4>(p + 16);
    }
  }
  __device__ void spread(Type type) {
    packet[0] = type == kF32 ? packet_splat<uint32_t>(packet[0]) : packet_splat<uint16_t>(packet[0]);
    packet[1] = packet[0];
  }
  __device__ float get(int k, Type type) const {
    if (type == kF32) return __uint_as_float(packet_get<uint32_t>(packet[k / 4], k % 4));
    return Dynamic<float>::decode(packet_get<uint16_t>(packet[0], k), type);
  }
  static __device__ void write(char* p, const float* value, Type type) {
    if (type == kF32) {
      store(p, make_float4(value[0], value[1], value[2], value[3]));
      store(p + 16, make_float4(value[4], value[5], value[6], value[7]));
    } else if (type == kF16) {
      Fixed<F16>::write(p, value, type);
    } else {
      Fixed<BF16>::write(p, value, type);
    }
  }
};

}  // namespace safeops::cuda
