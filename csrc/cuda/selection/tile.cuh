// The tile of a block: bits that say which of its elements are kept, the rank of each kept element, and the elements,
// which are moved 16 bytes at a time.
#pragma once

#include "look_back.cuh"
#include "moves.cuh"

namespace safeops::cuda {

// A tile has 32 KiB of elements, which are copied to shared memory while the block looks back (look_back.cuh).
constexpr int tile_of(int64_t width) { return 32768 / int(width < 2 ? 2 : width); }  // elements of `width` bytes
template <class T>
constexpr int kTile = tile_of(sizeof(T));
template <class T>
constexpr int kTilePackets = kTile<T> / kPacket<T> / kBlock;  // packets of a thread: u * kBlock + threadIdx.x

// Shared memory has words() and room(). A word stands for 32 elements: x has a bit for each kept one, y is the number
// of the tile's elements kept before the word. room() holds the elements, first as they are read and then packed.
template <class T>
struct Tile {
  static constexpr int kWords = kTile<T> / 32, kMasks = (kTile<T> / 16 + kBlock - 1) / kBlock;
  static constexpr int kRoom = kTile<T> * sizeof(T) + 16, kShared = 128 + kWords * sizeof(uint2) + kRoom;

  int64_t number, start, first;  // the tile's number, its first element, and how many are kept before that
  unsigned kept_count;           // number of elements kept in the tile
  uint4 mask[kMasks];

  static __device__ int64_t* slot() { return reinterpret_cast<int64_t*>(shared_memory()); }
  static __device__ unsigned* sums() { return reinterpret_cast<unsigned*>(shared_memory() + 32); }
  static __device__ int64_t* scratch() { return reinterpret_cast<int64_t*>(shared_memory() + 64); }  // one per warp
  static __device__ uint2* words() { return reinterpret_cast<uint2*>(shared_memory() + 128); }
  static __device__ T* room() { return reinterpret_cast<T*>(shared_memory() + 128 + kWords * sizeof(uint2)); }

  // Takes the next tile; returns false if none is left. Blocks take tiles in order, in whatever order they start. So
  // the blocks of all earlier tiles are running or done, and waiting for them cannot deadlock.
  __device__ bool take(const Ranks& ranks) {
    if (threadIdx.x == 0) slot()[0] = ranks.tiles + ranks.spare > 1 ? atomicAdd(ranks.ticket, 1u) : 0;
    __syncthreads();
    begin(slot()[0]);
    return number < ranks.tiles;
  }
  __device__ void begin(int64_t tile) {
    number = tile;
    start = tile * kTile<T>;
  }

  // Issues the reads of the mask, operand 1 of the plan.
  template <int N>
  __device__ void read_mask(const Plan<N>& plan, Layout layout) {
    read_packets<uint8_t, kTile<T>>(mask, reinterpret_cast<uint8_t*>(room()), plan, 1, layout, start);
  }
  // Waits for the mask, stores it as bits, and counts them.
  __device__ void count_mask() {
#pragma unroll
    for (int u = 0; u < kMasks; ++u) {
      const int p = u * kBlock + threadIdx.x;
      if (p < kTile<T> / 16) reinterpret_cast<uint16_t*>(words() + p / 2)[p % 2] = uint16_t(mask_bits(mask[u]));
    }
    __syncthreads();
    count();
  }

  // Sets kept_count, and `first` by looking back. The last tile stores the total.
  __device__ void rank(const Ranks& ranks) {
    count_mask();
    if (threadIdx.x < 32) {
      const int64_t before = kept_before(ranks.status, number, kept_count);
      if (threadIdx.x == 0) {
        slot()[1] = before;
        if (number == ranks.tiles - 1) store(ranks.count, uint64(before) + kept_count);
      }
    }
    __syncthreads();
    first = slot()[1];
  }

  // For a spare block: waits until the last tile has published the total of kept elements. Then it calls put(i) for its
  // part of the slots [total, numel).
  template <class Put>
  __device__ void fill(const Ranks& ranks, int64_t numel, const Put& put) const {
    if (threadIdx.x == 0) {
      uint64 word;
      do word = load_relaxed(ranks.status + ranks.tiles - 1);
      while ((word & 3) != kUpToTile);
      slot()[1] = int64_t(word >> 2);
    }
    __syncthreads();
    const int64_t begin = slot()[1] + (number - ranks.tiles) * kBlock + threadIdx.x;
    for (int64_t i = begin; i < numel; i += ranks.spare * kBlock) put(i);
  }

