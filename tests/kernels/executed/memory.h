// Global and shared memory with its checks: bounds, alignment, and races. For races it keeps the last write and read of
// each element, so that two unordered accesses are found in whatever order they run.
#pragma once
#include <cstdio>
#include <unordered_map>

#include "machine.h"

namespace executed {

// The last access of an element, packed: block + 1, warp, a bit for atomic or volatile, and the tick.
struct Stamp {
    uint64_t bits = 0;
    static constexpr int MANY = 0x7f;  // in place of a warp: several warps have read the element
    static Stamp of(const Warp& w, bool strong) {
        const uint64_t block = w.block->number + 1, warp = w.number;
        return {block << 32 | uint64_t(strong) << 31 | warp << 24 | w.block->tick};
    }
    int block() const { return int(bits >> 32) - 1; }
    int warp() const { return bits >> 24 & 0x7f; }
    bool strong() const { return bits >> 31 & 1; }
    uint32_t tick() const { return bits & 0xffffff; }
    void merge_warps() { bits |= uint64_t(MANY) << 24; }
};

// True if the stamped access happened before now: a barrier, or a release that this warp has acquired, lies between.
inline bool ordered(const Warp& w, Stamp s) {
    if (s.bits == 0) return true;
    if (s.block() == w.block->number && (s.warp() == w.number || s.tick() < w.block->last_barrier)) return true;
    const auto seen = w.view.find(s.block());
    if (seen == w.view.end()) return false;
    if (s.tick() < seen->second.all) return true;
    const auto of_warp = seen->second.of_warp.find(s.warp());
    return of_warp != seen->second.of_warp.end() && s.tick() < of_warp->second;
}

inline std::string who(Stamp s) {
    return "block " + std::to_string(s.block()) +
           (s.warp() == Stamp::MANY ? ", several warps" : ", warp " + std::to_string(s.warp()));
}

struct Region {
    uint64_t start, size;
    std::string name;
    int grain;              // bytes of an element
    bool fresh;             // nobody has written it before the launch
    const uint8_t* inside;  // for each byte 1 if a tensor owns it; null: all are owned
    bool watched;           // record reads, too: an earlier order of the launch wrote here
    bool written = false;
    std::vector<uint64_t> writes, reads;
};

struct Memory {
    std::vector<Region> regions;
    std::map<std::pair<std::string, std::string>, std::pair<int64_t, std::string>> events;
    int64_t wide = 0;  // how many 16-byte loads lanes did
    std::unordered_map<uint64_t, View> published;  // address -> writes that an acquire there makes visible

    void fault(const std::string& kind, const std::string& text, const std::string& detail) {
        auto& [count, first] = events[{kind, text}];
        if (count++ == 0) first = detail;
    }

    Region* find(uint64_t address) {
        auto next = std::upper_bound(regions.begin(), regions.end(), address,
                                     [](uint64_t a, const Region& r) { return a < r.start; });
        return next == regions.begin() ? nullptr : &*--next;
    }

    std::string nearest(uint64_t address, int bytes) {
        std::string best = "no tensor";
        uint64_t least = ~0ull;
        for (const Region& r : regions) {
            const int64_t from_start = address - r.start, from_end = address + bytes - (r.start + r.size);
            const uint64_t distance = std::min<uint64_t>(std::abs(from_start), std::abs(from_end));
            if (distance < least) {
                least = distance;
                char text[128];
                std::snprintf(text, sizeof text, ": start%+lld, end%+lld bytes", (long long)from_start,
                              (long long)from_end);
                best = r.name + text;
            }
        }
        return best;
    }
};

inline std::string hex(uint64_t x) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", (unsigned long long)x);
    return text;
}

// Checks one lane's access of the elements [first, last) of a region or of shared memory against earlier accesses.
// same: the write changes no byte, so it needs no order relative to writes by the block's other warps.
inline void check_write(Warp& w, const Instruction& i, uint64_t* writes, uint64_t* reads, int64_t first, int64_t last,
                        bool same, const std::string& name) {
    const Stamp mine = Stamp::of(w, i.strong);
    for (int64_t k = first; k < last; ++k) {
        const Stamp write{writes[k]}, read{reads ? reads[k] : 0};
        if (!(write.strong() && i.strong) && !(same && write.block() == mine.block()) && !ordered(w, write))
            w.fault("overwrites what another writes, unordered", i, name + " by " + who(write));
        if (read.bits && !(read.strong() && i.strong) && !ordered(w, read))
            w.fault("overwrites what another reads, unordered", i, name + " by " + who(read));
        writes[k] = mine.bits;
    }
}

inline void check_read(Warp& w, const Instruction& i, const uint64_t* writes, uint64_t* reads, int64_t first,
                       int64_t last, const std::string& name) {
    const Stamp mine = Stamp::of(w, i.strong);
    for (int64_t k = first; k < last; ++k) {
        const Stamp write{writes[k]};
        if (write.bits && !(write.strong() && i.strong) && !ordered(w, write))
            w.fault("reads what another writes, unordered", i, name + " by " + who(write));
        if (write.bits && !i.coherent && write.block() >= 0)
            w.fault("reads through the read-only cache what this launch wrote", i, name);
        if (!reads) continue;
        Stamp next = mine;
        const Stamp read{reads[k]};
        if (read.block() == next.block() && read.tick() >= w.block->last_barrier && read.warp() != next.warp())
            next.merge_warps();
        reads[k] = next.bits;
    }
}

