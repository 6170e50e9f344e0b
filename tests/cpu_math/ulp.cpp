// The largest errors of the functions of csrc/cpu/math.h against long double, in units in the last place of the result.
//
//     ulp [values]       one line "function type error worst-operands" each; `values` operands (0: every float)
#include "cpu/engine/exp.h"
#include "cpu/engine/math.h"
#include "cpu/engine/pow.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace m = safeops::cpu::math;
using safeops::cpu::BitsOf;
using safeops::cpu::bit_cast;
using Wide = long double;

namespace {

// Returns |got - truth| in units in the last place of C at the truth, 0 for equal numbers. NaN is right only for NaN,
// and inf only for a truth that rounds to inf.
template <class C>
double error(C got, Wide truth) {
  const C rounded = static_cast<C>(truth);
  if (std::isnan(truth) || std::isnan(got)) return std::isnan(truth) && std::isnan(got) ? 0 : HUGE_VAL;
  if (got == rounded) {
    if (got == 0 && std::signbit(got) != std::signbit(rounded)) return HUGE_VAL;
    if (!std::isfinite(got)) return 0;
  }
  if (std::isinf(truth)) return HUGE_VAL;
  if (std::isinf(got)) {  // inf counts as the number one step beyond the largest
    const Wide most = std::numeric_limits<C>::max(), below = std::nextafter(std::numeric_limits<C>::max(), C(0));
    const Wide beyond = std::copysign(most + (most - below), static_cast<Wide>(got));
    return static_cast<double>(std::fabs((beyond - truth) / (most - below)));
  }
  const int exponent = std::max(std::ilogb(truth), std::numeric_limits<C>::min_exponent - 1);
  const Wide step = std::ldexp(Wide(1), exponent - (std::numeric_limits<C>::digits - 1));
  return static_cast<double>(std::fabs((static_cast<Wide>(got) - truth) / step));
}

constexpr int kBlock = 1024;

struct Worst {
  double ulp = 0;
  Wide x = 0, y = 0;
  void see(double e, Wide a, Wide b = 0) {
    if (e > ulp || std::isnan(e)) ulp = e, x = a, y = b;
  }
  void print(const char* name, const char* type) const {
    std::printf("%s %s %.4f %.20Lg %.20Lg\n", name, type, ulp, x, y);
  }
};

template <class C>
const char* type_name() { return sizeof(C) == 4 ? "float" : "double"; }

// Returns a random number. kind 0: any bit pattern; 1, 2: near 1, where logarithms and arc functions lose digits; 3: an
// edge value; 4: from 1 to 2^7 (float) or 2^10; else a small whole number.
template <class C>
C operand(std::mt19937_64& random, int kind) {
  using B = BitsOf<C>;
  const B bits = static_cast<B>(random());
  constexpr B one = sizeof(C) == 4 ? static_cast<B>(0x3F800000u) : static_cast<B>(0x3FF0000000000000u);
  constexpr int digits = std::numeric_limits<C>::digits - 1;
  using L = std::numeric_limits<C>;
  constexpr C edges[] = {0, 1, 0.5, 2, 3, 0.75, 1.5, 33, 1e5, L::infinity(), L::quiet_NaN(), L::max(), L::min(),
                         L::denorm_min(), C(1) + L::epsilon(), C(1) - L::epsilon() / 2,
                         C(0x1.fffffep+23f), C(0x1.fffffffffffffp+52)};
  const C sign = random() & 1 ? C(-1) : C(1);
  switch (kind) {
    case 0: return bit_cast<C>(bits);
    case 1: return sign * bit_cast<C>(static_cast<B>(one - (B(3) << digits) + bits % (B(6) << digits)));  // 2^-3 .. 2^3
    case 2: return sign * bit_cast<C>(static_cast<B>(one - (B(1) << (digits - 5)) + bits % (B(1) << (digits - 4))));
    case 3: return sign * edges[random() % (sizeof(edges) / sizeof(C))];
    case 4: return sign * bit_cast<C>(static_cast<B>(one + bits % (B(sizeof(C) == 4 ? 7 : 10) << digits)));
    default: return sign * static_cast<C>(random() % 40);
  }
}

template <class C, class Ours, class Truth>
void unary(const char* name, int64_t count, const Ours& ours, const Truth& truth) {
  std::mt19937_64 random(1);
  Worst worst;
  C x[kBlock], y[kBlock];
  const bool all = sizeof(C) == 4 && count == 0;
  if (count == 0) count = sizeof(C) == 4 ? int64_t{1} << 32 : int64_t{1} << 27;
  for (int64_t at = 0; at < count; at += kBlock) {
    for (int i = 0; i < kBlock; ++i)
      x[i] = all ? bit_cast<C>(static_cast<BitsOf<C>>(at + i)) : operand<C>(random, at == 0 ? 3 : i % 5);
#pragma omp simd
    for (int i = 0; i < kBlock; ++i) y[i] = ours(x[i]);
    for (int i = 0; i < kBlock; ++i) worst.see(error(y[i], truth(x[i])), x[i]);
  }
  worst.print(name, type_name<C>());
}

template <class C, class Ours, class Truth>
void binary(const char* name, int64_t count, const Ours& ours, const Truth& truth) {
  std::mt19937_64 random(2);
  Worst worst;
  C a[kBlock], b[kBlock], y[kBlock];
  if (count == 0) count = int64_t{1} << 26;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int kind = static_cast<int>(at / kBlock);
    for (int i = 0; i < kBlock; ++i) {
      a[i] = operand<C>(random, at == 0 ? 3 : kind % 6);
      b[i] = operand<C>(random, at == 0 ? 3 : kind / 6 % 6);
    }
#pragma omp simd
    for (int i = 0; i < kBlock; ++i) y[i] = ours(a[i], b[i]);
    for (int i = 0; i < kBlock; ++i) worst.see(error(y[i], truth(a[i], b[i])), a[i], b[i]);
  }
  worst.print(name, type_name<C>());
}

