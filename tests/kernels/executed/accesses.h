// Handlers of the instructions that reach memory or other lanes: loads, stores, atomics, fences, shuffles, votes,
// matrices. A comment "ops: ..." before a handler lists the instruction's operands in order.
#pragma once
#include "arithmetic.h"
#include "memory.h"

namespace executed {

inline uint64_t address(const Warp& w, const Instruction& i, int op, int lane, int k = 0) {
    return w.wide(i.op[op], lane) + i.number[k];
}

// Records the writes that a later acquire at this address makes visible.
inline void publish(Warp& w, const Instruction& i, uint64_t at, bool replaces) {
    if (i.space != Space::global || !i.strong) return;
    View view;
    if (i.release) view = w.publication();
    else if (w.has_fenced) view = w.released;
    View& published = w.block->memory->published[at];
    if (replaces) published = view;  // else an atomic: earlier releases there remain visible
    else join(published, view);
}

inline void observe(Warp& w, const Instruction& i, uint64_t at) {
    if (i.space != Space::global || !i.strong) return;
    const auto& published = w.block->memory->published;
    const auto found = published.find(at);
    if (found == published.end()) return;
    join(w.acquired, found->second);
    if (i.acquire) join(w.view, found->second);
}

// ops: registers, address
inline void load(Warp& w, const Instruction& i) {
    const int base = i.count, bytes = i.count * i.bytes;
    for (int l = 0; l < LANES; ++l) {
        if (!(w.mask >> l & 1)) continue;
        const uint64_t at = address(w, i, base, l);
        observe(w, i, at);
        uint8_t garbage[64];
        std::memset(garbage, 0x7f, sizeof garbage);
        const uint8_t* source = bytes_at(w, i, l, at, bytes, true, false);
        if (!source) source = garbage;
        for (int k = 0; k < i.count; ++k) {
            uint64_t x = 0;
            std::memcpy(&x, source + k * i.bytes, i.bytes);
            if (i.is_signed && i.bytes < 8) x = uint64_t(int64_t(x << (64 - 8 * i.bytes)) >> (64 - 8 * i.bytes));
            w.set_wide(i.op[k], l, x);
        }
    }
}

// ops: address, registers
inline void store(Warp& w, const Instruction& i) {
    for (int n = 0; n < LANES; ++n) {
        const int l = w.turn(n);
        if (!(w.mask >> l & 1)) continue;
        const uint64_t at = address(w, i, 0, l);
        publish(w, i, at, true);
        uint8_t data[64];
        for (int k = 0; k < i.count; ++k) {
            const uint64_t x = w.wide(i.op[1 + k], l);
            std::memcpy(data + k * i.bytes, &x, i.bytes);
        }
        uint8_t* target = bytes_at(w, i, l, at, i.count * i.bytes, false, true, data);
        if (target) std::memcpy(target, data, i.count * i.bytes);
    }
}

enum class Atomic { add, max, min, exch, cas, bit_and, bit_or };

template <class T>
T combined(Atomic how, T old, T a, T b) {
    switch (how) {
        case Atomic::add: return T(old + a);
        case Atomic::max: return std::max(old, a);
        case Atomic::min: return std::min(old, a);
        case Atomic::exch: return a;
        case Atomic::cas: return old == a ? b : old;
        case Atomic::bit_and: return old & a;
        case Atomic::bit_or: return old | a;
    }
    return old;
}

// ops: old value, address, operands
inline void atomic(Warp& w, const Instruction& i) {
    for (int n = 0; n < LANES; ++n) {
        const int l = w.turn(n);
        if (!(w.mask >> l & 1)) continue;
        const uint64_t at = address(w, i, 1, l);
        observe(w, i, at);
        uint8_t* target = bytes_at(w, i, l, at, i.bytes, true, true);
        if (!target) continue;
        uint64_t old = 0, a = w.wide(i.op[2], l), b = i.op.size() > 3 ? w.wide(i.op[3], l) : 0;
        std::memcpy(&old, target, i.bytes);
        const Atomic how = Atomic(i.variant);
        uint64_t value;
        if (i.bytes == 4 && i.is_signed) value = uint32_t(combined<int32_t>(how, int32_t(old), int32_t(a), int32_t(b)));
        else if (i.bytes == 4) value = combined<uint32_t>(how, uint32_t(old), uint32_t(a), uint32_t(b));
        else if (i.is_signed) value = uint64_t(combined<int64_t>(how, int64_t(old), int64_t(a), int64_t(b)));
        else value = combined<uint64_t>(how, old, a, b);
        std::memcpy(target, &value, i.bytes);
        publish(w, i, at, false);
        w.set_wide(i.op[0], l, old);
    }
}

// mov with a list: packs the parts into a register, or unpacks a register into parts
inline void pack(Warp& w, const Instruction& i) {
    const int parts = int(i.op.size()) - 1, width = i.bytes * 8 / parts;
    uint64_t x[LANES] = {};
    for (int k = 0; k < parts; ++k)
        for (int l = 0; l < LANES; ++l)
            x[l] |= (w.wide(i.op[1 + k], l) & ((uint64_t(1) << width) - 1)) << k * width;
    for (int l = 0; l < LANES; ++l)
        if (w.mask >> l & 1) w.set_wide(i.op[0], l, x[l]);
}

inline void unpack(Warp& w, const Instruction& i) {
    const int parts = int(i.op.size()) - 1, width = i.bytes * 8 / parts;
    uint64_t x[LANES];
    for (int l = 0; l < LANES; ++l) x[l] = w.wide(i.op[parts], l);
    for (int k = 0; k < parts; ++k)
        for (int l = 0; l < LANES; ++l)
            if (w.mask >> l & 1) w.set_wide(i.op[k], l, x[l] >> k * width & ((uint64_t(1) << width) - 1));
}

// ---- lanes

// ops: result, predicate (true if the source lane is in range), value, lane or distance, clamp, member mask
inline void shuffle(Warp& w, const Instruction& i) {
    const Register value = i.op[2] >= 0 ? w.registers[i.op[2]] : Register{};
    const uint32_t *of = i.op[2] >= 0 ? reinterpret_cast<const uint32_t*>(value.bytes) : w.in<uint32_t>(i.op[2]);
    const uint32_t *b = w.in<uint32_t>(i.op[3]), *c = w.in<uint32_t>(i.op[4]);
    Mask valid = 0;
    uint32_t result[LANES];
    for (int l = 0; l < LANES; ++l) {
        const int clamp = c[l] & 31, segment = c[l] >> 8 & 31, n = b[l] & 31;
        const int high = (l & segment) | (clamp & ~segment), low = l & segment;
        int from = l;
        bool inside = false;
        switch (i.variant) {
            case 'u': from = l - n, inside = from >= high; break;
            case 'd': from = l + n, inside = from <= high; break;
            case 'b': from = l ^ n, inside = from <= high; break;
            case 'i': from = low | (n & ~segment), inside = from <= high; break;
        }
        if (!inside) from = l;
        valid |= Mask(inside) << l;
        // A source lane that does not take part gives garbage.
        result[l] = w.mask >> from & 1 ? of[from] : w.block->launch->garbage;
    }
    w.out<uint32_t>(i.op[0], [&](int l) { return result[l]; });
    w.set_predicate(i.op[1], valid);
}

inline void vote(Warp& w, const Instruction& i) {
    const Mask p = w.predicate(i.op[1]) & w.mask;
    switch (i.variant) {
        case 'b': return w.out<uint32_t>(i.op[0], [&](int) { return p; });
        case 'a': return w.set_predicate(i.op[0], p == w.mask ? ALL : 0);
        case 'o': return w.set_predicate(i.op[0], p ? ALL : 0);
    }
}

template <class T, class F>
void redux(Table& t, const std::string& name, F) {
    const Handler run = [](Warp& w, const Instruction& i) {
        const T* a = w.in<T>(i.op[1]);
        T result = 0;
        bool first = true;
        for (int l = 0; l < LANES; ++l)
            if (w.mask >> l & 1) result = first ? a[l] : F{}(result, a[l]), first = false;
        w.out<T>(i.op[0], [&](int) { return result; });
    };
    define(t, "redux.sync." + name, {4, 4, 4}, run).kind = Kind::converged;
}

// ---- asynchronous copies, and matrices

inline void copy_now(Warp& w, const Deferred& d) {
    const Instruction& i = *d.instruction;
    const auto* to = reinterpret_cast<const uint64_t*>(d.operand[0].bytes);
    const auto* from = reinterpret_cast<const uint64_t*>(d.operand[1].bytes);
    const auto* size = reinterpret_cast<const uint64_t*>(d.operand[2].bytes);
    for (int l = 0; l < LANES; ++l) {
        if (!(d.mask >> l & 1)) continue;
        uint8_t data[16] = {};  // the rest becomes 0
        const uint8_t* source = size[l] ? global_bytes(w, i, from[l], int(size[l]), true, false) : nullptr;
        if (source) std::memcpy(data, source, size[l]);
        uint8_t* target = shared_bytes(w, i, to[l], i.bytes, true, data);
        if (target) std::memcpy(target, data, i.bytes);
    }
}

// ops: address in shared memory, address in global memory, bytes written, bytes read (the rest is 0)
inline void copy_later(Warp& w, const Instruction& i) {
    Deferred d{&i, w.mask, {}};
    auto* to = reinterpret_cast<uint64_t*>(d.operand[0].bytes);
    auto* from = reinterpret_cast<uint64_t*>(d.operand[1].bytes);
    auto* size = reinterpret_cast<uint64_t*>(d.operand[2].bytes);
    for (int l = 0; l < LANES; ++l) {
        if (!(w.mask >> l & 1)) continue;
        to[l] = address(w, i, 0, l, 0), from[l] = address(w, i, 1, l, 1);
        size[l] = uint32_t(w.wide(i.op[i.op.size() > 3 ? 3 : 2], l));
        shared_bytes(w, i, to[l], i.bytes, true);  // may be written from now on
    }
    w.groups[0].open.push_back(d);
}

inline void multiply_now(Warp& w, const Deferred& d);

// Ends all groups of copies or products but the newest `left`.
inline void wait_for_groups(Warp& w, Groups& groups, size_t left) {
    while (groups.committed.size() > left) {
        for (const Deferred& d : groups.committed.front())
            d.instruction->bytes ? copy_now(w, d) : multiply_now(w, d);
        groups.committed.erase(groups.committed.begin());
    }
}

inline void commit(Warp& w, const Instruction& i) {
    Groups& groups = w.groups[i.variant];
    groups.committed.push_back(std::move(groups.open));
    groups.open.clear();
}

inline float half_number(uint16_t x, bool is_bf16) { return is_bf16 ? number(bf16{x}) : number(f16{x}); }

// wgmma: warp w has rows 16 w to 16 w + 15 of D. An operand in shared memory is described by an address, two strides
// and its swizzle (PTX ISA, "Matrix Descriptor").
struct Described {
    uint64_t bits;
    bool transposed;  // the rows are contiguous, else the summed dim

