#include "cpu/engine/convert.h"

#include "cpu/engine/simd.h"

#ifdef SAFEOPS_X86
#include <immintrin.h>
#endif

namespace safeops::cpu {

namespace {

// to[i] = of(from[i]), vectorised in blocks of kBlock. A tail that follows a block is converted as a full block that
// ends at n and overlaps the previous block: strided rows have tails of any length, and only a full block is
// vectorised.
template <class To, class From, class Of>
inline void map(const From* from, To* to, int64_t n, const Of& of) {
  constexpr int64_t kBlock = 32;
  const int64_t blocks_end = n / kBlock * kBlock;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < blocks_end; ++i) to[i] = of(from[i]);
  if (blocks_end == n) return;
  if (n < kBlock) {
    for (int64_t i = 0; i < n; ++i) to[i] = of(from[i]);
    return;
  }
  from += n - kBlock;
  to += n - kBlock;
  SAFEOPS_SIMD
  for (int64_t i = 0; i < kBlock; ++i) to[i] = of(from[i]);
}

template <class S, class C>
void load_loop(const void* src, void* dst, int64_t n) {
  map(static_cast<const S*>(src), static_cast<C*>(dst), n, [](S x) { return static_cast<C>(widen(x)); });
}

template <class C, class S>
void store_loop(const void* src, void* dst, int64_t n) {
  map(static_cast<const C*>(src), static_cast<S*>(dst), n, [](C x) { return Narrow<S>::from(x); });
}

// When the compiler vectorises half <-> float, it does not use the conversion instructions, so these loops use
// intrinsics.
#ifdef SAFEOPS_X86

// These are the zero-masked intrinsics, since gcc 12 warns of uninitialised values inside the plain ones.
SAFEOPS_AVX512 void load_half_avx512(const void* src, void* dst, int64_t n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  float* d = static_cast<float*>(dst);
  for (; n >= 16; n -= 16, s += 16, d += 16)
    _mm512_storeu_ps(d, _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s))));
  const __mmask16 tail = static_cast<__mmask16>((1u << n) - 1u);
  if (n) _mm512_mask_storeu_ps(d, tail, _mm512_maskz_cvtph_ps(tail, _mm256_maskz_loadu_epi16(tail, s)));
}

SAFEOPS_AVX512 void store_half_avx512(const void* src, void* dst, int64_t n) {
  const float* s = static_cast<const float*>(src);
  uint16_t* d = static_cast<uint16_t*>(dst);
  for (; n >= 16; n -= 16, s += 16, d += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(d),
                        _mm512_maskz_cvtps_ph(0xFFFF, _mm512_loadu_ps(s), _MM_FROUND_TO_NEAREST_INT));
  const __mmask16 tail = static_cast<__mmask16>((1u << n) - 1u);
  if (n)
    _mm256_mask_storeu_epi16(d, tail,
                             _mm512_maskz_cvtps_ph(tail, _mm512_maskz_loadu_ps(tail, s), _MM_FROUND_TO_NEAREST_INT));
}

SAFEOPS_AVX2 void load_half_avx2(const void* src, void* dst, int64_t n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  float* d = static_cast<float*>(dst);
  for (; n >= 8; n -= 8, s += 8, d += 8)
    _mm256_storeu_ps(d, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s))));
  for (; n > 0; --n) *d++ = _cvtsh_ss(*s++);
}

SAFEOPS_AVX2 void store_half_avx2(const void* src, void* dst, int64_t n) {
  const float* s = static_cast<const float*>(src);
  uint16_t* d = static_cast<uint16_t*>(dst);
  for (; n >= 8; n -= 8, s += 8, d += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(d), _mm256_cvtps_ph(_mm256_loadu_ps(s), _MM_FROUND_TO_NEAREST_INT));
  for (; n > 0; --n) *d++ = _cvtss_sh(*s++, _MM_FROUND_TO_NEAREST_INT);
}

// Returns the bits of Narrow<BFloat16>, in the upper half of each word, for every float but NaN. store_bfloat16_avx512
// looks for NaN, which is rare; if it finds one, it converts all elements again with Narrow.
SAFEOPS_AVX512 inline __m512i bfloat16_words(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(0xFFFF, bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
}

SAFEOPS_AVX512 void store_bfloat16_avx512(const void* src, void* dst, int64_t n) {
  alignas(64) static constexpr struct Table {
    uint16_t upper[32] = {};
    constexpr Table() {
      for (int i = 0; i < 32; ++i) upper[i] = static_cast<uint16_t>(2 * i + 1);
    }
  } table;
  const float* s = static_cast<const float*>(src);
  BFloat16* d = static_cast<BFloat16*>(dst);
  const __m512i upper = _mm512_load_si512(&table);
  __mmask16 nan = 0;
  const auto block = [&](int64_t i) SAFEOPS_AVX512 __attribute__((always_inline)) {
    const __m512 a = _mm512_loadu_ps(s + i), b = _mm512_loadu_ps(s + i + 16);
    nan = static_cast<__mmask16>(nan | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q));
    _mm512_storeu_si512(d + i, _mm512_permutex2var_epi16(bfloat16_words(a), upper, bfloat16_words(b)));
  };
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) block(i);
  if (i < n && n >= 32) block(n - 32), i = n;
  for (i = nan ? 0 : i; i < n; ++i) d[i] = Narrow<BFloat16>::from(s[i]);
}

