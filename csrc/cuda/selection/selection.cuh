// The host's side of the masked selection ops. The rank of each kept element is computed in the launch that needs it,
// with one read of the mask. The host does not wait (except in masked_select) and no launch depends on data, so a CUDA
// graph can hold it. Ranks are integers: two runs give the same bits.
#pragma once

#include "tile.cuh"

namespace safeops::cuda {

constexpr int kSpare = 64;  // most blocks that fill slots after the kept elements

template <int N>
Layout layout_of(const Plan<N>& plan, int operand, int64_t width) {
  if (plan.ndim > 1 || plan.stride[operand][0] != width) return kStrided;
  return uintptr_t(plan.base[operand]) % 16 ? kDense : kPacked;
}

// The mask, with one more dim if the elements, of 16 bytes, are split in two.
inline Bits mask_of(const Tensor& mask, const Tensor& input, const char* op) {
  STD_TORCH_CHECK(dtype_of(mask) == DType::kBool, op, ": mask must be bool");
  check_device(mask, input, op, "mask");
  Bits bits(mask);
  if (element_bytes(input) == 16) bits.push(2, 0);
  return bits;
}

// Memory for a launch that ranks `numel` elements of `width` bytes, with spare blocks to fill an array of `filled`
// elements after the kept ones. `workspace` must live until the launch is queued, and serves one launch only.
inline Ranks make_ranks(int64_t numel, int64_t width, int64_t filled, const Tensor& like, Tensor& workspace,
                        Tensor& count, cudaStream_t stream) {
  const int64_t tiles = (numel + tile_of(width) - 1) / tile_of(width), words = tiles + 1;
  const int64_t spare = std::min<int64_t>((filled + tile_of(width) - 1) / tile_of(width), kSpare);
  workspace = safeops::empty(Shape(1, &words), DType::kLong, like);
  count = safeops::empty(Shape(), DType::kLong, like);
  if (tiles + spare > 1) cudaMemsetAsync(workspace.data_ptr(), 0, words * sizeof(uint64), stream);
  if (tiles == 0) cudaMemsetAsync(count.data_ptr(), 0, sizeof(int64_t), stream);
  uint64* first = static_cast<uint64*>(workspace.data_ptr());
  return {reinterpret_cast<unsigned*>(first), first + 1, static_cast<char*>(count.data_ptr()), tiles, spare};
}

// Starts a block for each tile of T, and the spare ones, with `more` bytes of shared memory after the tile's.
template <class T, class Kernel, class... Arguments>
void start_tiles(Kernel kernel, const Ranks& ranks, int more, cudaStream_t stream, const Arguments&... arguments) {
  const unsigned blocks = unsigned(ranks.tiles + ranks.spare);
  start_blocks(kernel, blocks, kBlock, Tile<T>::kShared + more, stream, arguments..., ranks);
}

}  // namespace safeops::cuda
