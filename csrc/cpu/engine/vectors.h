// Loops over a contiguous run in registers: GNU vectors as wide as the instruction set's registers, four at a time.
#pragma once

#include "cpu/engine/convert.h"
#include "cpu/engine/row_sums.h"

namespace safeops::cpu {

// Contiguous elements. x: their values; null if they are only counted. keep: bytes of 0 and 1; null if all are kept. w:
// their weights, 0 where an element is not kept; null if there are no weights.
template <class C>
struct Elements {
  const C* x;
  const uint8_t* keep;
  const C* w;

  Elements from(int64_t i) const { return {x ? x + i : nullptr, keep ? keep + i : nullptr, w ? w + i : nullptr}; }
};

template <class C, int kBytes>
struct Register {
  static constexpr int kLanes = kBytes / sizeof(C);
  using V = Vector<C, kBytes>;
  using I = Vector<std::make_signed_t<BitsOf<C>>, kBytes>;  // lanes of -1 (true) and 0 (false)

  // Expands bytes of 0 and 1 to lanes of 0 and -1. gcc would widen the bytes one by one. Instead each lane loads a word
  // of up to four bytes that includes its own byte, and tests the bit of its own byte.
  static void load_keep(I& to, const uint8_t* from) {
    using T = std::make_signed_t<BitsOf<C>>;
    constexpr T k0 = 1, k1 = 1 << 8, k2 = 1 << 16, k3 = 1 << 24;
    I bit;
    if constexpr (kLanes == 2) {
      const T a = word<uint16_t>(from);
      to = I{a, a};
      bit = I{k0, k1};
    } else if constexpr (kLanes == 4) {
      const T a = word<uint32_t>(from);
      to = I{a, a, a, a};
      bit = I{k0, k1, k2, k3};
    } else if constexpr (kLanes == 8) {
      const T a = word<uint32_t>(from), b = word<uint32_t>(from + 4);
      to = I{a, a, a, a, b, b, b, b};
      bit = I{k0, k1, k2, k3, k0, k1, k2, k3};
    } else {
      const T a = word<uint32_t>(from), b = word<uint32_t>(from + 4);
      const T c = word<uint32_t>(from + 8), d = word<uint32_t>(from + 12);
      to = I{a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
      bit = I{k0, k1, k2, k3, k0, k1, k2, k3, k0, k1, k2, k3, k0, k1, k2, k3};
    }
    to = (to & bit) == bit;
  }

  template <class Word>
  static std::make_signed_t<BitsOf<C>> word(const uint8_t* from) {
    Word bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return static_cast<std::make_signed_t<BitsOf<C>>>(bytes);
  }

  static void select_or_zero(V& x, const I& keep) { x = reinterpret_cast<V>(reinterpret_cast<I>(x) & keep); }
  static void select(V& x, const I& keep, const V& other) {
    x = reinterpret_cast<V>((reinterpret_cast<I>(x) & keep) | (reinterpret_cast<I>(other) & ~keep));
  }
  static void abs(V& x) {
    x = reinterpret_cast<V>(reinterpret_cast<I>(x) & std::numeric_limits<std::make_signed_t<BitsOf<C>>>::max());
  }
};

// Calls body(k, x, keep, w) for each register of the row. k < 4 selects one of four accumulators: consecutive registers
// of the main loop have different k, so that their additions overlap.
template <class C, int kBytes, bool kKeep, bool kWeight, class Body>
inline void for_vectors(const Elements<C>& e, int64_t n, const Body& body) {
  using R = Register<C, kBytes>;
  constexpr int64_t lanes = R::kLanes;
  const auto one = [&](int k, const C* from, const uint8_t* bytes, const C* weights) __attribute__((always_inline)) {
    typename R::V x, w{};
    typename R::I keep = ~typename R::I{};
    load_vector(from, x);
    if constexpr (kKeep) R::load_keep(keep, bytes);
    if constexpr (kWeight) load_vector(weights, w);
    body(k, x, keep, w);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    one(0, e.x + i, e.keep + i, e.w + i);
    one(1, e.x + i + lanes, e.keep + i + lanes, e.w + i + lanes);
    one(2, e.x + i + 2 * lanes, e.keep + i + 2 * lanes, e.w + i + 2 * lanes);
    one(3, e.x + i + 3 * lanes, e.keep + i + 3 * lanes, e.w + i + 3 * lanes);
  }
  for (; i + lanes <= n; i += lanes) one(0, e.x + i, e.keep + i, e.w + i);
  if (i == n) return;
  C x[lanes] = {}, w[lanes] = {};
  uint8_t bytes[lanes] = {};
  for (int64_t k = 0; i + k < n; ++k) {
    x[k] = e.x[i + k];
    bytes[k] = kKeep ? e.keep[i + k] : 1;
    if constexpr (kWeight) w[k] = e.w[i + k];
  }
  typename R::V last, weights;
  typename R::I keep;
  load_vector(x, last);
  load_vector(w, weights);
  R::load_keep(keep, bytes);
  body(1, last, keep, weights);
}

template <class V>
inline void sum_vectors(const V* four, double& sum) {
  V all = (four[0] + four[1]) + (four[2] + four[3]);
  using T = std::remove_reference_t<decltype(all[0])>;
  sum += sum_vector<T, double>(all);
}

struct Unchanged {
  template <class R>
  static void apply(typename R::V&) {}
};

// Returns sum w F(x), with w = 1 if there are no weights. An x that is not kept counts as 0.
template <class C, int kBytes, bool kKeep, bool kWeight, class F = Unchanged>
double sum_row(const Elements<C>& e, int64_t n) {
  using R = Register<C, kBytes>;
  using V = typename R::V;
  constexpr int64_t most = 64 * R::kLanes;  // 16 additions to a lane; the lanes are then added to a double
  double sum = 0;
  for (int64_t i = 0; i < n; i += most) {
    V s[4] = {};
    for_vectors<C, kBytes, kKeep, kWeight>(e.from(i), n - i < most ? n - i : most,
                                         [&](int k, const V& x, const auto& keep, const V& w)
                                             __attribute__((always_inline)) {
                                               V kept = x;
                                               R::select_or_zero(kept, keep);
                                               F::template apply<R>(kept);
                                               s[k] += kWeight ? V(w * kept) : kept;
                                             });
    sum_vectors(s, sum);
  }
  return sum;
}

inline void normalize_mask_loop(const uint8_t* mask, int64_t n, uint8_t* keep) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) keep[i] = mask[i] != 0;
}

}  // namespace safeops::cpu
