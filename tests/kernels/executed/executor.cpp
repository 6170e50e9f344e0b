// Executes programs, which ptx.py translates from PTX, on blocks of warps; and has the functions that Python calls.
#include <memory>
#include <random>
#include <sstream>

#include "accesses.h"

namespace executed {

void Warp::fault(const char* kind, const Instruction& i, const std::string& detail) {
    block->memory->fault(kind, i.text, "block " + std::to_string(block->number) + ", warp " + std::to_string(number) +
                                           ": " + detail);
}

// Returns the writes that a release publishes now: those that this warp sees, those of its block before the block's
// last barrier, and this warp's own.
View Warp::publication() const {
    View result = view;
    Seen& mine = result[block->number];
    mine.all = std::max(mine.all, block->last_barrier);
    mine.of_warp[number] = ++block->tick;
    return result;
}

void Warp::fence() {
    join(view, acquired);
    released = publication();
    has_fenced = true;
}

// ---- opcodes

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts(1);
    for (const char c : text) c == at ? void(parts.emplace_back()) : parts.back().push_back(c);
    return parts;
}

[[noreturn]] void unknown(const std::string& opcode) { throw std::runtime_error("unknown instruction " + opcode); }

// Parses the opcode of ld, st, atom, red or cp.async: address space, width and memory order.
Instruction access(const std::string& opcode) {
    static const std::map<std::string, int> ATOMICS = {
        {"add", int(Atomic::add)}, {"max", int(Atomic::max)}, {"min", int(Atomic::min)}, {"exch", int(Atomic::exch)},
        {"cas", int(Atomic::cas)}, {"and", int(Atomic::bit_and)}, {"or", int(Atomic::bit_or)}};
    const auto words = split(opcode, '.');
    Instruction i;
    const bool is_atomic = words[0] == "atom";
    i.strong = is_atomic;
    for (size_t k = 1; k < words.size(); ++k) {
        const std::string& word = words[k];
        if (word == "global") i.space = Space::global;
        else if (word == "shared" || word == "shared::cta") i.space = Space::shared;
        else if (word == "param") i.space = Space::param;
        else if (word == "local") i.space = Space::local;
        else if (word == "v2" || word == "v4" || word == "v8") i.count = word[1] - '0';
        else if (word == "relaxed" || word == "volatile") i.strong = true;
        else if (word == "acquire") i.strong = i.acquire = true;
        else if (word == "release") i.strong = i.release = true;
        else if (word == "acq_rel") i.strong = i.acquire = i.release = true;
        else if (word == "nc") i.coherent = false;
        else if (is_atomic && ATOMICS.count(word)) i.variant = ATOMICS.at(word);
        else if (std::string("usbf").find(word[0]) != std::string::npos && word.size() > 1 &&
                 word.find_first_not_of("0123456789", 1) == std::string::npos)
            i.bytes = std::stoi(word.substr(1)) / 8, i.is_signed = word[0] == 's';
        // Ignored words: cache hints, and scopes that include other blocks (safeops needs no smaller scope).
        else if (word == "ca" || word == "cg" || word == "cs" || word == "lu" || word == "cv" || word == "wb" ||
                 word == "wt" || word == "gpu" || word == "sys" || word.rfind("L1::", 0) == 0 ||
                 word.rfind("L2::", 0) == 0) {}
        else unknown(opcode);
    }
    if (!i.bytes || (is_atomic && (opcode.find(".f") != std::string::npos || i.bytes < 4))) unknown(opcode);
    i.run = is_atomic ? atomic : words[0] == "ld" ? load : store;
    // A register may be wider than the number loaded or stored. The result of an atomic may be `_`.
    i.widths.assign(is_atomic ? 1 : i.count, -i.bytes);
    i.widths.insert(words[0] == "st" ? i.widths.begin() : i.widths.end(), i.space == Space::global ? 8 : -4);
    if (is_atomic) i.widths.insert(i.widths.end(), i.variant == int(Atomic::cas) ? 2 : 1, i.bytes);
    return i;
}

