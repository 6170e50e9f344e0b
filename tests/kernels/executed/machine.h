// Warps of 32 lanes share a program and, within a block, shared memory.
//
// A register is an array of 32 numbers, one for each lane, so that g++ vectorizes an instruction's loop over lanes. The
// lanes of a diverged warp form parts. The part that is furthest behind in the program runs, so that parts meet again.
// An instruction that needs lanes of another part waits for that part.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace executed {

constexpr int LANES = 32;
using Mask = uint32_t;
constexpr Mask ALL = ~Mask(0);
constexpr int CONSTANT = 99;  // marks a constant among the widths

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

// Kinds of instructions. All but `plain` may change which lanes run next: a branch, an end, a barrier, a wait for
// lanes.
enum class Kind { plain, branch, end, barrier, converged };

enum class Space { global, shared, param, local };

struct Instruction {
    Handler run = nullptr;
    Kind kind = Kind::plain;
    std::string text;  // the PTX source, for reports
    int predicate = -1;
    bool negated = false;
    std::vector<int> op;          // operands: numbers of registers; below 0: of constants
    std::vector<int64_t> number;  // offsets of addresses, targets of branches
    std::vector<int> widths;      // bytes of each operand; 0: a predicate; -n: n or more; CONSTANT
    bool aligned = false;         // all lanes take part; else the last operand is their mask
    // Fields of memory accesses:
    Space space = Space::global;
    int count = 1, bytes = 0;  // how many elements, and the bytes of each
    bool is_signed = false, strong = false, acquire = false, release = false, coherent = true;
    int variant = 0;  // a number from the opcode, with a meaning for each handler
};

struct alignas(64) Register {
    uint8_t bytes[LANES * 8];
};

// A constant, readable at each operand width.
struct alignas(64) Constant {
    uint64_t wide[LANES];
    uint32_t word[LANES];
    uint16_t half[LANES];
    uint8_t byte[LANES];
};

struct Program {
    std::vector<Instruction> code;
    std::vector<uint8_t> width;  // bytes of each register; 0: a predicate
    std::vector<Constant> constants;
    int shared_bytes = 0, local_bytes = 0, shared_grain = 8;
};

// Which writes of a block are visible to a warp: all before tick `all`, and those of single warps up to a later tick.
struct Seen {
    uint32_t all = 0;
    std::map<int, uint32_t> of_warp;
};
using View = std::map<int, Seen>;  // by the writing block's number

inline void join(View& view, const View& other) {
    for (const auto& [block, seen] : other) {
        Seen& mine = view[block];
        mine.all = std::max(mine.all, seen.all);
        for (auto [warp, tick] : seen.of_warp) mine.of_warp[warp] = std::max(mine.of_warp[warp], tick);
    }
}

struct Launch {
    int grid[3], threads[3];
    int shared_bytes;
    const uint8_t* params;
    const int64_t* blocks;  // linear block numbers, in the order of their start
    int64_t block_count;
    uint64_t seed;       // selects the schedule; 0: blocks and warps run one after another
    int bias;            // -1, 0, 1: results of approximations are moved down, exact, moved up
    uint32_t garbage;    // the initial content of registers and shared memory
    int64_t most_steps;  // limit of instructions for the whole launch
};

struct Memory;
struct Block;

// The lanes of a warp that are at one place of the program.
struct Part {
    Mask lanes;
    int pc;
    bool waiting = false;
};

// cp.async and wgmma take effect at their wait, the latest time that the hardware may choose.
struct Deferred {
    const Instruction* instruction;
    Mask mask;
    Register operand[3];
};

struct Groups {
    std::vector<std::vector<Deferred>> committed;  // the oldest first
    std::vector<Deferred> open;
};

struct Warp {
    Block* block = nullptr;
    int number = 0;
    Mask live = 0;
    std::vector<Part> parts;  // the last of these runs
    bool at_barrier = false;
    std::vector<Register> registers;
    std::vector<uint8_t> local;
    View view, acquired, released;  // acquired: read by strong reads; released: published by the last fence
    bool has_fenced = false;
    uint32_t proxy_fence = 0, proxy_barrier = 0;  // ticks of the last fence.proxy.async and of the barrier before it
    Groups groups[2];  // [0]: of cp.async; [1]: of wgmma
    Mask mask = 0;  // lanes that run the current instruction

    template <class T>
    const T* in(int op) const {
        if (op >= 0) return reinterpret_cast<const T*>(registers[op].bytes);
        const Constant& c = program().constants[~op];
        if constexpr (sizeof(T) == 8) return reinterpret_cast<const T*>(c.wide);
        if constexpr (sizeof(T) == 4) return reinterpret_cast<const T*>(c.word);
        if constexpr (sizeof(T) == 2) return reinterpret_cast<const T*>(c.half);
        return reinterpret_cast<const T*>(c.byte);
    }

    // Writes f(lane) for the running lanes. f reads a lane before it is written, so a register may be operand and
    // result.
    template <class T, class F>
    void out(int op, F f) {
        T* d = reinterpret_cast<T*>(registers[op].bytes);
        if (mask == ALL) {
#pragma GCC ivdep
            for (int l = 0; l < LANES; ++l) d[l] = f(l);
        } else {
            for (int l = 0; l < LANES; ++l)
                if (mask >> l & 1) d[l] = f(l);
        }
    }

    Mask predicate(int op) const { return op >= 0 ? *in<Mask>(op) : *in<uint64_t>(op) ? ALL : 0; }
    void set_predicate(int op, Mask value) {
        Mask& p = *reinterpret_cast<Mask*>(registers[op].bytes);
        p = (p & ~mask) | (value & mask);
    }

    // Returns the lane whose turn is at this count: 31 - lane if the seed is odd. Lanes may reach an address in any
    // order.
    int turn(int lane) const;

    // Read and write a register of any width as 64 bits.
    uint64_t wide(int op, int lane) const {
        switch (op < 0 ? 8 : program().width[op]) {
            case 8: return in<uint64_t>(op)[lane];
            case 4: return in<uint32_t>(op)[lane];
            case 2: return in<uint16_t>(op)[lane];
            default: throw std::runtime_error("a predicate is no number");
        }
    }
    void set_wide(int op, int lane, uint64_t value) {
        uint8_t* d = registers[op].bytes;
        switch (program().width[op]) {
            case 8: std::memcpy(d + lane * 8, &value, 8); break;
            case 4: std::memcpy(d + lane * 4, &value, 4); break;
            case 2: std::memcpy(d + lane * 2, &value, 2); break;
            default: throw std::runtime_error("a predicate is no number");
        }
    }

    const Program& program() const;
    void fault(const char* kind, const Instruction& i, const std::string& detail);
    void fence();
    View publication() const;
};

struct Block {
    const Program* program;
    Memory* memory;
    const Launch* launch;
    int number;        // linear index in the grid
    uint32_t tick = 1;  // counts barriers and fences
    uint32_t last_barrier = 0;
    uint32_t voted = 0;  // bar.red.or: not 0 once a thread with a true predicate has arrived
    std::vector<Warp> warps;
    std::vector<uint8_t> shared;
    std::vector<uint64_t> shared_writes, shared_reads;  // a stamp (last access) for each shared_grain bytes

    void begin(int linear);
    bool run(Warp& warp, int64_t quantum, int64_t& steps);  // false: the warp could not run
    bool done() const;

   private:
    void select(Warp& warp);
    bool release_barrier();
};

inline const Program& Warp::program() const { return *block->program; }
inline int Warp::turn(int lane) const { return block->launch->seed & 1 ? LANES - 1 - lane : lane; }

}  // namespace executed
