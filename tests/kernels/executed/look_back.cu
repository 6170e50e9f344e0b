// Runs the look back of one tile, over a status array that the test has prepared.
#include "cuda/selection/selection.cuh"

// before: the count of kept elements before `tile`. If `late` >= 0, another warp sets status[late] = `word` meanwhile.
extern "C" __global__ void look_back(unsigned long long* status, long long tile, unsigned own, long long late,
                                     unsigned long long word, long long* before) {
  if (threadIdx.x < 32) {
    const int64_t kept = safeops::cuda::kept_before(status, tile, own);
    if (threadIdx.x == 17) *before = kept;  // every lane has it
  } else if (threadIdx.x == 32 && late >= 0) {
    safeops::cuda::store_relaxed(status + late, word);
  }
}