Table instructions() {
    Table t = arithmetic();
    const auto add = [&](const std::string& name, Kind kind, std::vector<int> widths, Handler run, int variant = 0) {
        Instruction& i = define(t, name, std::move(widths), run);
        i.kind = kind, i.variant = variant;
    };
    const auto of = [](int count, int width, const std::vector<int>& more = {}) {
        std::vector<int> widths(count, width);
        for (const int x : more) widths.push_back(x);
        return widths;
    };
    const Handler nothing = [](Warp&, const Instruction&) {};
    const Handler fence = [](Warp& w, const Instruction&) { w.fence(); };
    add("bra", Kind::branch, {}, nothing), add("bra.uni", Kind::branch, {}, nothing);
    add("ret", Kind::end, {}, nothing), add("exit", Kind::end, {}, nothing);
    add("bar.sync", Kind::barrier, {CONSTANT}, nothing), add("barrier.sync", Kind::barrier, {CONSTANT}, nothing);
    add("bar.red.or.pred", Kind::barrier, {0, CONSTANT, 0}, [](Warp& w, const Instruction& i) {
        w.mask = ALL, w.set_predicate(i.op[0], w.block->voted ? ALL : 0);
    });
    add("bar.warp.sync", Kind::converged, {4}, nothing);
    for (int bytes : {4, 8})
        for (int parts = 2; parts <= bytes / 2; parts *= 2) {
            const std::string type = std::to_string(parts) + ".b" + std::to_string(8 * bytes);
            add("pack" + type, Kind::plain, of(1, bytes, of(parts, bytes / parts)), pack);
            add("unpack" + type, Kind::plain, of(parts, -bytes / parts, {bytes}), unpack);  // a part may be _
            t["pack" + type].bytes = t["unpack" + type].bytes = bytes;
        }
    for (const char* name : {"membar.gl", "membar.sys", "fence.acq_rel.gpu", "fence.sc.gpu", "fence.acq_rel.sys"})
        add(name, Kind::plain, {}, fence);
    add("membar.cta", Kind::plain, {}, nothing), add("fence.acq_rel.cta", Kind::plain, {}, nothing);
    add("fence.proxy.async.shared::cta", Kind::plain, {}, [](Warp& w, const Instruction&) {
        w.proxy_fence = ++w.block->tick, w.proxy_barrier = w.block->last_barrier;
    });
    for (const char* how : {"up", "down", "bfly", "idx"})
        add(std::string("shfl.sync.") + how + ".b32", Kind::converged, {4, 0, 4, 4, 4, 4}, shuffle, how[0]);
    for (const char* name : {"vote.ballot.sync.b32", "vote.sync.ballot.b32"})
        add(name, Kind::converged, {4, 0, 4}, vote, 'b');
    add("vote.sync.any.pred", Kind::converged, {0, 0, 4}, vote, 'o');
    add("vote.sync.all.pred", Kind::converged, {0, 0, 4}, vote, 'a');
    redux<int32_t>(t, "add.s32", [](int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); });
    redux<uint32_t>(t, "add.u32", [](uint32_t a, uint32_t b) { return a + b; });
    redux<int32_t>(t, "min.s32", [](int32_t a, int32_t b) { return std::min(a, b); });
    redux<int32_t>(t, "max.s32", [](int32_t a, int32_t b) { return std::max(a, b); });
    redux<uint32_t>(t, "min.u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
    redux<uint32_t>(t, "max.u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
    redux<uint32_t>(t, "or.b32", [](uint32_t a, uint32_t b) { return a | b; });
    redux<uint32_t>(t, "and.b32", [](uint32_t a, uint32_t b) { return a & b; });
    redux<float>(t, "min.f32", [](float a, float b) { return extreme<false, false>(a, b); });
    redux<float>(t, "max.f32", [](float a, float b) { return extreme<true, false>(a, b); });
    redux<float>(t, "min.NaN.f32", [](float a, float b) { return extreme<false, true>(a, b); });
    redux<float>(t, "max.NaN.f32", [](float a, float b) { return extreme<true, true>(a, b); });
    for (int count : {1, 2, 4})
        for (const char* transposed : {"", ".trans"}) {
            const std::string rest = ".sync.aligned.m8n8.x" + std::to_string(count) + transposed + ".shared.b16";
            add("ldmatrix" + rest, Kind::converged, of(count, 4, {-4}), matrix<false>, *transposed != 0);
            add("stmatrix" + rest, Kind::converged, of(1, -4, of(count, 4)), matrix<true>, *transposed != 0);
            t["ldmatrix" + rest].count = t["stmatrix" + rest].count = count;
        }
    const Handler wait = [](Warp& w, const Instruction& i) {
        wait_for_groups(w, w.groups[i.variant], size_t(w.wide(i.op[0], 0)));
    };
    for (const char* name : {"cp.async.ca.shared.global", "cp.async.cg.shared.global"})
        add(name, Kind::plain, {-4, 8, CONSTANT, 4}, copy_later);
    add("cp.async.commit_group", Kind::plain, {}, commit), add("cp.async.wait_group", Kind::plain, {CONSTANT}, wait);
    add("cp.async.wait_all", Kind::plain, {}, [](Warp& w, const Instruction& i) {
        commit(w, i), wait_for_groups(w, w.groups[0], 0);
    });
    add("wgmma.fence.sync.aligned", Kind::converged, {}, nothing);
    add("wgmma.commit_group.sync.aligned", Kind::converged, {}, commit, 1);
    add("wgmma.wait_group.sync.aligned", Kind::converged, {CONSTANT}, wait, 1);
    for (const char* half : {"f16", "bf16"}) {
        const std::string types = std::string(".f32.") + half + "." + half;
        add("mma.sync.aligned.m16n8k16.row.col" + types + ".f32", Kind::converged, of(14, 4), multiply, half[0] == 'b');
        for (int n = 8; n <= 256; n += 8) {
            const std::string name = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + "k16" + types;
            const std::vector<int> numbers(4, CONSTANT);
            add(name, Kind::converged, of(n / 2, 4, of(2, 8, of(1, 0, numbers))), multiply_later, half[0] == 'b');
            t[name].count = n;
        }
    }
    return t;
}

const Instruction& lookup(const std::string& opcode) {
    static Table table = instructions();
    const auto found = table.find(opcode);
    if (found != table.end() && found->second.run) return found->second;
    const std::string family = opcode.substr(0, opcode.find('.'));
    if (family != "ld" && family != "st" && family != "atom") unknown(opcode);
    return table[opcode] = access(opcode);
}

// Checks each operand's width: a handler reads a register by its opcode's width, so another width is an error.
void require_widths(const Program& program, const Instruction& i, const std::string& opcode) {
    const size_t count = i.op.size();
    if (count != i.widths.size()) unknown(opcode + " with " + std::to_string(count) + " operands: " + i.text);
    for (size_t k = 0; k < count; ++k) {
        const int width = i.widths[k], actual = i.op[k] < 0 ? CONSTANT : program.width[i.op[k]];
        if (actual != CONSTANT && actual != width && !(width < 0 && actual >= -width))
            throw std::runtime_error("operand " + std::to_string(k) + " of " + i.text + " has " +
                                     std::to_string(8 * actual) + " bits");
    }
    if (i.predicate >= 0 && program.width[i.predicate]) throw std::runtime_error("no predicate guards " + i.text);
    // Only barrier 0, of all warps, is supported.
    if (i.kind == Kind::barrier && program.constants[~i.op[count / 2]].wide[0]) unknown(i.text);
}

// Parses a program. Each line is one instruction: opcode, predicate, negated, operands, numbers and source text,
// separated by tabs.
std::unique_ptr<Program> load_program(const char* text) {
    auto program = std::make_unique<Program>();
    const auto numbers = [](const std::string& list) {
        std::vector<int64_t> result;
        std::stringstream stream(list);
        for (std::string x; stream >> x;) result.push_back(std::stoll(x));
        return result;
    };
    int grain = 8;
    std::stringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        const auto field = split(line, '\t');
        if (field[0] == "widths") {
            for (int64_t x : numbers(field[1])) program->width.push_back(uint8_t(x));
        } else if (field[0] == "constants") {
            for (int64_t x : numbers(field[1])) {
                Constant& c = program->constants.emplace_back();
                for (int l = 0; l < LANES; ++l)
                    c.wide[l] = uint64_t(x), c.word[l] = uint32_t(x), c.half[l] = uint16_t(x), c.byte[l] = uint8_t(x);
            }
        } else if (field[0] == "memory") {
            const auto sizes = numbers(field[1]);
            program->shared_bytes = int(sizes[0]), program->local_bytes = int(sizes[1]);
        } else {
            Instruction i = lookup(field[0]);
            i.predicate = std::stoi(field[1]), i.negated = field[2] == "1";
            for (int64_t x : numbers(field[3])) i.op.push_back(int(x));
            i.number = numbers(field[4]), i.text = field[5];
            i.aligned = field[0].find("aligned") != std::string::npos;
            if (i.run == copy_later && i.op.size() == 3) i.widths.pop_back();
            if (i.run == multiply_later && i.op.size() > i.widths.size()) {  // A is four registers, no descriptor
                i.variant |= 2;
                i.widths.erase(i.widths.begin() + i.count / 2), i.widths.pop_back();
                i.widths.insert(i.widths.begin(), 4, 4);
            }
            require_widths(*program, i, field[0]);
            if (i.run == copy_later) i.bytes = int(program->constants[~i.op[2]].wide[0]);
            if ((i.space == Space::shared || i.run == copy_later) && i.bytes) grain = std::min(grain, i.bytes);
            program->code.push_back(std::move(i));
        }
    }
    program->shared_grain = grain;
    return program;
}

