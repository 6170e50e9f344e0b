// How many elements are kept before a tile: what the tiles before it have published, added up while they are under way
// (decoupled look-back: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016).
#pragma once

#include "cuda/engine/bits.cuh"
#include "cuda/engine/strong.cuh"

namespace safeops::cuda {

struct Ranks {
  unsigned* ticket;  // how many tiles have been handed out
  uint64* status;    // of each tile: a count, and in the two lowest bits what it counts
  char* count;       // kept in all, an int64
  int64_t tiles, spare;  // blocks with no tile: they fill what is left behind the kept elements
};

enum : uint64 { kAbsent, kOfTile, kUpToTile };  // nothing yet, the tile's own, or those of all tiles up to it

__device__ inline unsigned warp_sum(unsigned value) {
  return warp_reduce(value, [](unsigned a, unsigned b) { return a + b; });
}

// For a whole warp: how many elements are kept before the tile; `own` are kept in it. It publishes `own` first, so that
// the tiles behind it need not wait while it looks back, then the count of all up to it, so that they need not look
// further.
__device__ inline int64_t kept_before(uint64* status, int64_t tile, unsigned own) {
  const int lane = threadIdx.x % 32;
  const auto publish = [&](uint64 count, uint64 of) {
    if (lane == 0) store_relaxed(status + tile, count << 2 | of);
  };
  if (tile == 0) {
    publish(own, kUpToTile);
    return 0;
  }
  publish(own, kOfTile);
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
  publish(uint64(before) + own, kUpToTile);
  return before;
}

}  // namespace safeops::cuda
