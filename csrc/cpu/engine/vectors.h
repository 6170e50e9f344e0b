// Loops over a contiguous row in registers: GNU vectors of the instruction set's own width, four at a time.
#pragma once

#include "cpu/engine/convert.h"
#include "cpu/engine/sums.h"

// Vectors never leave a function that is inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace safeops::cpu {

// n contiguous elements of one output. keep: bytes of 0 and 1, null where all are kept. w: null without weights, and 0
// where not kept.
template <class C>
struct Elements {
  const C* x;
  const uint8_t* keep;
  const C* w;

  Elements from(int64_t i) const { return {x + i, keep ? keep + i : nullptr, w ? w + i : nullptr}; }
};

template <class C, int kBytes>
struct Register {
  static constexpr int kSide = kBytes / sizeof(C);
  using V = Line<C, kBytes>;
  using I = Line<std::make_signed_t<BitsOf<C>>, kBytes>;  // -1 where a comparison holds

  template <class Element>
  static void load(V& to, const Element* from) {
    std::memcpy(&to, from, sizeof(to));
  }

  // Bytes of 0 and 1 -> lanes of 0 and -1. gcc widens bytes one by one; every four of them in their lanes, each picks
  // its own.
  static void load_keep(I& to, const uint8_t* from) {
    using T = std::make_signed_t<BitsOf<C>>;
    constexpr T k0 = 1, k1 = 1 << 8, k2 = 1 << 16, k3 = 1 << 24;
    I own;
    if constexpr (kSide == 2) {
      const T a = word<uint16_t>(from);
      to = I{a, a};
      own = I{k0, k1};
    } else if constexpr (kSide == 4) {
      const T a = word<uint32_t>(from);
      to = I{a, a, a, a};
      own = I{k0, k1, k2, k3};
    } else if constexpr (kSide == 8) {
      const T a = word<uint32_t>(from), b = word<uint32_t>(from + 4);
      to = I{a, a, a, a, b, b, b, b};
      own = I{k0, k1, k2, k3, k0, k1, k2, k3};
    } else {
      const T a = word<uint32_t>(from), b = word<uint32_t>(from + 4);
      const T c = word<uint32_t>(from + 8), d = word<uint32_t>(from + 12);
      to = I{a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
      own = I{k0, k1, k2, k3, k0, k1, k2, k3, k0, k1, k2, k3, k0, k1, k2, k3};
    }
    to = (to & own) == own;
  }

  template <class Word>
  static std::make_signed_t<BitsOf<C>> word(const uint8_t* from) {
    Word bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return static_cast<std::make_signed_t<BitsOf<C>>>(bytes);
  }

  static void take_or_zero(V& x, const I& keep) { x = reinterpret_cast<V>(reinterpret_cast<I>(x) & keep); }
  static void take_or(V& x, const I& keep, const V& other) {
    x = reinterpret_cast<V>((reinterpret_cast<I>(x) & keep) | (reinterpret_cast<I>(other) & ~keep));
  }
  static void abs(V& x) {
    x = reinterpret_cast<V>(reinterpret_cast<I>(x) & std::numeric_limits<std::make_signed_t<BitsOf<C>>>::max());
  }
};

// body(k, x, keep, w) for each register of the row; k < 4 names accumulators that do not wait for each other.
template <class C, int kBytes, bool kKeep, bool kWeight, class Body>
inline void for_lines(const Elements<C>& e, int64_t n, const Body& body) {
  using R = Register<C, kBytes>;
  constexpr int64_t side = R::kSide;
  const auto one = [&](int k, const C* from, const uint8_t* bytes, const C* weights) __attribute__((always_inline)) {
    typename R::V x, w{};
    typename R::I keep = ~typename R::I{};
    R::load(x, from);
    if constexpr (kKeep) R::load_keep(keep, bytes);
    if constexpr (kWeight) R::load(w, weights);
    body(k, x, keep, w);
  };
  int64_t i = 0;
  for (; i + 4 * side <= n; i += 4 * side) {
    one(0, e.x + i, e.keep + i, e.w + i);
    one(1, e.x + i + side, e.keep + i + side, e.w + i + side);
    one(2, e.x + i + 2 * side, e.keep + i + 2 * side, e.w + i + 2 * side);
    one(3, e.x + i + 3 * side, e.keep + i + 3 * side, e.w + i + 3 * side);
  }
  for (; i + side <= n; i += side) one(0, e.x + i, e.keep + i, e.w + i);
  if (i == n) return;
  C x[side] = {}, w[side] = {};
  uint8_t bytes[side] = {};
  for (int64_t k = 0; i + k < n; ++k) {
    x[k] = e.x[i + k];
    bytes[k] = kKeep ? e.keep[i + k] : 1;
    if constexpr (kWeight) w[k] = e.w[i + k];
  }
  typename R::V last, weights;
  typename R::I keep;
  R::load(last, x);
  R::load(weights, w);
  R::load_keep(keep, bytes);
  body(1, last, keep, weights);
}

template <class V>
inline void sum_lines(const V* four, double& sum) {
  V all = (four[0] + four[1]) + (four[2] + four[3]);
  using T = std::remove_reference_t<decltype(all[0])>;
  sum += sum_line<T, double>(all);
}

struct AsIs {
  template <class R>
  static void apply(typename R::V&) {}
};

// sum w f(x)
template <class C, int kBytes, bool kKeep, bool kWeight, class F = AsIs>
double sum_row(const Elements<C>& e, int64_t n) {
  using R = Register<C, kBytes>;
  using V = typename R::V;
  constexpr int64_t most = 64 * R::kSide;  // 16 additions to a lane, then double
  double sum = 0;
  for (int64_t i = 0; i < n; i += most) {
    V s[4] = {};
    for_lines<C, kBytes, kKeep, kWeight>(e.from(i), n - i < most ? n - i : most,
                                         [&](int k, const V& x, const auto& keep, const V& w)
                                             __attribute__((always_inline)) {
                                               V kept = x;
                                               R::take_or_zero(kept, keep);
                                               F::template apply<R>(kept);
                                               s[k] += kWeight ? V(w * kept) : kept;
                                             });
    sum_lines(s, sum);
  }
  return sum;
}

inline void normalise_loop(const uint8_t* mask, int64_t n, uint8_t* keep) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) keep[i] = mask[i] != 0;
}

}  // namespace safeops::cpu