template <class C>
Wide clamped(C x) { return x > 1 ? Wide(1) : x < -1 ? Wide(-1) : Wide(x); }

// Maps x into [0, 1], the domain of arc functions.
template <class C>
C unit(C x) { return std::fabs(x) > 1 ? 1 / std::fabs(x) : std::fabs(x); }

template <class C>
void all(int64_t count, const char* only) {
  const auto wanted = [&](const char* name) { return !only || std::strcmp(name, only) == 0; };
  // For float, the truth in double is accurate enough and faster.
  using T = std::conditional_t<sizeof(C) == 4, double, Wide>;
  const auto unary_of = [&](const char* name, auto ours, auto truth) {
    if (wanted(name)) unary<C>(name, count, ours, truth);
  };
  const auto binary_of = [&](const char* name, auto ours, auto truth) {
    if (wanted(name)) binary<C>(name, count, ours, truth);
  };
  unary_of("exp", [](C x) { return m::exp(x); }, [](C x) -> Wide { return std::exp(T(x)); });
  unary_of("exp_term", [](C x) { return safeops::cpu::exp_term(-unit(x)); },
           [](C x) -> Wide { return std::exp(-T(unit(x))); });
  unary_of("expm1", [](C x) { return m::expm1_nonpositive(-std::fabs(x)); },
           [](C x) -> Wide { return std::expm1(-std::fabs(T(x))) + T(0); });
  unary_of("log1p", [](C x) { return m::log1p_unit(unit(x)); }, [](C x) -> Wide { return std::log1p(T(unit(x))); });
  unary_of("log", [](C x) { return m::log(x); }, [](C x) -> Wide { return std::log(T(x)); });
  unary_of("asin", [](C x) { return m::asin(x); }, [](C x) -> Wide { return std::asin(T(clamped(x))); });
  unary_of("acos", [](C x) { return m::acos(x); }, [](C x) -> Wide { return std::acos(T(clamped(x))); });
  binary_of("atan2", [](C y, C x) { return m::atan2(y, x); },
            [](C y, C x) -> Wide { return x == 0 && y == 0 ? std::copysign(T(0), T(y)) : std::atan2(T(y), T(x)); });
  binary_of("pow", [](C x, C y) { return m::pow(x, y); }, [](C x, C y) -> Wide { return std::pow(T(x), T(y)); });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 0;
  const char* only = argc > 2 ? argv[2] : nullptr;
  all<float>(count, only);
  all<double>(count, only);
}
