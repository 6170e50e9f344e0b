// Handlers of the instructions that only compute, each under its name in the PTX ISA.
//
// Approximations are computed exactly. If the launch asks for it (`bias`), the result is then moved up or down by the
// largest error that the ISA allows.
#pragma once
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace executed {

using Table = std::map<std::string, Instruction>;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};
inline float number(bf16 x) { return std::bit_cast<float>(u32(x.bits) << 16); }
inline float number(f16 x) { return float(std::bit_cast<_Float16>(x.bits)); }
inline float number(float x) { return x; }
inline double number(double x) { return x; }
inline bf16 to_bf16(float x) {
    const u32 b = std::bit_cast<u32>(x);
    return {x != x ? u16(0x7fff) : u16((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
inline f16 to_f16(float x) { return {x != x ? u16(0x7fff) : std::bit_cast<u16>(_Float16(x))}; }

template <class T>
T flush(T x) {
    return std::abs(x) < std::numeric_limits<T>::min() ? std::copysign(T(0), x) : x;
}

template <class T>
constexpr T CANONICAL_NAN = std::numeric_limits<T>::quiet_NaN();
template <>
inline constexpr float CANONICAL_NAN<float> = std::bit_cast<float>(0x7fffffffu);

// min and max. If one number is NaN, the result is the other number, or NaN in .NaN variants. -0 is less than +0.
template <bool largest, bool nan, class T>
T extreme(T a, T b) {
    if (a != a || b != b) return nan || (a != a && b != b) ? CANONICAL_NAN<T> : a != a ? b : a;
    if (a == b) return std::signbit(a) == largest ? b : a;
    return (a < b) == largest ? b : a;
}

inline Instruction& define(Table& t, const std::string& name, std::vector<int> widths, Handler run) {
    t[name].run = run, t[name].widths = std::move(widths);
    return t[name];
}

template <class T, class F>
void unary(Table& t, const std::string& name, F) {
    using R = std::invoke_result_t<F, T>;
    define(t, name, {sizeof(R), sizeof(T)}, [](Warp& w, const Instruction& i) {
        const T* a = w.in<T>(i.op[1]);
        w.out<R>(i.op[0], [&](int l) { return F{}(a[l]); });
    });
}

// T: type of the operands; B: type of the second operand, if it is not T; R: type of the result.
template <class T, class B = T, class F>
void binary(Table& t, const std::string& name, F) {
    using R = std::invoke_result_t<F, T, B>;
    define(t, name, {sizeof(R), sizeof(T), sizeof(B)}, [](Warp& w, const Instruction& i) {
        const T* a = w.in<T>(i.op[1]);
        const B* b = w.in<B>(i.op[2]);
        w.out<R>(i.op[0], [&](int l) { return F{}(a[l], b[l]); });
    });
}

template <class T, class C = T, class F>
void ternary(Table& t, const std::string& name, F) {
    using R = std::invoke_result_t<F, T, T, C>;
    define(t, name, {sizeof(R), sizeof(T), sizeof(T), sizeof(C)}, [](Warp& w, const Instruction& i) {
        const T *a = w.in<T>(i.op[1]), *b = w.in<T>(i.op[2]);
        const C* c = w.in<C>(i.op[3]);
        w.out<R>(i.op[0], [&](int l) { return F{}(a[l], b[l], c[l]); });
    });
}

// setp. ops: p, q, a, b, predicate to combine with. p: the comparison; q: its opposite or, for packed halves, the
// comparison of the high halves.
template <class T, bool packed, class F>
void compare(Table& t, const std::string& type, const std::string& name, F) {
    const auto result = [](Warp& w, const Instruction& i) {
        const T* a = packed ? reinterpret_cast<const T*>(w.in<u32>(i.op[2])) : w.in<T>(i.op[2]);
        const T* b = packed ? reinterpret_cast<const T*>(w.in<u32>(i.op[3])) : w.in<T>(i.op[3]);
        Mask p = 0, q = 0;
        for (int l = 0; l < LANES; ++l) {
            p |= Mask(F{}(a[l << packed], b[l << packed])) << l;
            if (packed) q |= Mask(F{}(a[2 * l + 1], b[2 * l + 1])) << l;
        }
        const auto combined = [&](Mask x) {
            const Mask c = i.variant ? w.predicate(i.op[4]) : 0;
            return i.variant == 1 ? x & c : i.variant == 2 ? x | c : x ^ c;
        };
        w.set_predicate(i.op[1], combined(packed ? q : ~p)), w.set_predicate(i.op[0], combined(p));
    };
    std::vector<int> widths = {0, 0, sizeof(T) << packed, sizeof(T) << packed};
    int variant = 0;
    for (const char* combine : {"", ".and", ".or", ".xor"}) {
        define(t, "setp." + name + combine + "." + type, widths, result).variant = variant++;
        if (variant == 1) widths.push_back(0);
    }
}

template <class T, bool packed = false>
void compare_numbers(Table& t, const std::string& type) {
    compare<T, packed>(t, type, "eq", [](T a, T b) { return number(a) == number(b); });
    compare<T, packed>(t, type, "ne", [](T a, T b) { return number(a) < number(b) || number(a) > number(b); });
    compare<T, packed>(t, type, "lt", [](T a, T b) { return number(a) < number(b); });
    compare<T, packed>(t, type, "le", [](T a, T b) { return number(a) <= number(b); });
    compare<T, packed>(t, type, "gt", [](T a, T b) { return number(a) > number(b); });
    compare<T, packed>(t, type, "ge", [](T a, T b) { return number(a) >= number(b); });
    compare<T, packed>(t, type, "equ", [](T a, T b) { return !(number(a) < number(b) || number(a) > number(b)); });
    compare<T, packed>(t, type, "neu", [](T a, T b) { return !(number(a) == number(b)); });
    compare<T, packed>(t, type, "ltu", [](T a, T b) { return !(number(a) >= number(b)); });
    compare<T, packed>(t, type, "leu", [](T a, T b) { return !(number(a) > number(b)); });
    compare<T, packed>(t, type, "gtu", [](T a, T b) { return !(number(a) <= number(b)); });
    compare<T, packed>(t, type, "geu", [](T a, T b) { return !(number(a) < number(b)); });
    compare<T, packed>(t, type, "num", [](T a, T b) { return number(a) == number(a) && number(b) == number(b); });
    compare<T, packed>(t, type, "nan", [](T a, T b) { return number(a) != number(a) || number(b) != number(b); });
}

template <class T>
void compare_integers(Table& t, const std::string& type) {
    compare<T, false>(t, type, "eq", [](T a, T b) { return a == b; });
    compare<T, false>(t, type, "ne", [](T a, T b) { return a != b; });
    compare<T, false>(t, type, "lt", [](T a, T b) { return a < b; });
    compare<T, false>(t, type, "le", [](T a, T b) { return a <= b; });
    compare<T, false>(t, type, "gt", [](T a, T b) { return a > b; });
    compare<T, false>(t, type, "ge", [](T a, T b) { return a >= b; });
}

// T: the signed or unsigned integer type; U: the unsigned type of its size.
template <class T>
void integers(Table& t, const std::string& type) {
    using U = std::make_unsigned_t<T>;
    constexpr int BITS = 8 * sizeof(T);
    compare_integers<T>(t, type);
    binary<T>(t, "add." + type, [](T a, T b) { return T(U(a) + U(b)); });
    binary<T>(t, "sub." + type, [](T a, T b) { return T(U(a) - U(b)); });
    binary<T>(t, "mul.lo." + type, [](T a, T b) { return T(u64(a) * u64(b)); });
    ternary<T>(t, "mad.lo." + type, [](T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); });
    binary<T>(t, "min." + type, [](T a, T b) { return a < b ? a : b; });
    binary<T>(t, "max." + type, [](T a, T b) { return a > b ? a : b; });
    // The ISA leaves a quotient by zero unspecified.
    binary<T>(t, "div." + type, [](T a, T b) {
        return b == 0 ? T(-1) : b == T(-1) && T(-1) < 0 ? T(-U(a)) : T(a / b);
    });
    binary<T>(t, "rem." + type, [](T a, T b) { return b == 0 || (b == T(-1) && T(-1) < 0) ? T(0) : T(a % b); });
    binary<T, u32>(t, "shr." + type, [](T a, u32 n) { return n < BITS ? T(a >> n) : a < 0 ? T(-1) : T(0); });
    unary<T>(t, "neg." + type, [](T a) { return T(-U(a)); });
    unary<T>(t, "abs." + type, [](T a) { return a < 0 ? T(-U(a)) : a; });
    if constexpr (sizeof(T) < 8) {
        using Wide = std::conditional_t<(T(-1) < 0), std::conditional_t<sizeof(T) == 2, s32, s64>,
                                        std::conditional_t<sizeof(T) == 2, u32, u64>>;
        binary<T>(t, "mul.wide." + type, [](T a, T b) { return Wide(Wide(a) * Wide(b)); });
        ternary<T, Wide>(t, "mad.wide." + type, [](T a, T b, Wide c) { return Wide(Wide(a) * Wide(b) + c); });
        binary<T>(t, "mul.hi." + type, [](T a, T b) { return T(Wide(a) * Wide(b) >> BITS); });
        ternary<T>(t, "mad.hi." + type, [](T a, T b, T c) { return T(T(Wide(a) * Wide(b) >> BITS) + c); });
    } else {
        using Wide = std::conditional_t<(T(-1) < 0), __int128, unsigned __int128>;
        binary<T>(t, "mul.hi." + type, [](T a, T b) { return T(Wide(a) * Wide(b) >> BITS); });
    }
    if constexpr (sizeof(T) >= 4)
        define(t, "bfe." + type, {sizeof(T), sizeof(T), 4, 4}, [](Warp& w, const Instruction& i) {
            const T* a = w.in<T>(i.op[1]);
            const u32 *position = w.in<u32>(i.op[2]), *length = w.in<u32>(i.op[3]);
            w.out<T>(i.op[0], [&](int l) {
                const u32 pos = position[l] & 255, len = length[l] & 255;
                if (len == 0) return T(0);
                const u32 top = std::min(pos + len - 1, u32(BITS - 1));  // position of the field's sign bit
                const U sign = T(-1) < 0 && (a[l] >> top & 1) ? U(-1) : U(0);
                const U field = pos < BITS ? U(a[l]) >> pos : U(0);
                const U kept = top < pos ? U(0) : top - pos + 1 >= BITS ? U(-1) : (U(1) << (top - pos + 1)) - 1;
                return T((field & kept) | (sign & ~kept));
            });
        });
}

// Bitwise instructions, of the types .b, which have no sign.
template <class U>
void bits(Table& t, const std::string& width) {
    constexpr u32 BITS = 8 * sizeof(U);
    const std::string b = "b" + width;
    compare_integers<U>(t, b);
    binary<U>(t, "and." + b, [](U a, U c) { return U(a & c); });
    binary<U>(t, "or." + b, [](U a, U c) { return U(a | c); });
    binary<U>(t, "xor." + b, [](U a, U c) { return U(a ^ c); });
    unary<U>(t, "not." + b, [](U a) { return U(~a); });
    binary<U, u32>(t, "shl." + b, [](U a, u32 n) { return n < BITS ? U(a << n) : U(0); });
    binary<U, u32>(t, "shr." + b, [](U a, u32 n) { return n < BITS ? U(a >> n) : U(0); });
    for (const char* kind : {"b", "u", "s", "f"}) {
        unary<U>(t, "mov." + (kind + width), [](U a) { return a; });
        define(t, "selp." + (kind + width), {sizeof(U), sizeof(U), sizeof(U), 0}, [](Warp& w, const Instruction& i) {
            const U *a = w.in<U>(i.op[1]), *c = w.in<U>(i.op[2]);
            const Mask p = w.predicate(i.op[3]);
            w.out<U>(i.op[0], [&](int l) { return p >> l & 1 ? a[l] : c[l]; });
        });
    }
    if constexpr (sizeof(U) >= 4) {
        unary<U>(t, "popc." + b, [](U a) { return u32(std::popcount(a)); });
        unary<U>(t, "clz." + b, [](U a) { return u32(std::countl_zero(a)); });
        unary<U>(t, "brev." + b, [](U a) {
            U r = 0;
            for (u32 k = 0; k < BITS; ++k) r |= U(a >> k & 1) << (BITS - 1 - k);
            return r;
        });
        define(t, "bfi." + b, {sizeof(U), sizeof(U), sizeof(U), 4, 4}, [](Warp& w, const Instruction& i) {
            const U *a = w.in<U>(i.op[1]), *c = w.in<U>(i.op[2]);
            const u32 *pos = w.in<u32>(i.op[3]), *len = w.in<u32>(i.op[4]);
            w.out<U>(i.op[0], [&](int l) {
                const u32 p = pos[l] & 255, n = len[l] & 255;
                const U kept = p >= BITS ? 0 : (n >= BITS ? U(-1) : (U(1) << n) - 1) << p;
                return U((c[l] & ~kept) | ((p >= BITS ? 0 : a[l] << p) & kept));
            });
        });
    }
}

template <class T>
void floats(Table& t, const std::string& type) {
    compare_numbers<T>(t, type);
    for (const char* rn : {".", ".rn."}) {
        binary<T>(t, "add" + (rn + type), [](T a, T b) { return a + b; });
        binary<T>(t, "sub" + (rn + type), [](T a, T b) { return a - b; });
        binary<T>(t, "mul" + (rn + type), [](T a, T b) { return a * b; });
    }
    ternary<T>(t, "fma.rn." + type, [](T a, T b, T c) { return std::fma(a, b, c); });
    binary<T>(t, "div.rn." + type, [](T a, T b) { return a / b; });
    unary<T>(t, "rcp.rn." + type, [](T a) { return 1 / a; });
    unary<T>(t, "sqrt.rn." + type, [](T a) { return std::sqrt(a); });
    unary<T>(t, "neg." + type, [](T a) { return -a; });
    unary<T>(t, "abs." + type, [](T a) { return std::abs(a); });
    binary<T>(t, "min." + type, [](T a, T b) { return extreme<false, false>(a, b); });
    binary<T>(t, "max." + type, [](T a, T b) { return extreme<true, false>(a, b); });
    binary<T>(t, "copysign." + type, [](T a, T b) { return std::copysign(b, a); });
}

// Returns the fp32 number that is farthest from the exact result, above or below it, within the ISA's error bound.
inline float moved(double exact, double most, int bias) {
    const float rounded = float(exact);
    if (bias == 0 || !std::isfinite(rounded) || rounded == exact) return rounded;
    const double bound = exact + bias * most;
    const float r = float(bound);
    return (r > bound) == (bias > 0) && r != bound ? std::nextafter(r, bias > 0 ? -INFINITY : INFINITY) : r;
}

// An approximate function: returns the exact value moved by the relative error that the ISA allows. For a logarithm of
// a number close to 1 the error is absolute, since the result is close to 0.
template <double most, bool logarithm = false, class F>
void approximate(Table& t, const std::string& name, F) {
    const auto result = [](const Warp& w, float a) {
        const double exact = F{}(double(a));
        return moved(exact, logarithm && a > 0.5f && a < 2 ? most : most * std::abs(exact), w.block->launch->bias);
    };
    define(t, name + ".f32", {4, 4}, [](Warp& w, const Instruction& i) {
        const float* a = w.in<float>(i.op[1]);
        w.out<float>(i.op[0], [&](int l) { return decltype(result){}(w, a[l]); });
    });
    define(t, name + ".ftz.f32", {4, 4}, [](Warp& w, const Instruction& i) {
        const float* a = w.in<float>(i.op[1]);
        w.out<float>(i.op[0], [&](int l) { return flush(decltype(result){}(w, flush(a[l]))); });
    });
}

// div.approx gives 0 if the divisor is above 2^126.
template <bool full, bool ftz>
void quotient(Table& t, const std::string& name) {
    define(t, name, {4, 4, 4}, [](Warp& w, const Instruction& i) {
        const float *a = w.in<float>(i.op[1]), *b = w.in<float>(i.op[2]);
        const auto flushed = [](float x) { return ftz ? flush(x) : x; };
        const int bias = w.block->launch->bias;
        w.out<float>(i.op[0], [&](int l) {
            const float x = flushed(a[l]), y = flushed(b[l]);
            if (!full && std::abs(y) > 0x1p126f && std::isfinite(y)) return x * std::copysign(0.0f, y);
            if (bias == 0) return flushed(x / y);
            const double exact = double(x) / y;
            const int unit = exact == 0 || !std::isfinite(exact) ? 0 : std::max(std::ilogb(exact), -126) - 23;
            return flushed(moved(exact, std::ldexp(2.0, unit), bias));  // 2 ulp
        });
    });
}

// fp64 approximations read only the operand's upper 32-bit word. The result's upper word has 20 bits of its fraction,
// its lower word is 0.
template <class F>
void upper_half(Table& t, const std::string& name, F) {
    unary<double>(t, name, [](double a) {
        const auto top = [](double x) { return std::bit_cast<double>(std::bit_cast<u64>(x) & 0xffffffff00000000); };
        return top(flush(F{}(flush(top(a)))));
    });
}

// ---- conversions, whose registers may be wider than the type

// Rounds to odd: if a result is inexact, its last bit is set to 1. A second rounding, to fp16 or bf16, then gives the
// bits of one rounding of the exact value.
inline float to_odd(double x) {
    const float r = float(x);
    if (r == x || !std::isfinite(x)) return r;
    const u32 b = std::bit_cast<u32>(r);
    const bool above = std::abs(double(r)) > std::abs(x);
    return b & 1 ? r : std::bit_cast<float>(above ? b - 1 : b + 1);
}

// Returns a + b rounded to odd in fp64: to compare it or to round it to fewer bits gives the result of the exact sum.
inline double sum_to_odd(double a, double b) {
    const double sum = a + b, part = sum - a, rest = (a - (sum - part)) + (b - part);
    if (rest == 0 || !std::isfinite(sum) || std::bit_cast<u64>(sum) & 1) return sum;
    return std::nextafter(sum, rest > 0 ? INFINITY : -INFINITY);
}

enum Rounding { nearest, to_zero, down, up };

inline double rounded(double x, int rounding) {
    return rounding == nearest ? std::nearbyint(x) : rounding == to_zero ? std::trunc(x)
         : rounding == down    ? std::floor(x)     : std::ceil(x);
}

template <class T>
constexpr bool IS_FLOAT = !std::is_integral_v<T>;

template <class T>
T from_bits(u64 x) {
    if constexpr (sizeof(T) == 8) return std::bit_cast<T>(x);
    if constexpr (sizeof(T) == 4) return std::bit_cast<T>(u32(x));
    if constexpr (sizeof(T) == 2) return std::bit_cast<T>(u16(x));
    if constexpr (sizeof(T) == 1) return T(x);
}

template <class T>
u64 to_bits(T x) {
    if constexpr (std::is_integral_v<T>) return u64(s64(x));
    if constexpr (sizeof(T) == 8) return std::bit_cast<u64>(x);
    if constexpr (sizeof(T) == 4) return std::bit_cast<u32>(x);
    if constexpr (sizeof(T) == 2) return std::bit_cast<u16>(x);
}

// variant: the rounding mode's number, plus 4 for .sat.
template <class D, class S>
D convert(S x, int variant) {
    if constexpr (!IS_FLOAT<D> && !IS_FLOAT<S>) {
        return D(x);
    } else if constexpr (!IS_FLOAT<D>) {
        const double r = rounded(number(x), variant & 3);
        using Limits = std::numeric_limits<D>;
        if (r != r) return sizeof(D) == 8 || std::is_same_v<S, double> ? D(u64(1) << (8 * sizeof(D) - 1)) : D(0);
        return r <= double(Limits::min()) ? Limits::min() : r >= double(Limits::max()) ? Limits::max() : D(r);
    } else {
        if constexpr (std::is_same_v<D, float> && std::is_integral_v<S>) return float(x);
        if constexpr (std::is_same_v<D, double> && std::is_integral_v<S>) return double(x);
        double r;
        if constexpr (IS_FLOAT<S>) r = number(x); else r = double(x);
        if (std::is_same_v<D, S> && !(variant & 8)) r = rounded(r, variant & 3);
        if (variant & 4) r = r > 0 ? std::min(r, 1.0) : 0.0;
        if constexpr (std::is_same_v<D, bf16>) return to_bf16(to_odd(r));
        else if constexpr (std::is_same_v<D, f16>) return to_f16(to_odd(r));
        else return D(r);
    }
}

template <class D, class S>
void conversion(Table& t, const std::string& to, const std::string& from) {
    const auto run = [](Warp& w, const Instruction& i) {
        u64 x[LANES];
        for (int l = 0; l < LANES; ++l) x[l] = to_bits(convert<D>(from_bits<S>(w.wide(i.op[1], l)), i.variant));
        switch (w.program().width[i.op[0]]) {
            case 8: return w.out<u64>(i.op[0], [&](int l) { return x[l]; });
            case 4: return w.out<u32>(i.op[0], [&](int l) { return u32(x[l]); });
            case 2: return w.out<u16>(i.op[0], [&](int l) { return u16(x[l]); });
        }
    };
    const auto add = [&](const std::string& how, int variant) {
        const auto width = [](auto x) { return int(sizeof x) * (IS_FLOAT<decltype(x)> ? 1 : -1); };
        define(t, "cvt." + how + to + "." + from, {width(D{}), width(S{})}, run).variant = variant;
    };
    if constexpr (IS_FLOAT<D>) {
        if (to == from) add("sat.", 12), add("", 8);
        else add("rn.", 0), add("", 0), add("rn.sat.", 4);
    } else if constexpr (!IS_FLOAT<S>) {
        add("", 0);
    }
    if (IS_FLOAT<S> && (!IS_FLOAT<D> || to == from))
        add("rni.", nearest), add("rzi.", to_zero), add("rmi.", down), add("rpi.", up);
}

template <class S>
void conversions(Table& t, const std::string& from) {
    conversion<int8_t, S>(t, "s8", from), conversion<uint8_t, S>(t, "u8", from);
    conversion<s16, S>(t, "s16", from), conversion<u16, S>(t, "u16", from), conversion<s32, S>(t, "s32", from);
    conversion<u32, S>(t, "u32", from), conversion<s64, S>(t, "s64", from), conversion<u64, S>(t, "u64", from);
    conversion<bf16, S>(t, "bf16", from), conversion<f16, S>(t, "f16", from);
    conversion<float, S>(t, "f32", from), conversion<double, S>(t, "f64", from);
}

template <class H, H (*half)(float)>
void convert_pair(Table& t, const std::string& to) {
    binary<float>(t, "cvt.rn." + to + ".f32", [](float high, float low) {
        return u32(half(high).bits) << 16 | half(low).bits;
    });
}

// Applies a function to each of the two numbers packed in a register.
template <class T, class R, class F>
void packed(Table& t, const std::string& name, F) {
    const bool three = name.rfind("fma", 0) == 0;
    define(t, name, std::vector<int>(three ? 4 : 3, sizeof(R)), [](Warp& w, const Instruction& i) {
        const auto pair = [&](int op) { return reinterpret_cast<const T*>(w.in<R>(op)); };
        const T *a = pair(i.op[1]), *b = pair(i.op[2]), *c = pair(i.op.back());
        w.out<R>(i.op[0], [&](int l) {
            T r[2] = {F{}(a[2 * l], b[2 * l], c[2 * l]), F{}(a[2 * l + 1], b[2 * l + 1], c[2 * l + 1])};
            return std::bit_cast<R>(r);
        });
    });
}

template <class T>
void packed_integers(Table& t, const std::string& type) {
    packed<T, u32>(t, "add." + type, [](T a, T b, T) { return T(a + b); });
    packed<T, u32>(t, "min." + type, [](T a, T b, T) { return a < b ? a : b; });
    packed<T, u32>(t, "max." + type, [](T a, T b, T) { return a > b ? a : b; });
}

// Arithmetic of fp16 and bf16; each result is rounded once.
template <class H, H (*half)(float)>
void halves(Table& t, const std::string& type) {
    compare_numbers<H>(t, type);
    compare_numbers<H, true>(t, type + "x2");
    convert_pair<H, half>(t, type + "x2");
    unary<H>(t, "neg." + type, [](H a) { return H{u16(a.bits ^ 0x8000)}; });
    unary<H>(t, "abs." + type, [](H a) { return H{u16(a.bits & 0x7fff)}; });
    unary<u32>(t, "neg." + type + "x2", [](u32 a) { return a ^ 0x80008000; });
    unary<u32>(t, "abs." + type + "x2", [](u32 a) { return a & 0x7fff7fff; });
    binary<H>(t, "min." + type, [](H a, H b) { return half(extreme<false, false>(number(a), number(b))); });
    binary<H>(t, "max." + type, [](H a, H b) { return half(extreme<true, false>(number(a), number(b))); });
    binary<H>(t, "min.NaN." + type, [](H a, H b) { return half(extreme<false, true>(number(a), number(b))); });
    binary<H>(t, "max.NaN." + type, [](H a, H b) { return half(extreme<true, true>(number(a), number(b))); });
    // From sm_100 on the last operand may be fp32 with fp16 or bf16 factors.
    binary<H, float>(t, "add.rn.f32." + type, [](H a, float b) { return number(a) + b; });
    binary<H, float>(t, "add.f32." + type, [](H a, float b) { return number(a) + b; });
    binary<H, float>(t, "sub.f32." + type, [](H a, float b) { return number(a) - b; });
    ternary<H, float>(t, "fma.rn.f32." + type, [](H a, H b, float c) { return std::fma(number(a), number(b), c); });
    for (const char* rn : {".", ".rn."}) {
        binary<H>(t, "add" + (rn + type), [](H a, H b) { return half(number(a) + number(b)); });
        binary<H>(t, "sub" + (rn + type), [](H a, H b) { return half(number(a) - number(b)); });
        binary<H>(t, "mul" + (rn + type), [](H a, H b) { return half(number(a) * number(b)); });
    }
    ternary<H>(t, "fma.rn." + type, [](H a, H b, H c) {
        return half(to_odd(sum_to_odd(double(number(a)) * number(b), number(c))));
    });
}

// Logic of predicates, which have one bit for each lane.
inline void predicates(Table& t) {
    const auto one = [&](const char* name, auto f) {
        define(t, name, {0, 0}, [](Warp& w, const Instruction& i) {
            w.set_predicate(i.op[0], decltype(f){}(w.predicate(i.op[1])));
        });
    };
    const auto both = [&](const char* name, auto f) {
        define(t, name, {0, 0, 0}, [](Warp& w, const Instruction& i) {
            w.set_predicate(i.op[0], decltype(f){}(w.predicate(i.op[1]), w.predicate(i.op[2])));
        });
    };
    one("mov.pred", [](Mask a) { return a; }), one("not.pred", [](Mask a) { return ~a; });
    both("and.pred", [](Mask a, Mask b) { return a & b; });
    both("or.pred", [](Mask a, Mask b) { return a | b; });
    both("xor.pred", [](Mask a, Mask b) { return a ^ b; });
}

inline Table arithmetic() {
    Table t;
    integers<s16>(t, "s16"), integers<s32>(t, "s32"), integers<s64>(t, "s64");
    integers<u16>(t, "u16"), integers<u32>(t, "u32"), integers<u64>(t, "u64");
    bits<u16>(t, "16"), bits<u32>(t, "32"), bits<u64>(t, "64");
    floats<float>(t, "f32"), floats<double>(t, "f64");
    halves<bf16, to_bf16>(t, "bf16"), halves<f16, to_f16>(t, "f16");
    packed_integers<s16>(t, "s16x2"), packed_integers<u16>(t, "u16x2");
    packed<float, u64>(t, "add.rn.f32x2", [](float a, float b, float) { return a + b; });
    packed<float, u64>(t, "add.f32x2", [](float a, float b, float) { return a + b; });
    packed<float, u64>(t, "sub.f32x2", [](float a, float b, float) { return a - b; });
    packed<float, u64>(t, "mul.f32x2", [](float a, float b, float) { return a * b; });
    packed<float, u64>(t, "mul.rn.f32x2", [](float a, float b, float) { return a * b; });
    packed<float, u64>(t, "fma.rn.f32x2", [](float a, float b, float c) { return std::fma(a, b, c); });

    conversions<int8_t>(t, "s8"), conversions<uint8_t>(t, "u8"), conversions<s16>(t, "s16");
    conversions<u16>(t, "u16"), conversions<s32>(t, "s32"), conversions<u32>(t, "u32"), conversions<s64>(t, "s64");
    conversions<u64>(t, "u64"), conversions<bf16>(t, "bf16"), conversions<f16>(t, "f16");
    conversions<float>(t, "f32"), conversions<double>(t, "f64");
    unary<u64>(t, "cvta.to.global.u64", [](u64 a) { return a; });
    unary<u64>(t, "cvta.global.u64", [](u64 a) { return a; });

    const auto least = [](float a, float b, float c) { return extreme<false, false>(extreme<false, false>(a, b), c); };
    const auto most = [](float a, float b, float c) { return extreme<true, false>(extreme<true, false>(a, b), c); };
    ternary<float>(t, "min3.f32", least), ternary<float>(t, "max3.f32", most);  // of three operands
    ternary<float>(t, "min3.NaN.f32", [](float a, float b, float c) {
        return extreme<false, true>(extreme<false, true>(a, b), c);
    });
    ternary<float>(t, "max3.NaN.f32", [](float a, float b, float c) {
        return extreme<true, true>(extreme<true, true>(a, b), c);
    });
    binary<float>(t, "min.NaN.f32", [](float a, float b) { return extreme<false, true>(a, b); });
    binary<float>(t, "max.NaN.f32", [](float a, float b) { return extreme<true, true>(a, b); });
    unary<float>(t, "abs.ftz.f32", [](float a) { return flush(std::abs(a)); });
    unary<float>(t, "neg.ftz.f32", [](float a) { return flush(-a); });
    for (const char* rn : {".", ".rn."}) {
        const std::string type = std::string(rn) + "ftz.f32";
        binary<float>(t, "add" + type, [](float a, float b) { return flush(flush(a) + flush(b)); });
        binary<float>(t, "sub" + type, [](float a, float b) { return flush(flush(a) - flush(b)); });
        binary<float>(t, "mul" + type, [](float a, float b) { return flush(flush(a) * flush(b)); });
    }
    ternary<float>(t, "fma.rn.ftz.f32", [](float a, float b, float c) {
        return flush(std::fma(flush(a), flush(b), flush(c)));
    });
    ternary<float>(t, "fma.rm.f32", [](float a, float b, float c) {  // rounded toward -inf
        const float r = std::fma(a, b, c);
        const double product = double(a) * b, sum = sum_to_odd(product, c);
        if (sum == 0) return std::signbit(product) || std::signbit(c) ? -0.0f : 0.0f;
        return double(r) > sum ? std::nextafterf(r, -INFINITY) : r;
    });

    quotient<true, false>(t, "div.full.f32"), quotient<true, true>(t, "div.full.ftz.f32");
    quotient<false, false>(t, "div.approx.f32"), quotient<false, true>(t, "div.approx.ftz.f32");
    approximate<0x1p-22>(t, "ex2.approx", [](double a) { return std::exp2(a); });
    approximate<0x1p-22, true>(t, "lg2.approx", [](double a) { return std::log2(a); });
    approximate<0x1p-23>(t, "rcp.approx", [](double a) { return 1 / a; });
    approximate<0x1p-23>(t, "sqrt.approx", [](double a) { return std::sqrt(a); });
    approximate<0x1p-22>(t, "rsqrt.approx", [](double a) { return 1 / std::sqrt(a); });
    approximate<0x1p-11>(t, "tanh.approx", [](double a) { return std::tanh(a); });
    upper_half(t, "rcp.approx.ftz.f64", [](double a) { return 1 / a; });
    upper_half(t, "rsqrt.approx.ftz.f64", [](double a) { return 1 / std::sqrt(a); });
    unary<double>(t, "rsqrt.approx.f64", [](double a) { return 1 / std::sqrt(a); });

    predicates(t);
    ternary<u32>(t, "prmt.b32", [](u32 a, u32 b, u32 c) {  // each digit of c chooses a byte of a and b
        const u64 both = u64(b) << 32 | a;
        u32 r = 0;
        for (int k = 0; k < 4; ++k) {
            const u32 digit = c >> 4 * k & 15, byte = u32(both >> 8 * (digit & 7) & 255);
            r |= (digit & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * k;
        }
        return r;
    });
    define(t, "lop3.b32", {4, 4, 4, 4, CONSTANT}, [](Warp& w, const Instruction& i) {
        const u32 *a = w.in<u32>(i.op[1]), *b = w.in<u32>(i.op[2]), *c = w.in<u32>(i.op[3]), *f = w.in<u32>(i.op[4]);
        w.out<u32>(i.op[0], [&](int l) {
            u32 r = 0;
            for (int k = 0; k < 8; ++k)
                if (f[l] >> k & 1) r |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
            return r;
        });
    });
    ternary<u32>(t, "shf.l.wrap.b32", [](u32 a, u32 b, u32 n) { return u32((u64(b) << 32 | a) << (n & 31) >> 32); });
    ternary<u32>(t, "shf.r.wrap.b32", [](u32 a, u32 b, u32 n) { return u32((u64(b) << 32 | a) >> (n & 31)); });
    ternary<u32>(t, "shf.l.clamp.b32", [](u32 a, u32 b, u32 n) {
        return u32((u64(b) << 32 | a) << std::min(n, 32u) >> 32);
    });
    ternary<u32>(t, "shf.r.clamp.b32", [](u32 a, u32 b, u32 n) {
        return u32((u64(b) << 32 | a) >> std::min(n, 32u));
    });
    ternary<u32>(t, "dp4a.u32.u32", [](u32 a, u32 b, u32 c) {
        for (int k = 0; k < 32; k += 8) c += (a >> k & 255) * (b >> k & 255);
        return c;
    });
    return t;
}

}  // namespace executed
