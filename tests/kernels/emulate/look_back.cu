// The look back of one tile by itself, over a status array that the test has prepared.
#include "cuda/selection/selection.cuh"

// The count of kept elements before `tile`. If `late` >= 0, status[late] becomes `word` only while the tile is waiting.
extern "C" __attribute__((visibility("default"), used)) inline int64_t emulated_look_back(
    unsigned long long* status, int64_t tile, unsigned own, int64_t late, unsigned long long word) {
  int64_t before = -1;
  run_blocks(2, 32, [&] {
    if (blockIdx.x == 0) {
      const int64_t kept = safeops::cuda::kept_before(status, tile, own);
      if (threadIdx.x == 17) before = kept;  // every lane knows
    } else if (threadIdx.x == 0 && late >= 0) {
      for (int step = 0; step < 200; ++step) emulated_yield();
      status[late] = word;
    }
  });
  return before;
}
