// The loops of the region losses: sums over the pixels of a class, and gradients, pixel by pixel.
//
// C is the type in memory: float, double, or uint16_t for stored bf16. A 32-bit word holds two bf16; a shift or a mask
// converts each to fp32.
#pragma once

#include <cmath>

#include "cpu/engine/convert.h"
#include "cpu/engine/operand.h"
#include "cpu/engine/row_sums.h"

#ifdef SAFEOPS_X86
#include <immintrin.h>
#endif

namespace safeops::cpu {

template <class C>
using IndexOf = std::conditional_t<sizeof(C) == 2, int16_t, int32_t>;  // the type of a class index

template <class C>
inline double value_of(C x) {
  if constexpr (std::is_same_v<C, uint16_t>)
    return static_cast<double>(widen(BFloat16{x}));
  else
    return static_cast<double>(x);
}

template <class C>
inline C stored(double x) {
  if constexpr (std::is_same_v<C, uint16_t>)
    return Narrow<BFloat16>::from(static_cast<float>(x)).bits;
  else
    return static_cast<C>(x);
}

// Returns x, or 0 where it is not kept.
template <class C>
void kept_loop(const C* x, const uint8_t* keep, int64_t n, C* to) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) to[i] = select_or_zero(keep[i] != 0, x[i]);
}

// ---- sums

// Adds sum p t, sum p and sum t (squared: sum p^2 and sum t^2) of a chunk to sums[0], [1], [2]. Products and sums are
// in double, because the loss may cancel their leading digits.
template <class C, bool kSquared>
void sums_loop(const C* p, const C* t, int64_t n, double* sums) {
  double both = 0, input = 0, target = 0;
  _Pragma("omp simd reduction(+ : both, input, target)")
  for (int64_t i = 0; i < n; ++i) {
    const double x = value_of(p[i]), y = value_of(t[i]);
    both += x * y;
    input += kSquared ? x * x : x;
    target += kSquared ? y * y : y;
  }
  sums[0] += both, sums[1] += input, sums[2] += target;
}

// Adds the sums for class c, if the target is class indices: t is 1 or 0, so t^2 = t. Pixels with a negative index are
// skipped.
template <class C, bool kSquared>
void index_sums_loop(const C* p, const IndexOf<C>* index, IndexOf<C> c, int64_t n, double* sums) {
  constexpr int64_t kBlock = 256;
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t stop = std::min(n, at + kBlock);
    double both = 0, input = 0;
    int32_t target = 0;
    for (int64_t i = at; i < stop; i += 64 / sizeof(C)) __builtin_prefetch(p + i + kAhead);
    _Pragma("omp simd reduction(+ : both, input, target)")
    for (int64_t i = at; i < stop; ++i) {
      const double x = value_of(select_or_zero(index[i] >= 0, p[i]));
      both += x * (index[i] == c ? 1.0 : 0.0);  // an infinite x times 0 is NaN, as with a dense target
      input += kSquared ? x * x : x;
      target += index[i] == c;
    }
    sums[0] += both, sums[1] += input, sums[2] += target;
  }
}

// Adds the sums of bf16 values. fp32 adds their 8-bit significands without rounding, unless exponents are far apart. So
// the two values of a word are added first, then at most 16 such pairs to a lane of fp32, then the lanes to a double.
// load(i, x, y) sets x and y to the registers that start at element i.
template <int kBytes, class Load>
inline void add_pairs(int64_t n, const Load& load, double* sums) {
  using Words = Vector<uint32_t, kBytes>;
  using Floats = Vector<float, kBytes>;
  constexpr int64_t kStep = kBytes / sizeof(uint16_t);
  for (int64_t i = 0; i < n;) {
    Floats both{}, input{}, target{};
    for (const int64_t stop = std::min(n, i + 16 * kStep); i < stop; i += kStep) {
      Words x, y;
      load(i, x, y);
      const Floats x0 = reinterpret_cast<Floats>(x << 16), x1 = reinterpret_cast<Floats>(x & 0xFFFF0000u);
      const Floats y0 = reinterpret_cast<Floats>(y << 16), y1 = reinterpret_cast<Floats>(y & 0xFFFF0000u);
      both += x0 * y0 + x1 * y1;
      input += x0 + x1;
      target += y0 + y1;
    }
    sums[0] += sum_vector<float, double>(both);
    sums[1] += sum_vector<float, double>(input);
    sums[2] += sum_vector<float, double>(target);
  }
}

