// The number of elements kept before a tile, computed from the counts that earlier tiles publish while they run
// (decoupled look-back: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016).
#pragma once

#include "cuda/engine/bits.cuh"
#include "cuda/engine/strong.cuh"

namespace safeops::cuda {

struct Ranks {
  unsigned* ticket;  // number of tiles handed out
  uint64* status;    // of each tile: a count, and in the two lowest bits its meaning
  char* count;       // kept in total, an int64
  int64_t tiles, spare;  // spare: blocks without a tile, which fill the slots after the kept elements
};

enum : uint64 { kAbsent, kOfTile, kUpToTile };  // no count yet, of the tile alone, or of all tiles up to it

__device__ inline unsigned warp_sum(unsigned value) {
  return warp_reduce(value, [](unsigned a, unsigned b) { return a + b; });
}

// For a whole warp: returns how many elements are kept before the tile; `kept` are kept in it. It first publishes
// `kept`, so that later tiles need not wait while it looks back, then the count of all tiles up to it, so that they
// need not look further.
__device__ inline int64_t kept_before(uint64* status, int64_t tile, unsigned kept) {
  const int lane = threadIdx.x % 32;
  const auto publish = [&](uint64 count, uint64 meaning) {
    if (lane == 0) store_relaxed(status + tile, count << 2 | meaning);
  };
  if (tile == 0) {
    publish(kept, kUpToTile);
    return 0;
  }
  publish(kept, kOfTile);
  int64_t before = 0;
  for (int64_t last = tile - 1;; last -= 32) {  // lane l reads the status of tile last - l
    uint64 word;
    unsigned ends, needed;
    do {  // until all have published, from `last` back to the nearest one with the count of all up to it
      word = last >= lane ? load_relaxed(status + (last - lane)) : uint64(kUpToTile);
      ends = __ballot_sync(kWarp, (word & 3) == kUpToTile);
      needed = ends ? ends ^ (ends - 1) : kWarp;
    } while ((__ballot_sync(kWarp, (word & 3) != kAbsent) & needed) != needed);
    before += warp_sum((needed & ~ends) >> lane & 1 ? unsigned(word >> 2) : 0);
    if (ends == 0) continue;
    const int nearest = __popc(needed) - 1;
    const unsigned low = __shfl_sync(kWarp, unsigned(word >> 2), nearest);
    const unsigned high = __shfl_sync(kWarp, unsigned(word >> 34), nearest);
    before += int64_t(uint64(high) << 32 | low);
    break;
  }
  publish(uint64(before) + kept, kUpToTile);
  return before;
}

}  // namespace safeops::cuda