// Loads 128 bits at a time: gcc's own loop loads 256 bits and extracts the halves, which takes a fifth longer.
SAFEOPS_AVX2 void load_bfloat16_avx2(const void* src, void* dst, int64_t n) {
  const BFloat16* s = static_cast<const BFloat16*>(src);
  float* d = static_cast<float*>(dst);
  const auto eight = [&](int64_t i) __attribute__((always_inline, target("avx2"))) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i));
    _mm256_storeu_ps(d + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) eight(i), eight(i + 8);
  for (; i < n; ++i) d[i] = widen(s[i]);
}

// Returns the bits of Narrow<BFloat16>, for every float but NaN, with fewer shuffles than gcc's code.
// store_bfloat16_avx2 looks for NaN, which is rare; if it finds one, it converts all elements again with Narrow.
SAFEOPS_AVX2 inline __m256i bfloat16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
}

SAFEOPS_AVX2 void store_bfloat16_avx2(const void* src, void* dst, int64_t n) {
  const float* s = static_cast<const float*>(src);
  BFloat16* d = static_cast<BFloat16*>(dst);
  __m256 nan = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 a = _mm256_loadu_ps(s + i), b = _mm256_loadu_ps(s + i + 8);
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
    const __m256i both = _mm256_packus_epi32(bfloat16_bits(a), bfloat16_bits(b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(d + i), _mm256_permute4x64_epi64(both, 0xD8));
  }
  for (i = _mm256_movemask_ps(nan) ? 0 : i; i < n; ++i) d[i] = Narrow<BFloat16>::from(s[i]);
}

#endif

Convert bfloat16_to_float() {
#ifdef SAFEOPS_X86
  if (isa() == Isa::kAvx2) return load_bfloat16_avx2;
#endif
  return pick<&load_loop<BFloat16, float>>();
}

Convert float_to_bfloat16() {
#ifdef SAFEOPS_X86
  if (isa() == Isa::kAvx512) return store_bfloat16_avx512;
  if (isa() == Isa::kAvx2) return store_bfloat16_avx2;
#endif
  return pick<&store_loop<float, BFloat16>>();
}

Convert half_to_float() {
#ifdef SAFEOPS_X86
  if (isa() == Isa::kAvx512) return load_half_avx512;
  if (isa() == Isa::kAvx2) return load_half_avx2;
#endif
  return load_loop<Half, float>;
}

Convert float_to_half() {
#ifdef SAFEOPS_X86
  if (isa() == Isa::kAvx512) return store_half_avx512;
  if (isa() == Isa::kAvx2) return store_half_avx2;
#endif
  return store_loop<float, Half>;
}

// Converts half -> float -> double a chunk at a time: n may be the length of a tensor, too long for one buffer of
// floats.
void half_to_double(const void* src, void* dst, int64_t n) {
  float chunk[kChunk];
  const Convert load = half_to_float(), widen_chunk = pick<&load_loop<float, double>>();
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t m = n - i < kChunk ? n - i : kChunk;
    load(static_cast<const Half*>(src) + i, chunk, m);
    widen_chunk(chunk, static_cast<double*>(dst) + i, m);
  }
}

}  // namespace

template <>
Convert find_load<float>(DType from) {
  switch (from) {
    case DType::kHalf: return half_to_float();
    case DType::kBFloat16: return bfloat16_to_float();
    case DType::kFloat: return nullptr;
    case DType::kDouble: return pick<&store_loop<double, float>>();
    default: STD_TORCH_CHECK(false, "safeops: expected a floating tensor");
  }
}

template <>
Convert find_load<double>(DType from) {
  switch (from) {
    case DType::kHalf: return half_to_double;
    case DType::kBFloat16: return pick<&load_loop<BFloat16, double>>();
    case DType::kFloat: return pick<&load_loop<float, double>>();
    case DType::kDouble: return nullptr;
    default: STD_TORCH_CHECK(false, "safeops: expected a floating tensor");
  }
}

template <>
Convert find_store<float>(DType to) {
  switch (to) {
    case DType::kHalf: return float_to_half();
    case DType::kBFloat16: return float_to_bfloat16();
    case DType::kFloat: return nullptr;
    case DType::kDouble: return pick<&load_loop<float, double>>();
    default: STD_TORCH_CHECK(false, "safeops: expected a floating dtype");
  }
}

template <>
Convert find_store<double>(DType to) {
  switch (to) {
    case DType::kHalf: return pick<&store_loop<double, Half>>();
    case DType::kBFloat16: return pick<&store_loop<double, BFloat16>>();
    case DType::kFloat: return pick<&store_loop<double, float>>();
    case DType::kDouble: return nullptr;
    default: STD_TORCH_CHECK(false, "safeops: expected a floating dtype");
  }
}

double read_scalar(const View& view) {
  STD_TORCH_CHECK(view.shape().numel() == 1, "safeops: expected a tensor of one element");
  double value;
  switch (view.dtype) {
    case DType::kLong: return static_cast<double>(*reinterpret_cast<const int64_t*>(view.data));
    case DType::kBool: return *view.data != 0;
    case DType::kDouble: return *reinterpret_cast<const double*>(view.data);
    default: find_load<double>(view.dtype)(view.data, &value, 1); return value;
  }
}

}  // namespace safeops::cpu
