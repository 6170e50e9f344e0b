// total_variation: for each image the sum of |x - its neighbour| over the pairs of kept neighbours along the spatial
// dims, and how many pixels are kept. A second launch adds up the blocks of an image.
// I/O: reads x and the mask, from the cache once more where threads meet.
#include "neighbours.cuh"
#include "parts.cuh"

namespace safeops::cuda {
namespace {

struct Total {
  double sum, count;
};

// (2, blocks of all images)
template <class T, bool kMask>
__global__ void __launch_bounds__(kBlock, kMask ? 2 : 3)
    total_variation_kernel(const __grid_constant__ Walk walk, char* const __grid_constant__ sums) {
  using C = typename T::Value;
  Total total{0, 0};
  each_unit(walk, [&](uint32_t image, uint32_t unit) {
    using P = Patch<T, kMask, false>;
    const P p(walk, image, unit);
    typename P::Beside right[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) right[i] = p.beside(i, P::V == 1 ? walk.dim[0].step : P::V);
    C sum = 0;
    int count = 0;
    const auto add = [&](int, C d) { sum += fabs(d); };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned keep = p.keep[i];
      count += __popc(keep);
      p.inner_pairs(p.row[i], keep & keep >> 1, add);
      if (right[i].kept & keep >> (P::V - 1))
        add(0, p.row[i].get(P::V - 1, walk.type) - T::decode(right[i].word, walk.type));
      if (walk.dim[1].step) p.pairs(p.row[i], keep & p.keep[i + 1], p.row[i + 1], add);
    }
#pragma unroll 1
    for (int d = 2; d < 4; ++d)
      p.elsewhere(d, 1, [&](int i, const T& other, unsigned kept) { p.pairs(p.row[i], p.keep[i] & kept, other, add); });
    total.sum += sum, total.count += count;
  });
  total = block_reduce<kBlock>(total, reinterpret_cast<Total*>(shared_memory()), [](Total a, const Total& b) {
    a.sum += b.sum, a.count += b.count;
    return a;
  });
  if (threadIdx.x) return;
  char* p = sums + int64_t(blockIdx.x) * sizeof(double);
  store(p, total.sum), store(p + int64_t(gridDim.x) * sizeof(double), total.count);
}

// (2, N): the sums, and the counts
Tensor total_variation(const Tensor& input, const std::optional<Tensor>& mask) {
  constexpr const char* kOp = "safeops::_total_variation";
  check_device(input, input, kOp, "input");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  int elements;
  const Walk walk = make_walk(input, mask, nullptr, kOp, elements);
  const int64_t images = input.size(0), shape[] = {2, images}, parts = 2 * images * walk.blocks;
  const Tensor out = safeops::empty(Shape(2, shape), DType::kDouble, input);
  const cudaStream_t stream = current_stream(input);
  const auto launch = [&](const Tensor& sums) {
    by_kind(walk, elements, [&](auto held, auto masked) {
      start_blocks(total_variation_kernel<decltype(held), masked()>, unsigned(images * walk.blocks), kBlock,
                   kBlock / 32 * int(sizeof(Total)), stream, walk, static_cast<char*>(sums.data_ptr()));
    });
  };
  if (walk.blocks == 1) {
    launch(out);
  } else if (images) {  // (the sums of no blocks are 0)
    const Tensor workspace = safeops::empty(Shape(1, &parts), DType::kDouble, input);
    if (walk.blocks) launch(workspace);
    merge_parts({static_cast<char*>(workspace.data_ptr()), static_cast<char*>(out.data_ptr()), walk.blocks}, 2 * images,
                stream);
  }
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_total_variation", TORCH_BOX(&total_variation)); }

}  // namespace safeops::cuda