// ---- blocks and warps

// Registers 0 to 17, in the order of ptx.py's SPECIAL: %tid, %ntid, %ctaid and %nctaid, each in x, y, z; %laneid;
// masks.
void Block::begin(int linear) {
    number = linear;
    tick = 1, last_barrier = 0;
    const int threads = launch->threads[0] * launch->threads[1] * launch->threads[2];
    const size_t bytes = program->shared_bytes + launch->shared_bytes;
    shared.resize(bytes);
    for (size_t k = 0; k + 4 <= bytes; k += 4) std::memcpy(&shared[k], &launch->garbage, 4);
    shared_writes.resize(bytes / program->shared_grain + 17), shared_reads.resize(shared_writes.size());
    std::fill(shared_writes.begin(), shared_writes.end(), 0), std::fill(shared_reads.begin(), shared_reads.end(), 0);
    warps.resize((threads + LANES - 1) / LANES);
    const int place[3] = {linear % launch->grid[0], linear / launch->grid[0] % launch->grid[1],
                          linear / launch->grid[0] / launch->grid[1]};
    for (size_t n = 0; n < warps.size(); ++n) {
        Warp& w = warps[n];
        std::vector<Register> registers = std::move(w.registers);
        w = Warp{};
        w.registers = std::move(registers);  // an earlier block's values serve as garbage
        if (w.registers.empty()) {
            w.registers.resize(program->width.size());
            for (Register& r : w.registers)
                for (int k = 0; k < LANES * 2; ++k) std::memcpy(r.bytes + 4 * k, &launch->garbage, 4);
        }
        w.block = this, w.number = int(n);
        const int lanes = std::min(LANES, threads - int(n) * LANES);
        w.live = lanes == LANES ? ALL : (Mask(1) << lanes) - 1;
        w.parts = {{w.live, 0}};
        w.local.assign(size_t(program->local_bytes) * LANES, uint8_t(launch->garbage));
        w.mask = ALL;
        const int* t = launch->threads;
        for (int d = 0; d < 3; ++d) {
            w.out<uint32_t>(d, [&](int l) {
                const int id = int(n) * LANES + l;
                return uint32_t(d == 0 ? id % t[0] : d == 1 ? id / t[0] % t[1] : id / t[0] / t[1]);
            });
            w.out<uint32_t>(3 + d, [&](int) { return uint32_t(t[d]); });
            w.out<uint32_t>(6 + d, [&](int) { return uint32_t(place[d]); });
            w.out<uint32_t>(9 + d, [&](int) { return uint32_t(launch->grid[d]); });
        }
        w.out<uint32_t>(12, [](int l) { return uint32_t(l); });
        w.out<uint32_t>(13, [](int l) { return 1u << l; });              // %lanemask_eq
        w.out<uint32_t>(14, [](int l) { return 2u * (1u << l) - 1; });   // le
        w.out<uint32_t>(15, [](int l) { return (1u << l) - 1; });        // lt
        w.out<uint32_t>(16, [](int l) { return ~((1u << l) - 1); });     // ge
        w.out<uint32_t>(17, [](int l) { return ~(2u * (1u << l) - 1); });  // gt
    }
}

