// Sums 1 - SSIM over the windows of each plane, or over all windows.
#pragma once

#include "common/reducer.h"
#include "images.h"
#include "parts.cuh"

namespace safeops::cuda {

// Where a kernel writes its result: the map, if map.base is not null; else value, which is the sums of each plane
// (3, planes), or the sum or mean of all windows, with result_slope = d(sum or mean)/d(one window).
struct Result {
  Field map;
  char *value, *result_slope;
  int64_t planes;
  bool similarity;  // the result is of SSIM instead of 1 - SSIM
  Reducer reducer;

  template <class C>
  __device__ C map_value(C loss) const {
    return similarity ? 1 - loss : loss;
  }
};

// Allocates the results of _ssim: value (a map or sums) and result_slope (see Result), which is empty unless value is a
// mean or sum of all windows.
struct Outputs {
  Tensor value, result_slope;
  int64_t planes;
  Reducer reducer;
  bool similarity;

  // The result is the sums of each plane. It is written to `sums`.
  Outputs(const Tensor& sums, const ImageInfo& info)
      : value(sums), result_slope(empty_vector(DType::kDouble, sums)),
        planes(info.shape.size[0] * info.shape.size[1]), reducer{Reducer::kPlanes, false}, similarity(false) {}
  Outputs(const Tensor& input, const ImageInfo& info, const Reducer& by, bool similarity_)
      : value(make(input, info, by.kind)),
        result_slope(by.kind == Reducer::kMean || by.kind == Reducer::kSum
                  ? safeops::empty(Shape(), DType::kDouble, input) : empty_vector(DType::kDouble, input)),
        planes(info.shape.size[0] * info.shape.size[1]), reducer(by), similarity(similarity_) {}

 private:
  static Tensor make(const Tensor& input, const ImageInfo& info, int64_t kind) {
    const DType type = info.wide ? DType::kDouble : DType::kFloat;
    if (kind == Reducer::kNone) return safeops::empty(info.map, type, input);
    const int64_t sizes[] = {3, info.shape.size[0], info.shape.size[1]};
    if (kind == Reducer::kPlanes) return safeops::empty(Shape(3, sizes), DType::kDouble, input);
    return safeops::empty(Shape(), type, input);
  }
};

namespace {

struct Sums {
  double loss, contrast, count;
  __device__ void merge(const Sums& other) { loss += other.loss, contrast += other.contrast, count += other.count; }
};

// Reduces the sums of all threads of all blocks to the result. sums: this thread's.
template <class C>
__device__ void reduce_windows(const Groups& groups, const Result& to, Sums sums) {
  __syncthreads();  // shared memory may now be overwritten
  sums = block_reduce<kGroupThreads>(sums, reinterpret_cast<Sums*>(shared_memory()), merged<Sums>);
  const Reducer& by = to.reducer;
  const auto finish_plane = [&](int64_t plane, const Sums& sum) {
    if (by.kind == Reducer::kPlanes) {
      char* p = to.value + plane * int64_t(sizeof(double));
      const int64_t step = to.planes * int64_t(sizeof(double));
      store(p, sum.loss), store(p + step, sum.contrast), store(p + 2 * step, sum.count);
    }
    return sum;
  };
  merge_groups(groups, sums, finish_plane, [&](const Sums& all) {
    if (by.kind == Reducer::kPlanes) return;
    const double result_slope = by.slope(all.count);
    store(to.value, C(by.value(to.similarity ? all.count - all.loss : all.loss, all.count)));
    store(to.result_slope, to.similarity ? -result_slope : result_slope);
  });
}

// ---- host

// Calls launch(result, groups), which starts the kernel; without blocks, writes an empty sum. blocks: of each plane.
template <class Launch>
void sum_windows(const Outputs& out, const Tensor& like, const ImageInfo& info, int64_t blocks, cudaStream_t stream,
                 const Launch& launch) {
  Result to{{}, static_cast<char*>(out.value.data_ptr()), static_cast<char*>(out.result_slope.data_ptr()), out.planes,
            out.similarity, out.reducer};
  if (out.planes * blocks == 0) return fill_empty(out.value, out.result_slope, to.reducer.empty_nan, stream);
  if (to.reducer.kind == Reducer::kNone) {
    to.map = field(out.value, Type(dtype_of(out.value)), info.map);
    return launch(to, Groups());
  }
  const bool each = to.reducer.kind == Reducer::kPlanes;
  const MergeBuffers<Sums> buffers(each ? out.planes : 1, each ? blocks : out.planes * blocks, like, stream);
  launch(to, buffers.groups);
}

}  // namespace
}  // namespace safeops::cuda
