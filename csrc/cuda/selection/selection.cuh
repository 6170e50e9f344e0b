// The host's side of the masked selection ops. The rank of each kept element is computed in the launch that needs it,
// with one read of the mask. The host does not wait (except in masked_select) and launches do not depend on data, so a
// CUDA graph can capture them. Ranks are integers: two runs give the same bits.
#pragma once

#include "tile.cuh"

namespace safeops::cuda {

constexpr int kSpare = 64;  // most blocks that fill slots after the kept elements

template <int N>
Layout layout_of(const Plan<N>& plan, int operand, int64_t width) {
  if (plan.ndim > 1 || plan.stride[operand][0] != width) return kStrided;
  return uintptr_t(plan.base[operand]) % 16 ? kDense : kPacked;
}

// Returns a view of the mask. If input's elements have 16 bytes, which are split in two (Bits::split), the mask gets a
// last dim of size 2, too.
inline Bits mask_of(const Tensor& mask, const Tensor& input, const char* op) {
  STD_TORCH_CHECK(dtype_of(mask) == DType::kBool, op, ": mask must be bool");
  check_device(mask, input, op, "mask");
  Bits bits(mask);
  if (element_bytes(input) == 16) bits.push(2, 0);
  return bits;
}

// Allocates memory for a launch that ranks `numel` elements of `width` bytes. Spare blocks fill the slots after the
// kept elements in an array of `filled` elements. `workspace` must live until the launch is queued, and serves only
// that one.
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

// Starts a block for each tile of T, and the spare blocks, with `more` bytes of shared memory after those of the tile.
template <class T, class Kernel, class... Arguments>
void start_tiles(Kernel kernel, const Ranks& ranks, int more, cudaStream_t stream, const Arguments&... arguments) {
  const unsigned blocks = unsigned(ranks.tiles + ranks.spare);
  start_blocks(kernel, blocks, kBlock, Tile<T>::kShared + more, stream, arguments..., ranks);
}

}  // namespace safeops::cuda