bool Block::done() const {
    return std::all_of(warps.begin(), warps.end(), [](const Warp& w) { return w.parts.empty(); });
}

// Merges parts that are at one place, and moves the part that is furthest behind, among those that can run, to the end.
void Block::select(Warp& w) {
    for (size_t a = 0; a < w.parts.size(); ++a)
        for (size_t b = a + 1; b < w.parts.size();)
            if (w.parts[a].pc == w.parts[b].pc) {
                w.parts[a].lanes |= w.parts[b].lanes;
                w.parts[a].waiting = false;
                w.parts.erase(w.parts.begin() + b);
            } else {
                ++b;
            }
    size_t best = w.parts.size();
    for (size_t k = 0; k < w.parts.size(); ++k)
        if (!w.parts[k].waiting && (best == w.parts.size() || w.parts[k].pc < w.parts[best].pc)) best = k;
    if (best == w.parts.size())
        throw std::runtime_error("a divergent barrier or shuffle, lanes of a warp wait for each other: " +
                                 program->code[w.parts[0].pc].text + " and " +
                                 program->code[w.parts[w.parts.size() > 1].pc].text);
    std::swap(w.parts[best], w.parts.back());
}

bool Block::run(Warp& w, int64_t quantum, int64_t& steps) {
    if (w.parts.empty()) return false;
    if (w.at_barrier && !release_barrier()) return false;
    while (quantum-- > 0) {
        if (w.parts.size() > 1) select(w);
        Part& part = w.parts.back();
        if (part.pc >= int(program->code.size())) throw std::runtime_error("the end of the code is passed");
        const Instruction& i = program->code[part.pc];
        ++steps;
        Mask mask = part.lanes;
        if (i.predicate >= 0) {
            const Mask p = w.predicate(i.predicate);
            mask &= i.negated ? ~p : p;
        }
        w.mask = mask;
        switch (i.kind) {
            case Kind::plain:
                if (mask) i.run(w, i);
                ++part.pc;
                break;
            case Kind::branch: {
                const int target = int(i.number[0]);
                if (mask == part.lanes) part.pc = target;
                else if (!mask) ++part.pc;
                else {
                    const Part taken{mask, target};
                    part.lanes &= ~mask, ++part.pc;
                    w.parts.push_back(taken);
                }
                break;
            }
            case Kind::end:
                w.live &= ~mask, part.lanes &= ~mask, ++part.pc;
                if (!part.lanes) w.parts.pop_back();
                for (Part& other : w.parts) other.waiting = false;  // ended lanes are not waited for
                if (w.parts.empty()) {
                    release_barrier();
                    return true;
                }
                break;
            case Kind::converged: {
                // shfl, vote, redux and bar.warp.sync have a member mask as last operand; other instructions need all
                // lanes.
                const Mask members = i.aligned ? ALL : Mask(w.wide(i.op.back(), __builtin_ctz(part.lanes)));
                if (members & w.live & ~part.lanes) {
                    part.waiting = true;
                    break;
                }
                if (mask) i.run(w, i);
                ++part.pc;
                break;
            }
            case Kind::barrier:
                if (!mask) {
                    ++part.pc;
                    break;
                }
                if (mask != w.live) {
                    part.waiting = true;
                    if (w.parts.size() == 1) throw std::runtime_error("a divergent barrier: " + i.text);
                    break;
                }
                w.at_barrier = true;
                if (i.op.size() > 2) voted |= w.predicate(i.op[2]) & mask;
                if (!release_barrier()) return true;
                break;
        }
    }
    return true;
}

