// Sums rows that are complete within one chunk.
#pragma once

#include "cpu/engine/simd.h"

#include <cstring>
#include <type_traits>

namespace safeops::cpu {

constexpr int64_t kShortRow = 64;  // elements; several shorter rows are summed at once

// A register of kBytes bytes, as a GNU vector. For an array of accumulators gcc would emit loads and stores; it would
// split a vector wider than a register into single elements.
template <class T, int kBytes>
using Vector [[gnu::vector_size(kBytes)]] = T;

template <class V, class T>
inline void load_vector(const T* from, V& vector) {
  std::memcpy(&vector, from, sizeof(vector));
}

template <class V, class T>
inline void add_vector(V& sum, const T* from) {
  V vector;
  load_vector(from, vector);
  sum += vector;
}

template <class T, class S, class V>
inline S sum_vector(const V& vector) {
  if constexpr (sizeof(T) == 1) {  // bytes are <= 31 each: as 16-bit numbers they are added without overflow
    constexpr uint64_t kLow = 0x00FF00FF00FF00FF;
    constexpr int kWords = sizeof(V) / 8;
    uint64_t words[kWords], sum = 0;
    std::memcpy(words, &vector, sizeof(words));
    _Pragma("omp simd reduction(+ : sum)")
    for (int i = 0; i < kWords; ++i) sum += (words[i] & kLow) + (words[i] >> 8 & kLow);
    return static_cast<S>(sum * 0x0001000100010001 >> 48);
  } else {
    constexpr int kValues = sizeof(V) / sizeof(T);
    T values[kValues];
    std::memcpy(values, &vector, sizeof(values));
    S sum = 0;
    _Pragma("omp simd reduction(+ : sum)")
    for (int i = 0; i < kValues; ++i) sum += static_cast<S>(values[i]);
    return sum;
  }
}

// Returns the sum of n values, n <= 16 kBytes: at most 16 bytes are added to a lane.
template <int kBytes, class T, class S>
inline S sum_piece(const T* values, int64_t n) {
  constexpr int64_t lanes = kBytes / sizeof(T);
  Vector<T, kBytes> a{}, b{}, c{}, d{};
  const T* end = values + n;
  for (; end - values >= 4 * lanes; values += 4 * lanes) {
    add_vector(a, values);
    add_vector(b, values + lanes);
    add_vector(c, values + 2 * lanes);
    add_vector(d, values + 3 * lanes);
  }
  if (end - values >= 2 * lanes) {
    add_vector(a, values);
    add_vector(b, values + lanes);
    values += 2 * lanes;
  }
  if (end - values >= lanes) {
    add_vector(c, values);
    values += lanes;
  }
  if (values < end) {
    T rest[lanes] = {};
    for (int64_t i = 0; i < end - values; ++i) rest[i] = values[i];
    add_vector(d, rest);
  }
  const Vector<T, kBytes> sum = (a + b) + (c + d);
  return sum_vector<T, S>(sum);
}

template <int kBytes, class T, class S>
inline void sum_rows(const T* values, int64_t groups, int64_t reduced, S* out) {
  constexpr int64_t most = 16 * kBytes;
  for (int64_t g = 0; g < groups; ++g, values += reduced) {
    S sum = sum_piece<kBytes, T, S>(values, reduced < most ? reduced : most);
    for (int64_t at = most; at < reduced; at += most)
      sum += sum_piece<kBytes, T, S>(values + at, reduced - at < most ? reduced - at : most);
    out[g] = sum;
  }
}

// Sums the rows of a chunk (groups, reduced) to out (groups).
template <class T, class S>
void rows_loop(const T* values, int64_t groups, int64_t reduced, S* out) {
  if (reduced >= kShortRow) {
    switch (isa()) {
      case Isa::kAvx512: return sum_rows<64>(values, groups, reduced, out);
      case Isa::kAvx2: return sum_rows<32>(values, groups, reduced, out);
      case Isa::kBaseline: return sum_rows<16>(values, groups, reduced, out);
    }
  }
  // While the row length is even, adds neighbors in all rows at once. It stops at sums of 128 elements: a byte must
  // hold their count.
  alignas(64) T pairs[kChunk / 2];
  for (int summed = 1; reduced % 2 == 0 && summed < 128; summed *= 2) {
    reduced /= 2;
    SAFEOPS_SIMD
    for (int64_t i = 0; i < groups * reduced; ++i) pairs[i] = static_cast<T>(values[2 * i] + values[2 * i + 1]);
    values = pairs;
  }
  int64_t g = 0;
  if (reduced == 1) {
    SAFEOPS_SIMD
    for (g = 0; g < groups; ++g) out[g] = static_cast<S>(values[g]);
    return;
  }
  for (; g + 8 <= groups; g += 8) {  // eight rows at a time: their additions overlap
    const T* row = values + g * reduced;
    S sum[8] = {};
    for (int64_t r = 0; r < reduced; ++r)
      for (int k = 0; k < 8; ++k) sum[k] += static_cast<S>(row[k * reduced + r]);
    for (int k = 0; k < 8; ++k) out[g + k] = sum[k];
  }
  for (; g < groups; ++g) {
    S sum = 0;
    for (int64_t r = 0; r < reduced; ++r) sum += static_cast<S>(values[g * reduced + r]);
    out[g] = sum;
  }
}

}  // namespace safeops::cpu
