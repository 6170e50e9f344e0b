// The loops of pack.cpp. Eight mask bytes become one byte of bits; a table gives the positions of the set bits. No step
// branches on a single element: with a half-full mask every second such branch would be mispredicted.
#pragma once

#include "cpu/selection/pack.h"

#ifdef SAFEOPS_X86
#include <immintrin.h>
#define SAFEOPS_PACK_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#endif

namespace safeops::cpu {

inline int64_t count_loop(const uint8_t* mask, int64_t n) {
  uint32_t kept = 0;
  _Pragma("omp simd reduction(+ : kept)")
  for (int64_t i = 0; i < n; ++i) kept += mask[i] != 0;
  return kept;
}

// Packs elements one by one, but skips eight mask bytes at once if they keep nothing. It is used near the end of the
// output, beyond which whole vectors would write.
template <class T, bool kValues, bool kIndex>
int64_t pack_last(const uint8_t* mask, const T* x, int64_t n, int64_t base, T* out, int64_t* index, int64_t room) {
  int64_t k = 0;
  for (int64_t i = 0; i < n && k < room;) {
    uint64_t word = 1;
    if (i + 8 <= n) std::memcpy(&word, mask + i, 8);
    if (word == 0) {
      i += 8;
      continue;
    }
    for (const int64_t stop = std::min(i + 8, n); i < stop && k < room; ++i) {
      if (!mask[i]) continue;
      if constexpr (kValues) out[k] = x[i];
      if constexpr (kIndex) index[k] = base + i;
      ++k;
    }
  }
  return k;
}

// Writes every element to the next free slot, but only a kept element advances the slot.
template <class T, bool kValues, bool kIndex>
int64_t pack_plain(const uint8_t* mask, const T* x, int64_t n, int64_t base, T* out, int64_t* index, int64_t room) {
  if (room <= n) return pack_last<T, kValues, kIndex>(mask, x, n, base, out, index, room);
  int64_t k = 0;
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (kValues) out[k] = x[i];
    if constexpr (kIndex) index[k] = base + i;
    k += mask[i] != 0;
  }
  return k;
}

template <class T>
void merge_plain(const uint8_t* mask, const T* x, const T* source, int64_t most, int64_t, int64_t n, T* out) {
  int64_t k = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool take = (mask[i] != 0) & (k < most);
    const T from = source[std::min(k, most - 1)];
    const T ones = static_cast<T>(-static_cast<T>(take));
    out[i] = static_cast<T>((from & ones) | (x[i] & static_cast<T>(~ones)));
    k += take;
  }
}

#ifdef SAFEOPS_X86

// Tables with one entry for each byte of mask bits. positions: the positions of the set bits, lowest first, one per
// byte. rank: for each bit the number of set bits below it, one per byte.
struct Lanes {
  uint64_t positions[256], rank[256];
  constexpr Lanes() : positions(), rank() {
    for (int bits = 0; bits < 256; ++bits) {
      uint64_t k = 0;
      for (int lane = 0; lane < 8; ++lane) {
        rank[bits] |= k << (8 * lane);
        if (bits >> lane & 1) positions[bits] |= static_cast<uint64_t>(lane) << (8 * k++);
      }
    }
  }
};
constexpr Lanes kLanes;

SAFEOPS_PACK_AVX2 inline __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
SAFEOPS_PACK_AVX2 inline void store(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
SAFEOPS_PACK_AVX2 inline __m128i lanes_of(uint32_t bits) {
  return _mm_cvtsi64_si128(static_cast<long long>(kLanes.positions[bits]));
}
SAFEOPS_PACK_AVX2 inline __m128i ranks_of(uint32_t bits) {
  return _mm_cvtsi64_si128(static_cast<long long>(kLanes.rank[bits]));
}

// Returns 32 mask bytes as bits: bit i is 1 if mask[i] is not 0.
SAFEOPS_PACK_AVX2 inline uint32_t bits_of_mask(const uint8_t* mask) {
  const __m256i dropped = _mm256_cmpeq_epi8(load(mask), _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(dropped));
}

// permute_four and permute_eight return x[lanes[i]], for four elements of 8 bytes, or for eight smaller elements.
SAFEOPS_PACK_AVX2 inline __m256i permute_four(const uint64_t* x, __m128i lanes) {
  const __m256i twice = _mm256_slli_epi64(_mm256_cvtepu8_epi64(lanes), 1);  // halves of lane l: 2l, 2l + 1
  const __m256i next = _mm256_slli_epi64(_mm256_add_epi64(twice, _mm256_set1_epi64x(1)), 32);
  return _mm256_permutevar8x32_epi32(load(x), _mm256_or_si256(twice, next));
}
SAFEOPS_PACK_AVX2 inline __m256i permute_eight(const uint32_t* x, __m128i lanes) {
  return _mm256_permutevar8x32_epi32(load(x), _mm256_cvtepu8_epi32(lanes));
}
SAFEOPS_PACK_AVX2 inline __m128i permute_eight(const uint16_t* x, __m128i lanes) {
  const __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m128i twice = _mm_mullo_epi16(_mm_cvtepu8_epi16(lanes), _mm_set1_epi16(0x0202));  // bytes of lane l
  return _mm_shuffle_epi8(from, _mm_add_epi16(twice, _mm_set1_epi16(0x0100)));
}
SAFEOPS_PACK_AVX2 inline __m128i permute_eight(const uint8_t* x, __m128i lanes) {
  return _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)), lanes);
}

