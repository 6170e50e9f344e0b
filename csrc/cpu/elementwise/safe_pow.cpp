#include "cpu/elementwise/binary.h"
#include "cpu/engine/pow.h"

namespace safeops::cpu {

namespace {

// value = a^b: 0 where it is not a real number, saturated where it does not fit the output dtype. da = g b a^(b-1); db
// = g a^b log a for a > 0, else 0. Both da and db are 0 where the value is replaced as above, and for a = 0 where b <
// 1.
template <class C>
struct SafePow {
  C largest, overflow;

  explicit SafePow(const Arguments& arguments)
      : largest(static_cast<C>(safeops::largest(arguments.out))),
        overflow(static_cast<C>(overflow_from(arguments.out))) {}

  bool saturated(const math::Power<C>& power) const {
    return (std::fabs(power.value) >= overflow) & (power.a < math::kInf) & (std::fabs(power.y) < math::kInf);
  }

  C value(const math::Power<C>& power) const {
    const C y = power.value;
    return select_or_zero(power.real, select(saturated(power), std::copysign(largest, y), y));
  }

  Slopes<C> slopes(C g, const math::Power<C>& power) const {
    const bool live = power.real & !saturated(power) & !((power.a == 0) & (power.y < 1));
    return {select_or_zero(live & (power.y != 0), power.base_slope(g)),
            select_or_zero(live & !(power.x <= 0), power.exponent_slope(g))};
  }
};

// powers() has two loops, the first for the logarithms: in one loop, each element would be so long a chain of
// operations that the processor could not overlap elements. The second loop has `ivdep`, not `omp simd`, which would
// keep the Power of each lane in memory and vectorise nothing.
template <class C, class Finish>
SAFEOPS_INLINE void powers(int64_t n, const C* a, const C* b, const Finish& finish) {
  constexpr int64_t kBlock = 256;
  alignas(64) double high[kBlock], low[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t length = std::min(kBlock, n - start);
    SAFEOPS_SIMD
    for (int64_t i = 0; i < length; ++i) {
      const math::Twice log = math::log_wide(std::fabs(a[start + i]));
      high[i] = log.hi;
      if constexpr (sizeof(C) == 8) low[i] = log.lo;
    }
    _Pragma("GCC ivdep")
    for (int64_t i = 0; i < length; ++i)
      finish(start + i, math::Power<C>(a[start + i], b[start + i], {high[i], sizeof(C) == 8 ? low[i] : 0}));
  }
}

}  // namespace

template <class C>
struct BinaryLoops<SafePow, C> {
  static void value(const void* op, const Chunk<C>& chunk) {
    const SafePow<C> f = *static_cast<const SafePow<C>*>(op);
    C* out = chunk.out[0];
    powers(chunk.n, chunk.in[0], chunk.in[1],
           [&](int64_t i, const math::Power<C>& power) { out[i] = f.value(power); });
  }

  template <bool kInput, bool kOther>
  static void slopes(const void* op, const Chunk<C>& chunk) {
    const SafePow<C> f = *static_cast<const SafePow<C>*>(op);
    const C* g = chunk.in[0];
    C *da = chunk.out[0], *db = chunk.out[1];
    powers(chunk.n, chunk.in[1], chunk.in[2], [&](int64_t i, const math::Power<C>& power) {
      const Slopes<C> d = f.slopes(g[i], power);
      if constexpr (kInput) da[i] = d.first;
      if constexpr (kOther) db[i] = d.second;
    });
  }
};

SAFEOPS_BINARY(safe_pow, SafePow)

}  // namespace safeops::cpu
