// Reductions of a run of contiguous values to one number, in registers. A run has at least kShortestRun values, so that
// its tail can be read as a full register that overlaps the previous register.
#pragma once

#include <algorithm>

#include "cpu/engine/convert.h"
#include "cpu/engine/row_sums.h"

namespace safeops::cpu {

constexpr int64_t kShortestRun = 16;

// Zeroes the values for which the word in `keep` is 0. All other words must be all ones.
template <class C, class V>
inline void mask_vector(const void* keep, V& vector) {
  using Bits [[gnu::vector_size(sizeof(V))]] = BitsOf<C>;
  Bits ones;
  std::memcpy(&ones, keep, sizeof(ones));
  vector = reinterpret_cast<V>(reinterpret_cast<Bits>(vector) & ones);
}

// Zeroes all but the last `kept` values of a vector.
template <class C, class V>
inline void keep_last_lanes(int64_t kept, V& vector) {
  alignas(64) static constexpr struct Table {
    uint8_t bytes[128] = {};
    constexpr Table() {
      for (int i = 64; i < 128; ++i) bytes[i] = 0xFF;
    }
  } table;
  mask_vector<C>(table.bytes + 64 - sizeof(V) + kept * sizeof(C), vector);
}

// Returns the sum of n values. get(i, vector) sets `vector` to the values from i on. At most 16 values are added in one
// lane; the lanes are then added to a double.
template <int kBytes, class C, class Get>
inline double sum_run(int64_t n, const Get& get) {
  constexpr int64_t lanes = kBytes / sizeof(C);
  using V = Vector<C, kBytes>;
  double total = 0;
  for (int64_t i = 0; i < n;) {
    V a{}, b{}, c{}, d{}, vector;
    const int64_t stop = std::min(n, i + 64 * lanes);
    for (; i + 4 * lanes <= stop; i += 4 * lanes) {
      get(i, vector), a += vector;
      get(i + lanes, vector), b += vector;
      get(i + 2 * lanes, vector), c += vector;
      get(i + 3 * lanes, vector), d += vector;
    }
    for (; i + lanes <= stop; i += lanes) get(i, vector), a += vector;
    if (i < stop) {  // here stop = n
      get(n - lanes, vector);
      keep_last_lanes<C>(n - i, vector);
      b += vector;
      i = n;
    }
    a = (a + b) + (c + d);
    total += static_cast<double>(sum_vector<C, C>(a));
  }
  return total;
}

template <class V>
inline void largest_of(V& most, const V& vector) {
  most = vector > most ? vector : most;
}

// Returns the largest of n values. If one of them is NaN, the result is any of the values.
template <int kBytes, class C>
inline C max_run(const C* x, int64_t n) {
  constexpr int64_t lanes = kBytes / sizeof(C);
  using V = Vector<C, kBytes>;
  V a, b, vector;
  load_vector(x, a);
  load_vector(x + n - lanes, b);
  int64_t i = lanes;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    load_vector(x + i, vector), largest_of(a, vector);
    load_vector(x + i + lanes, vector), largest_of(b, vector);
  }
  if (i + lanes <= n) load_vector(x + i, vector), largest_of(a, vector);
  largest_of(a, b);
  C most[lanes];
  std::memcpy(most, &a, sizeof(most));
  for (int64_t half = lanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; ++k) most[k] = most[k + half] > most[k] ? most[k + half] : most[k];
  return most[0];
}

// Calls one(i) for each i in [0, n), n >= kShortestRun, in blocks that the compiler vectorises. Calls before(i) at the
// start i of each full block. A partial last block is moved back to be full: one() may be called twice for an i.
template <class One, class Before>
inline void for_blocks(int64_t n, const One& one, const Before& before) {
  int64_t i = 0;
  for (; i + kShortestRun <= n; i += kShortestRun) {
    before(i);
    SAFEOPS_SIMD
    for (int64_t k = 0; k < kShortestRun; ++k) one(i + k);
  }
  if (i == n) return;
  SAFEOPS_SIMD
  for (int64_t k = 0; k < kShortestRun; ++k) one(n - kShortestRun + k);
}

template <class One>
inline void for_blocks(int64_t n, const One& one) {
  for_blocks(n, one, [](int64_t) {});
}

}  // namespace safeops::cpu