// Loads elements [i, n) of x, at most one register, and fills the rest of the register with `rest`.
template <class V, class T>
inline void load_padded(const T* x, int64_t i, int64_t n, T rest, V& vector) {
  constexpr int64_t lanes = sizeof(V) / sizeof(T);
  if (i + lanes <= n) return load_vector(x + i, vector);
  T padded[lanes];
  for (int64_t k = 0; k < lanes; ++k) padded[k] = i + k < n ? x[i + k] : rest;
  load_vector(padded, vector);
}

inline bool all_finite(const double* sums) { return (sums[0] + sums[1] + sums[2]) * 0 == 0; }

template <class C, int kBytes>
void pair_sums_loop(const C* p, const C* t, int64_t n, double* sums) {
  double subtotal[3] = {};
  add_pairs<kBytes>(n, [&](int64_t i, auto& x, auto& y) __attribute__((always_inline)) {
    __builtin_prefetch(p + i + kAhead);
    __builtin_prefetch(t + i + kAhead);
    load_padded(p, i, n, C(0), x);
    load_padded(t, i, n, C(0), y);
  }, subtotal);
  if (!all_finite(subtotal)) return sums_loop<C, false>(p, t, n, sums);
  for (int k = 0; k < 3; ++k) sums[k] += subtotal[k];
}

template <class C, int kBytes>
void index_pair_sums_loop(const C* p, const int16_t* index, int16_t c, int64_t n, double* sums) {
  using Shorts = Vector<int16_t, kBytes>;
  double subtotal[3] = {};
  add_pairs<kBytes>(n, [&](int64_t i, auto& x, auto& y) __attribute__((always_inline)) {
    using Words = std::remove_reference_t<decltype(x)>;
    Shorts classes;
    __builtin_prefetch(p + i + kAhead);
    load_padded(p, i, n, C(0), x);
    load_padded(index, i, n, int16_t{-1}, classes);
    constexpr int16_t kOne = 0x3F80;
    y = reinterpret_cast<Words>(Shorts(classes == c) & kOne);
    x &= reinterpret_cast<Words>(Shorts(classes >= 0));
  }, subtotal);
  if (!all_finite(subtotal)) return index_sums_loop<C, false>(p, index, c, n, sums);
  for (int k = 0; k < 3; ++k) sums[k] += subtotal[k];
}

#ifdef SAFEOPS_X86
SAFEOPS_AVX512 inline __m512d load_doubles(__mmask8 keep, const double* from) {
  return _mm512_maskz_loadu_pd(keep, from);
}
SAFEOPS_AVX512 inline __m512d load_doubles(__mmask8 keep, const float* from) {
  return _mm512_maskz_cvtps_pd(keep, _mm256_loadu_ps(from));
}

// Does what index_sums_loop does, with mask registers for the comparisons. gcc would expand the masks to words and
// widen the words: 1.7 times slower in cache, 1.2 times from memory.
template <class C, bool kSquared>
SAFEOPS_AVX512 void index_sums_avx512(const C* p, const int32_t* index, int32_t c, int64_t n, double* sums) {
  __m512d both[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}, input[2] = {both[0], both[0]};
  const __m256i wanted = _mm256_set1_epi32(c), none = _mm256_setzero_si256();
  int64_t target = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int k = 0; k < 16; k += 64 / sizeof(C)) __builtin_prefetch(p + i + k + kAhead / 2);
    for (int k = 0; k < 2; ++k) {
      const __m256i classes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index + i + 8 * k));
      const __mmask8 is_class = _mm256_cmpeq_epi32_mask(classes, wanted), keep = _mm256_cmpge_epi32_mask(classes, none);
      const __m512d x = load_doubles(keep, p + i + 8 * k);
      both[k] = _mm512_mask_add_pd(both[k], is_class, both[k], x);
      input[k] = kSquared ? _mm512_fmadd_pd(x, x, input[k]) : _mm512_add_pd(input[k], x);
      target += __builtin_popcount(is_class);
    }
  }
  double subtotal[3] = {sum_vector<double, double>(_mm512_add_pd(both[0], both[1])),
                     sum_vector<double, double>(_mm512_add_pd(input[0], input[1])), static_cast<double>(target)};
  index_sums_loop<C, kSquared>(p + i, index + i, c, n - i, subtotal);
  if (!all_finite(subtotal)) return index_sums_loop<C, kSquared>(p, index, c, n, sums);
  for (int k = 0; k < 3; ++k) sums[k] += subtotal[k];
}
#endif

