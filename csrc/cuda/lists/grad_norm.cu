// grad_norm: the norm of all elements of a list of tensors, in fp64. Order 1: sum |x|; 2: sqrt(sum x^2); inf: max |x|.
// Each block stores the sum over its part. The last block to finish merges the sums, in a fixed order.
// I/O: read each tensor once.
#include "common/squares.h"
#include "cuda/engine/last_block.cuh"
#include "scan.cuh"

namespace safeops::cuda {
namespace {

// The larger number, or NaN if one is NaN.
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
struct Norm {
  static constexpr bool kWrites = false;
  static constexpr int kShared = kThreads / 32 * sizeof(Sum);
  template <class Codec>
  static constexpr bool kPairs = false;
  char *parts, *out;
  unsigned* counter;
  int64_t blocks;  // number of blocks of all launches together

  template <class Codec>
  using State = Sum;

  __device__ static Sum* warps() { return reinterpret_cast<Sum*>(shared_memory()); }

  __device__ bool begin() const { return true; }
  template <class Codec>
  __device__ bool read(Sum& sum, typename Codec::Raw raw) const {
    sum.add(Codec::decode(raw));
    return false;
  }
  template <class Codec>
  __device__ void special(Sum&, typename Codec::Raw, int64_t) const {}
  template <class Codec>
  __device__ void finish(const Sum& lane, int) const {
    const Sum sum = warp_reduce(lane, merged<Sum>);
    if (threadIdx.x % 32 == 0) warps()[threadIdx.x / 32] = sum;
  }

  __device__ void fold(int64_t block, int count) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      Sum sum = warps()[0];
      for (int warp = 1; warp < count; ++warp) sum.merge(warps()[warp]);
      store_part(parts, block, sum);
    }
    if (!is_last_block(counter, blocks)) return;
    const Sum sum = merge_parts<kThreads, Sum>(parts, blocks);
    if (threadIdx.x == 0) store(out, sum.result());
  }
};

// ---- host

template <class Sum>
void total(const Launches& launches, const Tensor& like, const Tensor& result) {
  const cudaStream_t stream = current_stream(like);
  char* out = static_cast<char*>(result.data_ptr());
  if (launches.blocks() == 0) {
    cudaMemsetAsync(out, 0, sizeof(double), stream);
    return;
  }
  const int64_t doubles = launches.blocks() * int64_t(sizeof(Sum) / sizeof(double));
  const Tensor parts = safeops::empty(Shape(1, &doubles), DType::kDouble, like), counter = zero_counter(like, stream);
  launches.run(Norm<Sum>{static_cast<char*>(parts.data_ptr()), out, static_cast<unsigned*>(counter.data_ptr()),
                         launches.blocks()},
               stream);
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
