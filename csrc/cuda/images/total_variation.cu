// total_variation: for each image the sum of |x - neighbour| over the pairs of kept neighbours along the spatial dims;
// then the sum over the images, or the mean over those that have a kept pixel.
// I/O: reads x and the mask; a pixel that two threads need comes from the cache the second time.
#include <tuple>

#include "common/reducer.h"
#include "neighbours.cuh"
#include "parts.cuh"

namespace safeops::cuda {
namespace {

struct Total {
  double sum, count;  // count: the kept pixels of an image; or, in a total of images, the images with a kept pixel
  __device__ void merge(const Total& other) { sum += other.sum, count += other.count; }
};

struct Result {
  char *value, *result_slope;
  Reducer reducer;
};

template <class T, bool kMask>
__global__ void __launch_bounds__(kBlock, kMask ? 2 : 4)
    total_variation_kernel(const __grid_constant__ Walk walk, const __grid_constant__ Groups groups,
                           const __grid_constant__ Result to) {
  using C = typename T::Value;
  Total total{0, 0};
  each_patch(walk, [&](uint32_t image, uint32_t patch) {
    using P = Patch<T, kMask, false>;
    const P p(walk, image, patch);
    typename P::Adjacent right[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) right[i] = p.adjacent(i, P::V == 1 ? walk.dim[0].step : P::V);
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
      p.each_along(d, 1, [&](int i, const T& other, unsigned kept) {
        p.pairs(p.row[i], p.keep[i] & kept, other, add);
      });
    total.sum += sum, total.count += count;
  });
  total = block_reduce<kBlock>(total, reinterpret_cast<Total*>(shared_memory()), merged<Total>);
  const Reducer& by = to.reducer;
  const auto put = [&](int64_t at, const Total& sum) {
    store(to.value + at * int64_t(sizeof(C)), C(by.value(sum.sum, sum.count)));
  };
  const auto finish_image = [&](int64_t image, const Total& sum) {
    if (by.kind == Reducer::kNone) put(image, sum);
    return Total{sum.sum, sum.count > 0 ? 1.0 : 0.0};
  };
  merge_groups(groups, total, finish_image, [&](const Total& all) {
    if (by.kind == Reducer::kNone) return;
    put(0, all);
    store(to.result_slope, by.slope(all.count));
  });
}

std::tuple<Tensor, Tensor> total_variation(const Tensor& input, const std::optional<Tensor>& mask, int64_t reduction,
                                           bool empty_nan) {
  constexpr const char* kOp = "safeops::_total_variation";
  check_device(input, input, kOp, "input");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  int elements;
  const Walk walk = make_walk(input, mask, nullptr, kOp, elements);
  const int64_t images = input.size(0);
  const bool none = reduction == Reducer::kNone;
  const Type type = walk.type == kF64 ? kF64 : kF32;
  const Tensor value = safeops::empty(Shape(none, &images), DType(type), input);
  const Tensor result_slope = none ? empty_vector(DType::kDouble, input)
                                   : safeops::empty(Shape(), DType::kDouble, input);
  const cudaStream_t stream = current_stream(input);
  const Result to{static_cast<char*>(value.data_ptr()), static_cast<char*>(result_slope.data_ptr()),
                  {reduction, empty_nan}};
  if (images && walk.blocks) {
    const MergeBuffers<Total> buffers(images, walk.blocks, input, stream);
    by_kind(walk, elements, [&](auto packet_type, auto masked) {
      start_blocks(total_variation_kernel<decltype(packet_type), masked()>, unsigned(images * walk.blocks), kBlock,
                   kBlock / 32 * int(sizeof(Total)), stream, walk, buffers.groups, to);
    });
  } else {
    fill_empty(value, result_slope, empty_nan, stream);
  }
  check_launch(kOp);
  return {value, result_slope};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_total_variation", TORCH_BOX(&total_variation)); }

}  // namespace safeops::cuda