// ---- gradients

// dx = keep ? g_product other + g_sum (squared: g_sum x) : 0. g_product is the gradient of sum p t; g_sum is the
// gradient of x's own sum (squared: twice that). The slope is computed in double, because its two terms may cancel.
template <class C, bool kKeep, bool kSquared>
void gradient_loop(const C* x, const C* other, const uint8_t* keep, int64_t n, double g_product, double g_sum, C* dx) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    const double slope = g_product * value_of(other[i]) + (kSquared ? g_sum * value_of(x[i]) : g_sum);
    dx[i] = select_or_zero(kKeep ? keep[i] != 0 : true, stored<C>(slope));
  }
}

// Does what gradient_loop does for bf16 without mask and squares, two elements to a word. g_product is split into high
// + low. high has a 16-bit significand, so its product with the 8 bits of a bf16 is exact in fp32. low has the sign of
// high and is not 0 where high is not, so that infinite results stay infinite. Only one rounding is large enough to
// show in the result.
inline void pair_gradient_loop(const uint16_t* other, int64_t n, double g_product, double g_sum, uint16_t* dx) {
  const float high = bit_cast<float>(bit_cast<uint32_t>(static_cast<float>(g_product)) & 0xFFFFFF00u);
  const float rest = static_cast<float>(g_product - static_cast<double>(high));
  const float low = rest * high > 0 ? rest : high * 0x1p-40f;
  const float sum_high = static_cast<float>(g_sum), sum_low = static_cast<float>(g_sum - static_cast<double>(sum_high));
  const auto slope = [=](uint32_t bits) {
    const float y = bit_cast<float>(bits);
    return (high * y + sum_high) + (low * y + sum_low);
  };
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n / 2; ++i) {
    uint32_t word;
    std::memcpy(&word, other + 2 * i, sizeof(word));
    const float even = slope(word << 16), odd = slope(word & 0xFFFF0000u);
    word = Narrow<BFloat16>::from(even).bits | static_cast<uint32_t>(Narrow<BFloat16>::from(odd).bits) << 16;
    std::memcpy(dx + 2 * i, &word, sizeof(word));
  }
  if (n % 2) dx[n - 1] = Narrow<BFloat16>::from(slope(static_cast<uint32_t>(other[n - 1]) << 16)).bits;
}

// True if x is 0 or 2^-70 < |x| < 2^14: then the parts of x in pair_gradient_loop are normal fp32 numbers or 0.
inline bool is_moderate(double x) { return x == 0 || (std::fabs(x) < 0x1p+14 && std::fabs(x) > 0x1p-70); }

// Does what gradient_loop does for class c, if the target is class indices. Without squares dx takes only two values
// and 0.
template <class C, bool kSquared>
void index_gradient_loop(const C* x, const IndexOf<C>* index, IndexOf<C> c, int64_t n, double g_product, double g_sum,
                         C* dx) {
  const double none = g_product * 0;  // 0, or NaN if g_product is NaN or inf
  const C hit = stored<C>(g_product + g_sum), miss = stored<C>(none + g_sum);
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) {
    C slope = select(index[i] == c, hit, miss);
    if constexpr (kSquared) slope = stored<C>(select(index[i] == c, g_product, none) + g_sum * value_of(x[i]));
    dx[i] = select_or_zero(index[i] >= 0, slope);
  }
}

}  // namespace safeops::cpu