// Packs eight elements of x to out: first the elements whose bits are set, in order, then others, which do not count.
template <class T>
SAFEOPS_PACK_AVX2 inline void pack_eight(uint32_t bits, const T* x, T* out) {
  if constexpr (sizeof(T) == 8) {
    store(out, permute_four(x, lanes_of(bits & 15)));
    store(out + _mm_popcnt_u32(bits & 15), permute_four(x + 4, lanes_of(bits >> 4)));
  } else if constexpr (sizeof(T) == 4) {
    store(out, permute_eight(x, lanes_of(bits)));
  } else if constexpr (sizeof(T) == 2) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), permute_eight(x, lanes_of(bits)));
  } else {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), permute_eight(x, lanes_of(bits)));
  }
}

// Merges eight elements: out[i] = mask[i] ? the next element of source : x[i]. Reads eight elements of source.
template <class T>
SAFEOPS_PACK_AVX2 inline void merge_eight(uint32_t bits, const uint8_t* mask, const T* x, const T* source, T* out) {
  const __m128i flags = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(mask));
  const __m128i drop = _mm_cmpeq_epi8(flags, _mm_setzero_si128());
  if constexpr (sizeof(T) == 8) {
    const int64_t low = _mm_popcnt_u32(bits & 15);
    const __m256i a = permute_four(source, ranks_of(bits & 15)), b = permute_four(source + low, ranks_of(bits >> 4));
    const __m256i drop_b = _mm256_cvtepi8_epi64(_mm_srli_si128(drop, 4));
    store(out, _mm256_blendv_epi8(a, load(x), _mm256_cvtepi8_epi64(drop)));
    store(out + 4, _mm256_blendv_epi8(b, load(x + 4), drop_b));
  } else if constexpr (sizeof(T) == 4) {
    store(out, _mm256_blendv_epi8(permute_eight(source, ranks_of(bits)), load(x), _mm256_cvtepi8_epi32(drop)));
  } else if constexpr (sizeof(T) == 2) {
    const __m128i old = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_blendv_epi8(permute_eight(source, ranks_of(bits)), old, _mm_cvtepi8_epi16(drop)));
  } else {
    const __m128i old = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out),
                     _mm_blendv_epi8(permute_eight(source, ranks_of(bits)), old, drop));
  }
}

template <class T>
SAFEOPS_PACK_AVX2 void merge_avx2(const uint8_t* mask, const T* x, const T* source, int64_t most, int64_t readable,
                                  int64_t n, T* out) {
  int64_t k = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint32_t bits = bits_of_mask(mask + i);
    const int64_t kept = _mm_popcnt_u32(bits);
    if (k + kept > most || k + 32 > readable) break;
    if (bits == 0) {
      std::memcpy(out + i, x + i, 32 * sizeof(T));
    } else if (bits == ~0u) {
      std::memcpy(out + i, source + k, 32 * sizeof(T));
    } else {
      int64_t from = k;
      for (int lane = 0; lane < 32; lane += 8) {
        const uint32_t eight = bits >> lane & 255;
        merge_eight(eight, mask + i + lane, x + i + lane, source + from, out + i + lane);
        from += _mm_popcnt_u32(eight);
      }
    }
    k += kept;
  }
  if (k < most)
    merge_plain(mask + i, x + i, source + k, most - k, 0, n - i, out + i);
  else
    std::memcpy(out + i, x + i, (n - i) * sizeof(T));
}

SAFEOPS_PACK_AVX2 inline void number_eight(uint32_t bits, int64_t base, int64_t* index) {
  const __m128i lanes = lanes_of(bits);
  const __m256i first = _mm256_set1_epi64x(base);
  store(index, _mm256_add_epi64(first, _mm256_cvtepu8_epi64(lanes)));
  store(index + 4, _mm256_add_epi64(first, _mm256_cvtepu8_epi64(_mm_srli_si128(lanes, 4))));
}

template <class T, bool kValues, bool kIndex>
SAFEOPS_PACK_AVX2 int64_t pack_avx2(const uint8_t* mask, const T* x, int64_t n, int64_t base, T* out, int64_t* index,
                                    int64_t room) {
  int64_t k = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const uint32_t bits = bits_of_mask(mask + i);
    if (bits == 0) continue;
    if (k + 32 > room) break;  // whole vectors are written, which need this room
    if (bits == ~0u) {
      if constexpr (kValues) std::memcpy(out + k, x + i, 32 * sizeof(T));
      if constexpr (kIndex)
        for (int64_t lane = 0; lane < 32; lane += 8) number_eight(255, base + i + lane, index + k + lane);
      k += 32;
      continue;
    }
    for (int lane = 0; lane < 32; lane += 8) {
      const uint32_t eight = bits >> lane & 255;
      if constexpr (kValues) pack_eight(eight, x + i + lane, out + k);
      if constexpr (kIndex) number_eight(eight, base + i + lane, index + k);
      k += _mm_popcnt_u32(eight);
    }
  }
  const T* rest = kValues ? x + i : nullptr;
  return k + pack_last<T, kValues, kIndex>(mask + i, rest, n - i, base + i, kValues ? out + k : nullptr,
                                           kIndex ? index + k : nullptr, room - k);
}

SAFEOPS_PACK_AVX2 inline int64_t count_avx2(const uint8_t* mask, int64_t n) {
  int64_t kept = 0, i = 0;
  for (; i + 32 <= n; i += 32) kept += _mm_popcnt_u32(bits_of_mask(mask + i));
  for (; i < n; ++i) kept += mask[i] != 0;
  return kept;
}

#endif

}  // namespace safeops::cpu
