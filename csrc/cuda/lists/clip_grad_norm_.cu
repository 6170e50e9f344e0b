// clip_grad_norm_: multiplies every tensor of a list by one factor, in place, in fp32 (fp64 tensors in fp64), rounded
// once. The factor is read on the device. A factor below the normal numbers of fp32 would lose digits, so it is
// multiplied by 2^100, and each product by 2^-100. If the factor is exactly 1, nothing is written.
// I/O: read and write each tensor once.
#include "scan.cuh"

namespace safeops::cuda {
namespace {

struct Scale {
  static constexpr bool kWrites = true;
  static constexpr int kShared = 0;
  template <class Codec>
  static constexpr bool kPairs = false;
  const char* factor;
  Type type;
  double by, lift;

  template <class Codec>
  struct State {};

  __device__ bool begin() {
    by = Dynamic<double>::decode(load_raw<uint64>(factor, type), type);
    lift = fabs(by) < std::numeric_limits<float>::min() ? 0x1p100 : 1;
    return by != 1;
  }
  template <class Codec>
  __device__ typename Codec::Raw write(typename Codec::Raw raw) const {
    using Value = typename Codec::Value;
    return Codec::encode(Codec::decode(raw) * Value(by * lift) * Value(1 / lift));
  }
};

void scale(const std::vector<Tensor>& tensors, const Tensor& factor) {
  constexpr const char* kOp = "safeops::_scale_";
  if (tensors.empty()) return;
  const Type type = float_type(factor, kOp, "factor");
  STD_TORCH_CHECK(factor.numel() == 1, kOp, ": factor must have one element");
  check_device(factor, tensors[0], kOp, "factor");
  for (const Tensor& t : tensors) {
    const safeops::View view(t);
    for (int d = 0; d < view.ndim; ++d)
      STD_TORCH_CHECK(view.shape().numel() == 0 || view.sizes[d] == 1 || view.strides[d] != 0, kOp,
                      ": a tensor whose elements share memory cannot be written");
  }
  const Launches launches(tensors, kOp, false);
  const torch::stable::accelerator::DeviceGuard guard(factor.get_device_index());
  launches.run(Scale{static_cast<const char*>(factor.data_ptr()), type, 1, 1}, current_stream(factor));
  check_launch(kOp);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) { m.impl("_scale_", TORCH_BOX(&scale)); }

}  // namespace safeops::cuda
