// Packing what a mask keeps: counting, and moving the kept values and their numbers together.
// Eight mask bytes make a byte of bits, and a table says which lanes those are; no step depends on a branch that the
// density of the mask would make a gamble.
#include "selection.h"

#ifdef SAFEOPS_X86
#include <immintrin.h>
#define SAFEOPS_PACK_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#endif

namespace safeops::cpu {

namespace {

int64_t count_loop(const uint8_t* mask, int64_t n) {
  uint32_t kept = 0;
  _Pragma("omp simd reduction(+ : kept)")
  for (int64_t i = 0; i < n; ++i) kept += mask[i] != 0;
  return kept;
}

// One by one, words without anything kept in a single step: for the last few, where whole vectors would write too far.
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

// Every element is written where the next kept one belongs; only a kept one moves that place.
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

#ifdef SAFEOPS_X86

// The set bits of a byte, lowest first, a byte each.
struct Lanes {
  uint64_t of[256];
  constexpr Lanes() : of() {
    for (int bits = 0; bits < 256; ++bits) {
      int k = 0;
      for (int lane = 0; lane < 8; ++lane)
        if (bits >> lane & 1) of[bits] |= static_cast<uint64_t>(lane) << (8 * k++);
    }
  }
};
constexpr Lanes kLanes;

SAFEOPS_PACK_AVX2 inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
SAFEOPS_PACK_AVX2 inline void store(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
SAFEOPS_PACK_AVX2 inline __m128i lanes_of(uint32_t bits) {
  return _mm_cvtsi64_si128(static_cast<long long>(kLanes.of[bits]));
}

// The kept bytes of 32, as bits.
SAFEOPS_PACK_AVX2 inline uint32_t bits_of_mask(const uint8_t* mask) {
  const __m256i dropped = _mm256_cmpeq_epi8(load(mask), _mm256_setzero_si256());
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(dropped));
}

// Four of 8 bytes.
SAFEOPS_PACK_AVX2 inline void pack_four(uint32_t bits, const uint64_t* x, uint64_t* out) {
  const __m256i twice = _mm256_slli_epi64(_mm256_cvtepu8_epi64(lanes_of(bits)), 1);  // the halves of lane l: 2l, 2l + 1
  const __m256i next = _mm256_slli_epi64(_mm256_add_epi64(twice, _mm256_set1_epi64x(1)), 32);
  store(out, _mm256_permutevar8x32_epi32(load(x), _mm256_or_si256(twice, next)));
}

// Eight elements from x, those of `bits` first, to out; writes all eight.
template <class T>
SAFEOPS_PACK_AVX2 inline void pack_eight(uint32_t bits, const T* x, T* out) {
  const __m128i lanes = lanes_of(bits);
  if constexpr (sizeof(T) == 1) {
    const __m128i from = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(from, lanes));
  } else if constexpr (sizeof(T) == 2) {
    const __m128i from = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    // the bytes of lane l: 2l, 2l + 1
    const __m128i twice = _mm_mullo_epi16(_mm_cvtepu8_epi16(lanes), _mm_set1_epi16(0x0202));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_shuffle_epi8(from, _mm_add_epi16(twice, _mm_set1_epi16(0x0100))));
  } else if constexpr (sizeof(T) == 4) {
    store(out, _mm256_permutevar8x32_epi32(load(x), _mm256_cvtepu8_epi32(lanes)));
  } else {
    pack_four(bits & 15, x, out);
    pack_four(bits >> 4, x + 4, out + _mm_popcnt_u32(bits & 15));
  }
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
    if (k + 32 > room) break;  // whole vectors are written
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

SAFEOPS_PACK_AVX2 int64_t count_avx2(const uint8_t* mask, int64_t n) {
  int64_t kept = 0, i = 0;
  for (; i + 32 <= n; i += 32) kept += _mm_popcnt_u32(bits_of_mask(mask + i));
  for (; i < n; ++i) kept += mask[i] != 0;
  return kept;
}

#endif

template <class T, bool kValues, bool kIndex>
Pack<T> best_pack() {
#ifdef SAFEOPS_X86
  if (isa() >= Isa::kAvx2) return &pack_avx2<T, kValues, kIndex>;
#endif
  return &pack_plain<T, kValues, kIndex>;
}

}  // namespace

Count find_count() {
#ifdef SAFEOPS_X86
  if (isa() >= Isa::kAvx2) return &count_avx2;
#endif
  return &count_loop;
}

template <class T>
Pack<T> find_pack(bool values, bool index) {
  if (!values) return best_pack<T, false, true>();
  return index ? best_pack<T, true, true>() : best_pack<T, true, false>();
}

template Pack<uint8_t> find_pack<uint8_t>(bool, bool);
template Pack<uint16_t> find_pack<uint16_t>(bool, bool);
template Pack<uint32_t> find_pack<uint32_t>(bool, bool);
template Pack<uint64_t> find_pack<uint64_t>(bool, bool);

// A slice is long enough that the few elements that end it one by one do not count.
Slices::Slices(const Source<uint8_t>& mask, int64_t numel_) : numel(numel_), length(kGrain), count(1) {
  if (numel <= length || torch::stable::get_num_threads() == 1) return;
  count = (numel + length - 1) / length;
  first.resize(count + 1);
  const Count kept = find_count();
  parallel(count, length / 16, [&](int64_t begin, int64_t end) {
    alignas(64) uint8_t buffer[kBuffer];
    mask.prime(buffer);
    for (int64_t s = begin; s < end; ++s) {
      int64_t total = 0;
      for (int64_t at = s * length, stop = std::min(at + length, numel); at < stop; at += kChunk) {
        const int64_t n = std::min(kChunk, stop - at);
        total += kept(mask.fetch(at, n, at + kAhead, buffer), n);
      }
      first[s + 1] = total;
    }
  });
  for (int64_t s = 0; s < count; ++s) first[s + 1] += first[s];
}

}  // namespace safeops::cpu