// If all warps that have not ended are at the barrier, lets them go on; from now on each sees all of the block's
// writes.
bool Block::release_barrier() {
    bool any = false;
    for (const Warp& w : warps) {
        if (!w.parts.empty() && !w.at_barrier) return false;
        any |= w.at_barrier;
    }
    if (!any) return false;
    last_barrier = ++tick;
    View all;
    for (const Warp& w : warps) join(all, w.view);
    for (Warp& w : warps) {
        if (!w.at_barrier) continue;
        const Instruction& i = program->code[w.parts.back().pc];
        i.run(w, i);
        w.at_barrier = false, ++w.parts.back().pc;
        w.view = all;
    }
    voted = 0;
    return true;
}

// Runs a launch. Blocks start in the launch's order. With a seed, several blocks are resident: again and again a random
// warp runs for a random number of steps.
int64_t execute(const Program& program, Memory& memory, const Launch& launch) {
    std::mt19937_64 random(launch.seed);
    const int64_t resident = launch.seed ? std::min<int64_t>(launch.block_count, 1 + random() % 4) : 1;
    std::vector<Block> blocks(resident);
    int64_t next = 0, steps = 0, running = 0;
    const auto begin = [&](Block& block) {
        block.program = &program, block.memory = &memory, block.launch = &launch;
        block.begin(int(launch.blocks[next++])), ++running;
    };
    for (Block& block : blocks)
        if (next < launch.block_count) begin(block);
    while (running) {
        bool progress = false;
        const size_t first = launch.seed ? random() % blocks.size() : 0;
        for (size_t k = 0; k < blocks.size(); ++k) {
            Block& block = blocks[(first + k) % blocks.size()];
            if (block.warps.empty() || block.done()) continue;
            const size_t count = block.warps.size(), warp = launch.seed ? random() % count : 0;
            for (size_t n = 0; n < count; ++n) {
                const int64_t quantum = launch.seed ? int64_t(1) << random() % 12 : 1 << 20;
                progress |= block.run(block.warps[(warp + n) % count], quantum, steps);
            }
            if (steps > launch.most_steps) throw std::runtime_error("more steps than are allowed: does it end?");
            if (block.done()) {
                --running;
                if (next < launch.block_count) begin(block), progress = true;
                else block.warps.clear();
            }
        }
        if (!progress) throw std::runtime_error("no warp can go on: a barrier that some never reach");
    }
    return steps;
}

}  // namespace executed

