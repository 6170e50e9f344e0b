// Element types on the device: an element is converted to the compute type at the load, and back at the store.
//
// A codec has the type of an element's bits (Raw), the compute type (Value), and both conversions. These are PTX, as
// nvcc would parse CUDA's headers for half types once for each architecture.
#pragma once

#include "plan.h"

namespace safeops::cuda {

using uint64 = unsigned long long;  // uint64_t, as the load and store intrinsics name it

__device__ inline float f16_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ inline uint16_t float_to_f16(float value) {  // round to nearest even; overflow gives inf
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline uint16_t float_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline float bf16_to_float(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

// For ops that only move data (masked_fill): bits are not converted, so NaN payloads are kept.
template <class Bits>
struct Copy {
  using Raw = Bits;
  using Value = Bits;
  static __device__ Value decode(Raw raw) { return raw; }
  static __device__ Raw encode(Value value) { return value; }
};
struct F16 {
  static constexpr Type kType = kF16;
  using Raw = uint16_t;
  using Value = float;
  static __device__ Value decode(Raw raw) { return f16_to_float(raw); }
  static __device__ Raw encode(Value value) { return float_to_f16(value); }
};
struct BF16 {
  static constexpr Type kType = kBF16;
  using Raw = uint16_t;
  using Value = float;
  static __device__ Value decode(Raw raw) { return bf16_to_float(raw); }
  static __device__ Raw encode(Value value) { return float_to_bf16(value); }
};
struct F32 {
  static constexpr Type kType = kF32;
  using Raw = uint32_t;
  using Value = float;
  static __device__ Value decode(Raw raw) { return __uint_as_float(raw); }
  static __device__ Raw encode(Value value) { return __float_as_uint(value); }
};
struct F64 {
  static constexpr Type kType = kF64;
  using Raw = uint64;
  using Value = double;
  static __device__ Value decode(Raw raw) { return __longlong_as_double(int64_t(raw)); }
  static __device__ Raw encode(Value value) { return uint64(__double_as_longlong(value)); }
};

// A codec for a type known only at run time. Loading and decoding are separate calls, so that a thread issues all its
// loads before its first decode waits for one. Word is 32 bits where no operand is wider, which saves registers.
template <class Value>
struct Dynamic;

template <>
struct Dynamic<float> {  // fp16, bf16, fp32
  using Word = uint32_t;
  static __device__ float decode(Word raw, Type type) {
    return type == kF16 ? f16_to_float(uint16_t(raw)) : __uint_as_float(type == kBF16 ? raw << 16 : raw);
  }
  static __device__ Word encode(float value, Type type) {
    if (type == kF32) return __float_as_uint(value);
    return type == kF16 ? float_to_f16(value) : float_to_bf16(value);
  }
};
template <>
struct Dynamic<double> {  // all four types; to fp16 and bf16 it rounds through fp32, as torch's own casts do
  using Word = uint64;
  static __device__ double decode(Word raw, Type type) {
    return type == kF64 ? F64::decode(raw) : double(Dynamic<float>::decode(uint32_t(raw), type));
  }
  static __device__ Word encode(double value, Type type) {
    return type == kF64 ? F64::encode(value) : Dynamic<float>::encode(float(value), type);
  }
};
template <>
struct Dynamic<uint64> {  // bits of any size
  using Word = uint64;
  static __device__ uint64 decode(Word raw, Type) { return raw; }
  static __device__ Word encode(uint64 value, Type) { return value; }
};

// Loads and stores are explicitly global: from sm_100 on the compiler otherwise emits generic ones for these pointers.
template <class T>
__device__ inline T load(const char* p) {
  return __ldg(reinterpret_cast<const T*>(p));
}
template <class T>
__device__ inline void store(char* p, T value) {
  __stwb(reinterpret_cast<T*>(p), value);
}

template <class Word>
__device__ inline Word load_raw(const char* p, Type type) {
  switch (size_of(type)) {
    case 1: return load<uint8_t>(p);
    case 2: return load<uint16_t>(p);
    case 4: return load<uint32_t>(p);
    default:
      if constexpr (sizeof(Word) == 8) return load<uint64>(p);
      return 0;  // a 32-bit Word is chosen where no operand is wider
  }
}
template <class Word>
__device__ inline void store_raw(char* p, Type type, Word raw) {
  switch (size_of(type)) {
    case 2: store(p, uint16_t(raw)); break;
    case 4: store(p, uint32_t(raw)); break;
    default:
      if constexpr (sizeof(Word) == 8) store(p, uint64(raw));
  }
}

}  // namespace safeops::cuda