// A read may start before a tensor or end after it. Allocations are multiples of 16 bytes, so the read is allowed if
// each aligned 16-byte piece of it contains a byte of a tensor. The bytes outside of tensors are garbage.
inline uint8_t* across_an_end(Warp& w, const Instruction& i, uint64_t address, int bytes) {
    static thread_local uint8_t data[64];
    Memory& memory = *w.block->memory;
    for (int k = 0; k < bytes; ++k) data[k] = uint8_t(w.block->launch->garbage >> k % 4 * 8);
    uint64_t piece = address / 16 * 16;
    for (int pieces = int(address % 16 + bytes + 15) / 16; pieces--; piece += 16) {
        bool any = false;
        for (uint64_t at = piece; at < piece + 16; ++at) {
            const Region* r = memory.find(at);
            if (!r || at >= r->start + r->size) continue;
            any = true;
            if (at >= address && at < address + bytes) data[at - address] = *reinterpret_cast<uint8_t*>(at);
        }
        if (!any) {
            w.fault("reads out of bounds", i, memory.nearest(address, bytes));
            return nullptr;
        }
    }
    return data;
}

inline bool fits(uint64_t offset, uint64_t bytes, uint64_t size) { return offset <= size && bytes <= size - offset; }

// Returns the bytes of global memory at an address, or null if no tensor owns them. data: the bytes to write; null for
// an atomic.
inline uint8_t* global_bytes(Warp& w, const Instruction& i, uint64_t address, int bytes, bool reads, bool writes,
                             const uint8_t* data = nullptr) {
    Memory& memory = *w.block->memory;
    if (address % (i.count * i.bytes)) w.fault("misaligned", i, hex(address));
    memory.wide += reads && bytes == 16;
    Region* r = memory.find(address);
    if (!r || !fits(address - r->start, bytes, r->size)) {
        if (!writes) return across_an_end(w, i, address, bytes);
        w.fault("writes out of bounds", i, memory.nearest(address, bytes));
        return nullptr;
    }
    const int64_t offset = address - r->start, first = offset / r->grain, last = (offset + bytes - 1) / r->grain + 1;
    if (r->writes.empty()) {
        r->writes.resize(r->size / r->grain + 1);
        if (r->watched) r->reads.resize(r->writes.size());
    }
    if (reads && r->fresh)
        for (int64_t k = first; k < last; ++k)
            if (!r->writes[k] && (!r->inside || r->inside[k * r->grain])) {
                w.fault("reads what nobody wrote", i, r->name + " at byte " + std::to_string(offset));
                break;
            }
    if (!writes) {
        check_read(w, i, r->writes.data(), r->watched ? r->reads.data() : nullptr, first, last, r->name);
    } else {
        r->written = true;
        if (r->inside)
            for (int b = 0; b < bytes; ++b)
                if (!r->inside[offset + b]) {
                    w.fault("writes beside the elements", i, r->name + " at byte " + std::to_string(offset + b));
                    break;
                }
        const bool same = data && !std::memcmp(reinterpret_cast<uint8_t*>(address), data, bytes);
        check_write(w, i, r->writes.data(), r->watched ? r->reads.data() : nullptr, first, last, same, r->name);
    }
    return reinterpret_cast<uint8_t*>(address);
}

inline uint8_t* shared_bytes(Warp& w, const Instruction& i, uint64_t address, int bytes, bool writes,
                             const uint8_t* data = nullptr) {
    Block& block = *w.block;
    if (address % bytes) w.fault("misaligned in shared memory", i, hex(address));
    if (!fits(address, bytes, block.shared.size())) {
        w.fault("out of bounds of shared memory", i, hex(address) + " of " + std::to_string(block.shared.size()));
        return nullptr;
    }
    const int grain = block.program->shared_grain;
    const int64_t first = address / grain, last = (address + bytes - 1) / grain + 1;
    uint64_t *write = block.shared_writes.data(), *read = block.shared_reads.data();
    const bool same = data && !std::memcmp(block.shared.data() + address, data, bytes);
    if (!writes) check_read(w, i, write, read, first, last, "shared memory");
    else check_write(w, i, write, read, first, last, same, "shared memory");
    return block.shared.data() + address;
}

inline uint8_t* bytes_at(Warp& w, const Instruction& i, int lane, uint64_t address, int bytes, bool reads, bool writes,
                         const uint8_t* data = nullptr) {
    switch (i.space) {
        case Space::global: return global_bytes(w, i, address, bytes, reads, writes, data);
        case Space::shared: return shared_bytes(w, i, address, bytes, writes, data);
        case Space::param: return const_cast<uint8_t*>(w.block->launch->params) + address;
        case Space::local:
            if (!fits(address, bytes, w.program().local_bytes)) {
                w.fault("out of bounds of local memory", i, hex(address));
                return nullptr;
            }
            return w.local.data() + lane * w.program().local_bytes + address;
    }
    return nullptr;
}

}  // namespace executed
