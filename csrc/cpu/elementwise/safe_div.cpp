// For eps >= 0: q = a / b, or the fill value where b = 0 or |b| < eps. For eps < 0 (fill_value=None): q = a / (sign(b)
// max(|b|, -eps)), with sign(0) = 1. A quotient of a finite a that is too large for the output dtype saturates.
// I/O: forward reads a, b and writes q; backward reads g, a, b and writes da, db.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/elementwise/binary.h"

namespace safeops::cpu {

namespace {

template <class C>
struct SafeDiv {
  C least;                           // the least magnitude of the divisor if eps is negative; else 0
  C floor, fill, largest, overflow;  // |b| <= floor counts as 0; |q| >= overflow would round to inf in the output dtype

  explicit SafeDiv(const Arguments& given)
      : least(given.eps < 0 ? std::max(static_cast<C>(-given.eps), std::numeric_limits<C>::denorm_min()) : C(0)),
        floor(std::nextafter(static_cast<C>(std::max(given.eps, 0.0)), C(0))),  // below eps; 0 for eps = 0
        fill(static_cast<C>(given.fill)),
        largest(static_cast<C>(safeops::largest(given.out))),
        overflow(static_cast<C>(overflow_from(given.out))) {}

  C divisor(C b) const { return select(std::fabs(b) < least, select(b < 0, -least, least), b); }

  bool divides(C b) const { return !(std::fabs(b) <= floor); }  // true for a NaN b, which then shows in q

  bool saturated(C a, C q) const {
    return (std::fabs(q) >= overflow) & (std::fabs(a) < std::numeric_limits<C>::infinity());
  }
};

// Forward and backward have two loops each. The first loop only divides, and counts rare cases: quotients that
// saturate, slopes that leave the normal numbers. A chunk with a rare case, and every chunk if eps is negative, goes
// through the second loop, which handles them. Outputs are buffers or new memory, so writing them twice is safe.

template <class C>
C forward_chunk(const SafeDiv<C>& f, const Chunk<C>& chunk) {
  const C *a = chunk.in[0], *b = chunk.in[1];
  C* out = chunk.out[0];
  C rare = 0;  // a sum: gcc does not vectorise a bitwise reduction here
#pragma omp simd reduction(+ : rare)
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = f.divides(b[i]);
    const C q = select_or_zero(keep, a[i]) / select(keep, b[i], C(1));
    rare += select_or_zero(std::fabs(q) >= f.overflow, C(1));
    out[i] = select(keep, q, f.fill);
  }
  return rare;
}

template <class C>
void forward_loop(const void* op, const Chunk<C>& chunk) {
  const SafeDiv<C> f = *static_cast<const SafeDiv<C>*>(op);
  if (f.least == 0 && forward_chunk(f, chunk) == 0) return;
  const C *a = chunk.in[0], *b = chunk.in[1];
  C* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const C q = a[i] / f.divisor(b[i]);
    const C shown = select(f.saturated(a[i], q), std::copysign(f.largest, q), q);
    out[i] = select(f.divides(f.divisor(b[i])), shown, f.fill);
  }
}

// q = a/b:  da = g/b,  db = -(g/b) q;  both are exactly 0 where the output is the fill value.
template <class C, bool kInput, bool kOther>
C backward_chunk(const SafeDiv<C>& f, const Chunk<C>& chunk) {
  const C *g = chunk.in[0], *a = chunk.in[1], *b = chunk.in[2];
  C *da = chunk.out[0], *db = chunk.out[1];
  C rare = 0;
#pragma omp simd reduction(+ : rare)
  for (int64_t i = 0; i < chunk.n; ++i) {
    const bool keep = f.divides(b[i]);
    const C upstream = select_or_zero(keep, g[i]), divisor = select(keep, b[i], C(1));
    const C q = select_or_zero(keep, a[i]) / divisor, slope = upstream / divisor;
    rare += select_or_zero(std::fabs(q) >= f.overflow, C(1));
    if constexpr (kInput) da[i] = slope;
    if constexpr (kOther) {
      const C size = std::fabs(slope);
      rare += select_or_zero(size > std::numeric_limits<C>::max(), C(1)) +
              select_or_zero(size < std::numeric_limits<C>::min(), std::fabs(upstream));
      db[i] = (0 - slope) * q;
    }
  }
  return rare;
}

// If g/b overflows, or underflows while q/b is finite, db is computed as -g (q/b), which may be representable.
template <class C, bool kInput, bool kOther>
void backward_loop(const void* op, const Chunk<C>& chunk) {
  const SafeDiv<C> f = *static_cast<const SafeDiv<C>*>(op);
  if (f.least == 0 && backward_chunk<C, kInput, kOther>(f, chunk) == 0) return;
  const C *g = chunk.in[0], *a = chunk.in[1], *b = chunk.in[2];
  C *da = chunk.out[0], *db = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const C divisor = f.divisor(b[i]), q = a[i] / divisor, slope = g[i] / divisor, size = std::fabs(slope);
    const bool live = f.divides(divisor) & !f.saturated(a[i], q);
    if constexpr (kInput) da[i] = select_or_zero(live, slope);
    if constexpr (kOther) {
      constexpr C least = std::numeric_limits<C>::min(), most = std::numeric_limits<C>::max();
      const C other = q / divisor;
      const bool lost = (size > most) | ((size < least) & (g[i] != 0) & (std::fabs(other) <= most));
      db[i] = select_or_zero(live & !(std::fabs(b[i]) < f.least), -select(lost, g[i] * other, slope * q));
    }
  }
}

}  // namespace

template <class C>
struct BinaryLoops<SafeDiv, C> {
  static void value(const void* op, const Chunk<C>& chunk) { forward_loop(op, chunk); }

  template <bool kInput, bool kOther>
  static void slopes(const void* op, const Chunk<C>& chunk) { backward_loop<C, kInput, kOther>(op, chunk); }
};

SAFEOPS_BINARY(safe_div, SafeDiv)

}  // namespace safeops::cpu