  // Counts the elements kept before each word, and in the tile. The caller must call __syncthreads() afterwards.
  __device__ void count() {
    constexpr int K = kWords < kBlock ? 1 : kWords / kBlock;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint2* word = words() + threadIdx.x * K;
    const bool has_words = threadIdx.x * K < kWords;
    unsigned n = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) n += has_words ? __popc(word[k].x) : 0;
    unsigned sum = n;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned other = __shfl_sync(kWarp, sum, (lane - step) & 31);
      sum += lane >= step ? other : 0;
    }
    if (lane == 31) sums()[warp] = sum;
    __syncthreads();
    unsigned before = sum - n;
    kept_count = 0;
#pragma unroll
    for (int w = 0; w < kBlock / 32; ++w) {
      before += w < warp ? sums()[w] : 0;
      kept_count += sums()[w];
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!has_words) break;
      word[k].y = before;
      before += __popc(word[k].x);
    }
  }

  template <class F>
  __device__ void each_word(const F& f) const {
#pragma unroll
    for (int w = threadIdx.x, u = 0; u < kWords; u += kBlock, w += kBlock)
      if (kWords % kBlock == 0 || w < kWords) f(w);
  }

  // Calls f(e, kept, rank in the tile) for each element e of the thread's packet u.
  template <class F>
  __device__ void each(int u, const F& f) const {
    const int i = (u * kBlock + threadIdx.x) * kPacket<T>, shift = i % 32;
    const uint2 word = words()[i / 32];
    int rank = word.y + __popc(word.x & ((1u << shift) - 1));
#pragma unroll
    for (int e = 0; e < kPacket<T>; ++e) {
      const bool kept = word.x >> shift >> e & 1;
      f(e, kept, rank);
      rank += kept;
    }
  }
};

// The elements of a tile in its block's registers.
template <class T>
struct TileElements {
  uint4 packet[kTilePackets<T>];

  __device__ T get(int u, int e) const { return packet_get<T>(packet[u], e); }

  // Packs the kept elements into the tile's room.
  __device__ void collect(const Tile<T>& tile, int skip) const {
#pragma unroll
    for (int u = 0; u < kTilePackets<T>; ++u)
      tile.each(u, [&](int e, bool kept, int rank) {
        if (kept) tile.room()[skip + rank] = get(u, e);
      });
  }

  // Replaces each element by f(element, kept, rank in the tile).
  template <class F>
  __device__ void replace(const Tile<T>& tile, const F& f) {
#pragma unroll
    for (int u = 0; u < kTilePackets<T>; ++u) {
      T raw[kPacket<T>];
      tile.each(u, [&](int e, bool kept, int rank) { raw[e] = f(get(u, e), kept, rank); });
      packet[u] = packet_of(raw);
    }
  }

  // request() issues the reads of the elements, receive() waits for them.
  template <int N>
  __device__ void request(const Plan<N>& plan, int operand, Layout layout, const Tile<T>& tile) {
    request_packets<T, kTile<T>>(tile.room(), plan, operand, layout, tile.start);
  }
  template <int N>
  __device__ void receive(const Plan<N>& plan, int operand, Layout layout, const Tile<T>& tile) {
    receive_packets(packet, tile.room(), plan, operand, layout, tile.start);
  }
  // Writes the elements. packed: `base` is contiguous and aligned; else element i goes to pointer_to(i).
  template <class PointerTo>
  __device__ void write(char* base, bool packed, const Tile<T>& tile, int64_t numel,
                        const PointerTo& pointer_to) const {
    if (packed && tile.start + kTile<T> <= numel) {
#pragma unroll
      for (int u = 0; u < kTilePackets<T>; ++u)
        store(base + tile.start * int64_t(sizeof(T)) + (u * kBlock + threadIdx.x) * 16, packet[u]);
      return;
    }
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kTilePackets<T>; ++u)
      reinterpret_cast<uint4*>(tile.room())[u * kBlock + threadIdx.x] = packet[u];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile<T> && tile.start + i < numel; i += kBlock)
      store(const_cast<char*>(pointer_to(tile.start + i)), tile.room()[i]);
  }
};

// Returns how many of a tile's kept elements fit into the output slots [first, slots).
__device__ inline int slots_for(int64_t slots, int64_t first, unsigned kept_count) {
  return first >= slots ? 0 : int(slots - first < kept_count ? slots - first : kept_count);
}

}  // namespace safeops::cuda
