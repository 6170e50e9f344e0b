// Weighted sums over windows, one dim at a time. A row has several arrays, which start `step` elements apart. The loops
// take two vectors at once, so they may write that far beyond n; rows have room for it.
#pragma once

#include "cpu/engine/vectors.h"

namespace safeops::cpu {

constexpr int64_t kVectors = 2 * 64;  // bytes that a loop takes at once, at most

// Writes the sums of w s, w d, w s^2, w d^2 over `size` neighbours in a row, as four arrays.
template <class C, int kBytes>
void moments_loop(const C* s, const C* d, const C* w, int64_t size, int64_t n, int64_t step, C* out) {
  using V = Vector<C, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(C);
  for (int64_t j = 0; j < n; j += 2 * lanes) {
    V a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
    for (int64_t k = 0; k < size; ++k) {
      V sa, sb, da, db;
      load_vector(s + j + k, sa);
      load_vector(s + j + k + lanes, sb);
      load_vector(d + j + k, da);
      load_vector(d + j + k + lanes, db);
      const V wsa = w[k] * sa, wsb = w[k] * sb, wda = w[k] * da, wdb = w[k] * db;
      a0 += wsa, b0 += wsb, a1 += wda, b1 += wdb;
      a2 += wsa * sa, b2 += wsb * sb, a3 += wda * da, b3 += wdb * db;
    }
    const V sums[8] = {a0, b0, a1, b1, a2, b2, a3, b3};
    for (int q = 0; q < 4; ++q) std::memcpy(out + q * step + j, sums + 2 * q, 2 * kBytes);
  }
}

// Writes the sums of w x over `size` neighbours along a row (kAcross), or over `size` rows, for each of four arrays.
template <class C, int kBytes, bool kAcross>
void blur_loop(const C* const* rows, const C* w, int64_t size, int64_t n, int64_t step, C* out) {
  using V = Vector<C, kBytes>;
  constexpr int64_t lanes = kBytes / sizeof(C);
  for (int64_t j = 0; j < n; j += 2 * lanes) {
    V a0{}, a1{}, a2{}, a3{}, b0{}, b1{}, b2{}, b3{};
    for (int64_t k = 0; k < size; ++k) {
      const C* at = (kAcross ? rows[0] + k : rows[k]) + j;
      V x, y;
      const auto load = [&](int q) __attribute__((always_inline)) {
        load_vector(at + q * step, x);
        load_vector(at + q * step + lanes, y);
      };
      load(0), a0 += w[k] * x, b0 += w[k] * y;
      load(1), a1 += w[k] * x, b1 += w[k] * y;
      load(2), a2 += w[k] * x, b2 += w[k] * y;
      load(3), a3 += w[k] * x, b3 += w[k] * y;
    }
    const V sums[8] = {a0, b0, a1, b1, a2, b2, a3, b3};
    for (int q = 0; q < 4; ++q) std::memcpy(out + q * step + j, sums + 2 * q, 2 * kBytes);
  }
}

// Does what blur_loop does, for one array.
template <class C, bool kAcross>
void single_blur_loop(const C* const* rows, const C* w, int64_t size, int64_t n, C* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = 0;
  for (int64_t k = 0; k < size; ++k) {
    const C* row = kAcross ? rows[0] + k : rows[k];
    SAFEOPS_SIMD
    for (int64_t j = 0; j < n; ++j) out[j] += w[k] * row[j];
  }
}

template <class C>
struct Blur {
  decltype(pick<&moments_loop<C, 16>>()) moments =
      pick_width<&moments_loop<C, 64>, &moments_loop<C, 32>, &moments_loop<C, 16>>();
  decltype(pick<&blur_loop<C, 16, true>>())
      across = pick_width<&blur_loop<C, 64, true>, &blur_loop<C, 32, true>, &blur_loop<C, 16, true>>(),
      down = pick_width<&blur_loop<C, 64, false>, &blur_loop<C, 32, false>, &blur_loop<C, 16, false>>();
  decltype(pick<&single_blur_loop<C, true>>()) single_across = pick<&single_blur_loop<C, true>>(),
                                               single_down = pick<&single_blur_loop<C, false>>();
};

}  // namespace safeops::cpu
