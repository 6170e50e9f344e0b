// grad_norm: the norm of all elements of a list of tensors together, in double: 1: sum |x|, 2: sqrt(sum x^2), inf: max
// |x|. Each warp leaves the norm's sum over its part, and one block adds those up: two launches, in a fixed order.
// I/O: read each tensor once.
#include "common/squares.h"
#include "scan.cuh"

namespace safeops::cuda {
namespace {

// The larger one, NaN above all.
__device__ inline double larger(double a, double b) { return a >= b || a != a ? a : b; }

struct One {
  double sum;
  __device__ void add(double x) { sum += fabs(x); }
  __device__ void merge(const One& other) { sum += other.sum; }
  __device__ double result() const { return sum; }
};

struct Two {
  Squares squares;
  __device__ void add(float x) { squares.middle += double(x) * double(x); }  // fp32 squared always fits
  __device__ void add(double x) { squares.add(x); }
  __device__ void merge(const Two& other) { squares.add(other.squares); }
  __device__ double result() const { return squares.norm(); }
};

struct Infinite {
  double most;
  __device__ void add(double x) { most = larger(most, fabs(x)); }
  __device__ void merge(const Infinite& other) { most = larger(most, other.most); }
  __device__ double result() const { return most; }
};

template <class Sum>
__device__ inline Sum merged(Sum a, const Sum& b) {
  a.merge(b);
  return a;
}

template <class Sum>
struct Norm {
  static constexpr bool kWrites = false;
  template <class Codec>
  static constexpr bool kPairs = false;
  char* parts;

  template <class Codec>
  using State = Sum;

  __device__ bool begin() const { return true; }
  template <class Codec>
  __device__ bool read(Sum& sum, typename Codec::Raw raw) const {
    sum.add(Codec::decode(raw));
    return false;
  }
  template <class Codec>
  __device__ void special(Sum&, typename Codec::Raw, int64_t) const {}
  template <class Codec>
  __device__ void finish(const Sum& lane, int, int64_t warp) const {
    constexpr int n = sizeof(Sum) / sizeof(double);
    const Sum sum = warp_reduce(lane, merged<Sum>);
    double word[n];
    std::memcpy(word, &sum, sizeof(Sum));
    if (threadIdx.x % 32) return;
#pragma unroll
    for (int i = 0; i < n; ++i) store(parts + (warp * n + i) * int64_t(sizeof(double)), word[i]);
  }
};

template <class Sum>
struct Parts {
  const char* parts;
  char* out;
  int64_t count;
};

constexpr int kMerging = 512;  // threads, of which each has eight sums under way

template <class Sum>
__global__ void __launch_bounds__(kMerging) merge_kernel(const __grid_constant__ Parts<Sum> parts) {
  constexpr int n = sizeof(Sum) / sizeof(double), kAtOnce = 8;
  Sum sum{};
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < parts.count; i += kMerging * kAtOnce) {
    uint64 word[kAtOnce][n] = {};  // beyond the end: sums of nothing
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
      for (int k = 0; k < n; ++k)
        if (i + u * kMerging < parts.count)
          word[u][k] = load<uint64>(parts.parts + (i + u * kMerging) * sizeof(Sum) + k * 8);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Sum part;
      std::memcpy(&part, word[u], sizeof(Sum));
      sum.merge(part);
    }
  }
  sum = block_reduce<kMerging>(sum, reinterpret_cast<Sum*>(shared_memory()), merged<Sum>);
  if (threadIdx.x == 0) store(parts.out, sum.result());
}

// ---- host

template <class Sum>
void total(const Launches& launches, const Tensor& like, const Tensor& result) {
  const int64_t doubles = launches.warps() * int64_t(sizeof(Sum) / sizeof(double));
  const Tensor workspace = safeops::empty(Shape(1, &doubles), DType::kDouble, like);
  const cudaStream_t stream = current_stream(like);
  char* parts = static_cast<char*>(workspace.data_ptr());
  launches.run(Norm<Sum>{parts}, stream);
  const Parts<Sum> all{parts, static_cast<char*>(result.data_ptr()), launches.warps()};
  start_blocks(merge_kernel<Sum>, 1, kMerging, kMerging / 32 * int(sizeof(Sum)), stream, all);
}

Tensor grad_norm(const std::vector<Tensor>& inputs, double ord) {
  constexpr const char* kOp = "safeops::_grad_norm";
  STD_TORCH_CHECK(ord == 1 || ord == 2 || ord == HUGE_VAL, kOp, ": no kernel for order ", ord);
  const Launches launches(inputs, kOp, false);
  const torch::stable::accelerator::DeviceGuard guard(inputs[0].get_device_index());
  const Tensor result = safeops::empty(Shape(), DType::kDouble, inputs[0]);
  if (ord == 1) total<One>(launches, inputs[0], result);
  else if (ord == 2) total<Two>(launches, inputs[0], result);
  else total<Infinite>(launches, inputs[0], result);
  check_launch(kOp);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_grad_norm", TORCH_BOX(&grad_norm)); }

}  // namespace safeops::cuda
