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

constexpr int kAhead = 8;  // statuses that a lane asks for at once: a round trip sees 256 tiles

// For a whole warp: returns how many elements are kept before the tile; `kept` are kept in it. It first publishes
// `kept`, so that later tiles need not wait while it looks back, then the count of all tiles up to it, so that they
// need not look further. All resident tiles start together; at first they have published only their own counts.
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
    do {                       // until all have published, back to the nearest with the count of all up to it
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if ((word[k] & 3) == kAbsent)
          word[k] = last >= 32 * k ? load_relaxed(status + last - 32 * k) : uint64(kUpToTile);
      stop = kNone;  // 2 d of the nearest with the count of all up to it, 2 d + 1 of one nearer without any
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