// ---- for Python

using namespace executed;

namespace {
thread_local std::string said;

template <class F>
auto guarded(F f, decltype(f()) failed) {
    try {
        said.clear();
        return f();
    } catch (const std::exception& error) {
        said = error.what();
        return failed;
    }
}
}  // namespace

extern "C" {
const char* executed_error() { return said.c_str(); }

Program* executed_program(const char* text) {
    return guarded([&] { return load_program(text).release(); }, static_cast<Program*>(nullptr));
}

Memory* executed_memory() { return new Memory; }
void executed_free(Memory* memory) { delete memory; }

void executed_region(Memory* memory, uint64_t start, uint64_t size, const char* name, int grain, int fresh,
                     const uint8_t* inside, int watched) {
    Region r{start, size, name, grain, fresh != 0, inside, watched != 0, false, {}, {}};
    auto& all = memory->regions;
    all.insert(std::upper_bound(all.begin(), all.end(), r, [](auto& a, auto& b) { return a.start < b.start; }), r);
}

int executed_written(const Memory* memory, uint64_t start) {
    return std::any_of(memory->regions.begin(), memory->regions.end(),
                       [&](const Region& r) { return r.start == start && r.written; });
}

int64_t executed_wide(const Memory* memory) { return memory->wide; }

// Returns one line per kind of event: what happened, how often, where, and the first case's detail.
const char* executed_events(const Memory* memory) {
    said.clear();
    for (const auto& [what, event] : memory->events)
        said += what.first + "\t" + std::to_string(event.first) + "\t" + what.second + "\t" + event.second + "\n";
    return said.c_str();
}

int64_t executed_run(const Program* program, Memory* memory, const Launch* launch) {
    return guarded([&] { return execute(*program, *memory, *launch); }, int64_t(-1));
}
}
