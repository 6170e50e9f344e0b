// Kernel of test_look_back: finds how many elements are kept before one tile, from a status array of the test.
#include "cuda/selection/selection.cuh"

// before: the count of kept elements before `tile`. If `late` >= 0, another warp sets status[late] = `word` meanwhile.
extern "C" __global__ void look_back(unsigned long long* status, long long tile, unsigned own, long long late,
                                     unsigned long long word, long long* before) {
  if (threadIdx.x < 32) {
    const int64_t kept = safeops::cuda::kept_before(status, tile, own);
    if (threadIdx.x == 17) *before = kept;  // every lane holds the count; lane 17 of them writes
  } else if (threadIdx.x == 32 && late >= 0) {
    safeops::cuda::store_relaxed(status + late, word);
  }
}
