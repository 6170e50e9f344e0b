#include "sorted.cuh"

#define CCCL_DISABLE_NVTX  // ranges for a profiler, at each call
#include <cub/device/device_radix_sort.cuh>

namespace safeops::cuda {

uint64* sort_keys(uint64* keys, uint64* other, int64_t n, int begin, int end, const Tensor& like, cudaStream_t stream) {
  cub::DoubleBuffer<uint64> buffers(keys, other);
  size_t bytes = 0;
  const auto sort = [&](void* workspace) {
    const cudaError_t error = cub::DeviceRadixSort::SortKeys(workspace, bytes, buffers, n, begin, end, stream);
    STD_TORCH_CHECK(error == cudaSuccess, "safeops: sorting failed: ", cudaGetErrorString(error));
  };
  sort(nullptr);  // says how much it needs
  const int64_t words = int64_t(bytes / 8 + 1);
  const Tensor workspace = safeops::empty(Shape(1, &words), DType::kLong, like);
  sort(workspace.data_ptr());
  return buffers.Current();
}

}  // namespace safeops::cuda
