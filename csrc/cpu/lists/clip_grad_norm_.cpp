// Multiplies every tensor of a list by one factor in place: in fp32, or in fp64 for fp64 tensors and for factors below
// the normal numbers of fp32. A factor of exactly 1 writes nothing.
// I/O: read and write each tensor once.
#include "cpu/lists/multi_tensor.h"

namespace safeops::cpu {

namespace {

template <class C>
void scale_loop(const C* x, int64_t n, C factor, C* out) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

template <class C>
void scale_piece(const Member& member, int64_t start, int64_t stop, double factor) {
  Sink<C> sink;
  sink.bind(member.view, member.shape, member.order);
  alignas(64) C buffer[kBuffer];
  const auto loop = pick<&scale_loop<C>>();
  each_chunk<C>(member, start, stop, [&](const C* x, int64_t at, int64_t n) {
    loop(x, n, static_cast<C>(factor), sink.target(at, buffer));
    sink.commit(at, n, buffer);
  });
}

void scale(const std::vector<Tensor>& tensors, const Tensor& factor) {
  const TensorList list(tensors, "_scale_");
  const double by = read_scalar(View(factor));
  for (const Member& member : list.members())
    for (int d = 0; d < member.shape.ndim; ++d)
      STD_TORCH_CHECK(member.numel == 0 || member.shape.size[d] == 1 || member.view.strides[d] != 0,
                      "_scale_: a tensor whose elements share memory cannot be written");
  if (by == 1) return;
  const bool tiny = by != 0 && std::fabs(by) < std::numeric_limits<float>::min();
  list.each_piece([&](const Member& member, int64_t, int64_t start, int64_t stop) {
    if (tiny || member.view.dtype == DType::kDouble)
      scale_piece<double>(member, start, stop, by);
    else
      scale_piece<float>(member, start, stop, by);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_scale_", TORCH_BOX(&scale)); }

}  // namespace safeops::cpu