    uint64_t element(int row, int k) const {
        const uint64_t start = (bits & 0x3fff) << 4, leading = (bits >> 16 & 0x3fff) << 4,
                       stride = (bits >> 32 & 0x3fff) << 4, mode = bits >> 62;
        const int pitch = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
        const int along = transposed ? row : k, across = transposed ? k : row, wide = pitch / 2;
        uint64_t at = start + uint64_t(along % wide * 2) + uint64_t(across % 8) * pitch;
        // A transposed matrix without a swizzle has its two strides in the opposite order.
        at += transposed && mode == 0 ? uint64_t(along / wide) * stride + uint64_t(across / 8) * leading
                                      : uint64_t(along / wide) * leading + uint64_t(across / 8) * stride;
        return at ^ ((at >> 7 & (pitch / 16 - 1)) << 4);
    }
};

inline float described_number(Warp& w, const Instruction& i, const Described& m, int row, int k) {
    const uint64_t at = m.element(row, k);
    const uint8_t* source = shared_bytes(w, i, at, 2, false);
    if (!source) return 0;
    const Stamp write{w.block->shared_writes[at / w.block->program->shared_grain]};
    // The asynchronous proxy sees a write only if the writing warp has fenced after it, or this warp has fenced after a
    // barrier that follows the write.
    if (write.bits && write.tick() >= w.block->warps[write.warp()].proxy_fence && write.tick() >= w.proxy_barrier)
        w.fault("reads what no fence.proxy.async has published", i, hex(at));
    uint16_t x;
    std::memcpy(&x, source, 2);
    return half_number(x, i.variant & 1);
}

struct Factors {
    float x[16 * 16], y[16 * 256];
};

// ops: n / 2 registers of D; A (a descriptor or four registers); B (a descriptor); a predicate, true to add to D; the
// signs of A and B; flags, true if A and B are transposed (B's flag alone if A is in registers). count: n
inline void read_factors(Warp& w, const Deferred& d, Factors& factors) {
    const Instruction& i = *d.instruction;
    const int n = i.count, results = n / 2;
    const bool a_in_registers = i.variant & 2;
    auto& [x, y] = factors;
    const auto immediate = [&](int from_end) { return w.wide(i.op[i.op.size() - from_end], 0) != 0; };
    const Described a{reinterpret_cast<const uint64_t*>(d.operand[0].bytes)[0], immediate(2)};
    const Described b{reinterpret_cast<const uint64_t*>(d.operand[1].bytes)[0], immediate(1)};
    for (int r = 0; r < 16; ++r)
        for (int k = 0; k < 16; ++k) {
            if (a_in_registers) {
                const int lane = r % 8 * 4 + k % 8 / 2, place = k / 8 * 2 + r / 8;
                const uint32_t pair = w.in<uint32_t>(i.op[results + place])[lane];
                x[r * 16 + k] = half_number(uint16_t(pair >> 16 * (k % 2)), i.variant & 1);
            } else {
                x[r * 16 + k] = described_number(w, i, a, w.number % 4 * 16 + r, k);
            }
        }
    for (int c = 0; c < n; ++c)
        for (int k = 0; k < 16; ++k) y[k * n + c] = described_number(w, i, b, c, k);
}

inline void multiply_now(Warp& w, const Deferred& d) {
    const Instruction& i = *d.instruction;
    const int n = i.count, signs = n / 2 + (i.variant & 2 ? 6 : 3);
    const int sign = int(w.wide(i.op[signs], 0)) * int(w.wide(i.op[signs + 1], 0));
    const bool added = reinterpret_cast<const uint64_t*>(d.operand[2].bytes)[0];
    Factors factors;
    read_factors(w, d, factors);
    const auto& [x, y] = factors;
    for (int r = 0; r < 16; ++r)
        for (int c = 0; c < n; ++c) {
            double sum = 0;
            for (int k = 0; k < 16; ++k) sum += double(x[r * 16 + k]) * y[k * n + c];
            const int lane = r % 8 * 4 + c % 8 / 2, place = c / 8 * 4 + r / 8 * 2 + c % 2;
            float* result = reinterpret_cast<float*>(w.registers[i.op[place]].bytes) + lane;
            *result = float((added ? double(*result) : 0.0) + sign * sum);
        }
}

inline void multiply_later(Warp& w, const Instruction& i) {
    const int results = i.count / 2;
    Deferred d{&i, w.mask, {}};
    const auto keep = [&](int k, uint64_t x) { reinterpret_cast<uint64_t*>(d.operand[k].bytes)[0] = x; };
    const bool a_in_registers = i.variant & 2;
    if (!a_in_registers) keep(0, w.wide(i.op[results], 0));
    const int b = results + (a_in_registers ? 4 : 1);
    keep(1, w.wide(i.op[b], 0)), keep(2, w.predicate(i.op[b + 1]) != 0);
    Factors factors;
    read_factors(w, d, factors);  // may be read from now on, so the factors must be there
    w.groups[1].open.push_back(d);
}

// mma.m16n8k16; ops: four registers of D, four of A, two of B, four of C
inline void multiply(Warp& w, const Instruction& i) {
    float a[16][16], b[16][8], result[4][LANES];
    for (int l = 0; l < LANES; ++l)
        for (int place = 0; place < 4; ++place)
            for (int h = 0; h < 2; ++h) {
                const int row = l / 4 + place % 2 * 8, k = l % 4 * 2 + place / 2 * 8 + h;
                a[row][k] = half_number(uint16_t(w.in<uint32_t>(i.op[4 + place])[l] >> 16 * h), i.variant & 1);
                if (place < 2) {
                    const int depth = l % 4 * 2 + place * 8 + h;
                    const uint32_t pair = w.in<uint32_t>(i.op[8 + place])[l];
                    b[depth][l / 4] = half_number(uint16_t(pair >> 16 * h), i.variant & 1);
                }
            }
    for (int l = 0; l < LANES; ++l)
        for (int place = 0; place < 4; ++place) {
            const int row = l / 4 + place / 2 * 8, column = l % 4 * 2 + place % 2;
            double sum = w.in<float>(i.op[10 + place])[l];
            for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
            result[place][l] = float(sum);
        }
    for (int place = 0; place < 4; ++place) w.out<float>(i.op[place], [&](int l) { return result[place][l]; });
}

// ldmatrix, stmatrix of `count` 8 x 8 matrices of 16-bit numbers. Lanes 8 k to 8 k + 7 hold matrix k's row addresses.
template <bool stores>
void matrix(Warp& w, const Instruction& i) {
    const int base = stores ? 0 : i.count, first = stores ? 1 : 0;
    const bool transposed = i.variant & 1;
    Register registers[4];
    for (int k = 0; k < i.count; ++k) registers[k] = w.registers[i.op[first + k]];
    for (int k = 0; k < i.count; ++k)
        for (int row = 0; row < 8; ++row) {
            const auto half = [&](int column) {
                const int r = transposed ? column : row, c = transposed ? row : column;
                return registers[k].bytes + (r * 4 + c / 2) * 4 + c % 2 * 2;
            };
            uint8_t data[16];
            for (int column = 0; column < 8; ++column) std::memcpy(data + 2 * column, half(column), 2);
            const uint64_t at = address(w, i, base, 8 * k + row);
            uint8_t* line = shared_bytes(w, i, at, 16, stores, stores ? data : nullptr);
            if (line && stores) std::memcpy(line, data, 16);
            for (int column = 0; line && !stores && column < 8; ++column)
                std::memcpy(half(column), line + 2 * column, 2);
        }
    if (!stores)
        for (int k = 0; k < i.count; ++k) w.registers[i.op[k]] = registers[k];
}

}  // namespace executed
