// q = a / b where b is not (nearly) zero, else a fill value; a quotient too large for the output dtype saturates.
// I/O: forward reads a, b and writes q; backward reads g, a, b and writes da, db.
#include <cmath>
#include <limits>

#include "cpu/elementwise/binary.h"

namespace safeops::cpu {

namespace {

template <class C>
struct SafeDiv {
  C floor, fill, largest, overflow;  // |b| <= floor counts as 0; |q| >= overflow would round to inf in the output dtype

  explicit SafeDiv(const Arguments& given)
      : floor(std::nextafter(static_cast<C>(given.eps), C(0))),  // the last number below eps; 0 for eps = 0
        fill(static_cast<C>(given.fill)),
        largest(static_cast<C>(safeops::largest(given.out))),
        overflow(static_cast<C>(overflow_from(given.out))) {}

  bool divides(C b) const { return !(std::fabs(b) <= floor); }  // a NaN b does, and shows

  bool saturated(C a, C q) const {
    return (std::fabs(q) >= overflow) & (std::fabs(a) < std::numeric_limits<C>::infinity());
  }
};

// Every loop is written twice. The first does no more than the divisions, and counts what it cannot do: quotients that
// saturate, slopes that leave the normal numbers. Only the rare chunk where it counted any goes through the careful
// one. Outputs are buffers or memory of our own: writing twice is writing once.

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
  if (forward_chunk(f, chunk) == 0) return;
  const C *a = chunk.in[0], *b = chunk.in[1];
  C* out = chunk.out[0];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const C q = a[i] / b[i];
    const C shown = select(f.saturated(a[i], q), std::copysign(f.largest, q), q);
    out[i] = select(f.divides(b[i]), shown, f.fill);
  }
}

// q = a/b:  da = g/b,  db = -(g/b) q;  both exactly 0 where the output was a stand-in.
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

// db is -g (q/b) where g/b over- or underflows and the product may not, unless q/b overflows.
template <class C, bool kInput, bool kOther>
void backward_loop(const void* op, const Chunk<C>& chunk) {
  const SafeDiv<C> f = *static_cast<const SafeDiv<C>*>(op);
  if (backward_chunk<C, kInput, kOther>(f, chunk) == 0) return;
  const C *g = chunk.in[0], *a = chunk.in[1], *b = chunk.in[2];
  C *da = chunk.out[0], *db = chunk.out[1];
  SAFEOPS_SIMD
  for (int64_t i = 0; i < chunk.n; ++i) {
    const C q = a[i] / b[i], slope = g[i] / b[i], size = std::fabs(slope);
    const bool live = f.divides(b[i]) & !f.saturated(a[i], q);
    if constexpr (kInput) da[i] = select_or_zero(live, slope);
    if constexpr (kOther) {
      constexpr C least = std::numeric_limits<C>::min(), most = std::numeric_limits<C>::max();
      const C other = q / b[i];
      const bool lost = (size > most) | ((size < least) & (g[i] != 0) & (std::fabs(other) <= most));
      db[i] = select_or_zero(live, -select(lost, g[i] * other, slope * q));
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
