// Computes the number of elements kept before a tile, from the counts that earlier tiles publish while they run
// (decoupled look-back: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016).
#pragma once

#include "cuda/engine/bits.cuh"
#include "cuda/engine/strong.cuh"

namespace safeops::cuda {

struct Ranks {
  unsigned* ticket;  // number of tiles handed out
  uint64* status;    // for each tile: a count, shifted left by 2, and in the two lowest bits its meaning (the enum)
  char* count;       // where the total number of kept elements is written, an int64
  int64_t tiles, spare;  // spare: blocks without a tile, which fill the slots after the kept elements
};

enum : uint64 { kAbsent, kOfTile, kUpToTile };  // no count yet; the tile's own; of all tiles up to and with it

constexpr int kAhead = 8;  // statuses that a lane loads at once: a round trip to memory sees 256 tiles

// Returns how many elements are kept before the tile; all lanes of one warp call it. kept: how many are kept in the
// tile. It first publishes `kept`, so that later tiles need not wait while it looks back. Then it publishes the count
// of all tiles up to this one, so that later tiles need not look further back.
__device__ inline int64_t kept_before(uint64* status, int64_t tile, unsigned kept) {
  constexpr unsigned kNone = 2 * 32 * kAhead;
  const int lane = threadIdx.x % 32;
  const auto publish = [&](uint64 count, uint64 meaning) {
    if (lane == 0) store_relaxed(status + tile, count << 2 | meaning);
  };
  if (tile > 0) publish(kept, kOfTile);
  uint64 before = 0;
  unsigned stop = kNone;
  for (int64_t last = tile - 1 - lane; stop == kNone; last -= 32 * kAhead) {
    uint64 word[kAhead] = {};  // word[k]: the status of tile last - 32 k, d = 32 k + lane tiles back
    do {                       // until every tile back to the nearest with kUpToTile has published
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if ((word[k] & 3) == kAbsent)
          word[k] = last >= 32 * k ? load_relaxed(status + last - 32 * k) : uint64(kUpToTile);
      stop = kNone;  // becomes 2 d for the nearest tile with kUpToTile, or 2 d + 1 for a nearer one with kAbsent
#pragma unroll
      for (int k = kAhead - 1; k >= 0; --k)
        if ((word[k] & 3) != kOfTile) stop = 2 * (32 * k + lane) + ((word[k] & 3) == kAbsent);
      stop = warp_reduce(stop, [](unsigned a, unsigned b) { return a < b ? a : b; });
    } while (stop % 2);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (2 * (32 * k + lane) <= stop) before += word[k] >> 2;
  }
  before = warp_reduce(before, [](uint64 a, uint64 b) { return a + b; });
  publish(before + kept, kUpToTile);
  return int64_t(before);
}

}  // namespace safeops::cuda
