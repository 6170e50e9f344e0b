// total_variation: the gradient, dx = g times the sum of sign(x - neighbour) over the kept neighbours.
// I/O: reads x and the mask; a pixel that two threads need comes from the cache the second time; writes dx.
#include "neighbours.cuh"

namespace safeops::cuda {
namespace {

struct Upstream {
  const char* grad;          // upstream gradient of each image, or of the sum or mean over images
  int64_t image;             // grad's stride from image to image, in bytes
  const char* result_slope;  // d(sum or mean)/d(image); null: 1
};

template <class T, bool kMask>
__global__ void __launch_bounds__(kBlock, 2)
    total_variation_backward_kernel(const __grid_constant__ Walk walk, const __grid_constant__ Upstream upstream) {
  using C = typename T::Value;
  const char* grad = upstream.grad + blockIdx.x / walk.blocks * upstream.image;
  const C g = upstream.result_slope ? C(load<C>(grad) * load<double>(upstream.result_slope)) : load<C>(grad);
  each_patch(walk, [&](uint32_t image, uint32_t patch) {
    using P = Patch<T, kMask, true>;
    constexpr int V = P::V;
    const P p(walk, image, patch);
    typename P::Adjacent left[kRows], right[kRows];
    const int64_t step = V == 1 ? walk.dim[0].step : 1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = p.adjacent(i, -step), right[i] = p.adjacent(i, V - 1 + step);
    const auto sign = [](C d) { return fabs(d) > 0 ? copysign(C(1), d) : d; };  // 0 at 0, NaN at NaN
    C sum[P::kPatchRows][V] = {};
    unsigned paired[P::kPatchRows] = {};
    if (walk.dim[1].step) {
#pragma unroll
      for (int i = 0; i + 1 < P::kPatchRows; ++i) {
        const unsigned both = p.keep[i] & p.keep[i + 1];
        paired[i] |= both, paired[i + 1] |= both;
        p.pairs(p.row[i], both, p.row[i + 1], [&](int k, C d) { sum[i][k] += sign(d), sum[i + 1][k] -= sign(d); });
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const T& row = p.row[i + 1];
      const unsigned keep = p.keep[i + 1], both = V > 1 && walk.dim[0].step ? keep & keep >> 1 : 0;
      C(&to)[V] = sum[i + 1];
      const unsigned with_left = left[i].kept & keep & 1, with_right = right[i].kept & keep >> (V - 1) & 1;
      paired[i + 1] |= both | both << 1 | with_left | with_right << (V - 1);
      p.inner_pairs(row, both, [&](int k, C d) { to[k] += sign(d), to[k + 1 < V ? k + 1 : 0] -= sign(d); });
      if (with_left) to[0] += sign(row.get(0, walk.type) - T::decode(left[i].word, walk.type));
      if (with_right) to[V - 1] += sign(row.get(V - 1, walk.type) - T::decode(right[i].word, walk.type));
    }
#pragma unroll 1
    for (int j = 4; j < 8; ++j)  // the neighbours before and after along dims 2 and 3
      p.each_along(j / 2, j % 2 ? 1 : -1, [&](int i, const T& other, unsigned kept) {
        const unsigned both = kept & p.keep[i + 1];
        paired[i + 1] |= both;
        p.pairs(p.row[i + 1], both, other, [&](int k, C d) { sum[i + 1][k] += sign(d); });
      });
    char* dx = walk.dx + image * walk.dx_image;
#pragma unroll
    for (int d = 0; d < 4; ++d) dx += p.at[d] * walk.dim[d].dx;
#pragma unroll
    for (int i = 0; i < kRows; ++i, dx += walk.dim[1].dx) {
      if (!p.has(i)) continue;
      C value[V];
#pragma unroll
      for (int k = 0; k < V; ++k) value[k] = paired[i + 1] >> k & 1 ? g * sum[i + 1][k] : C(0);  // even if g is NaN
      T::write(dx, value, walk.type);
    }
  });
}

// result_slope: the second result of _total_variation for a mean or sum, else empty.
Tensor total_variation_backward(const Tensor& grad, const Tensor& result_slope, const Tensor& input,
                                const std::optional<Tensor>& mask) {
  constexpr const char* kOp = "safeops::_total_variation_backward";
  check_device(grad, input, kOp, "grad"), check_device(result_slope, input, kOp, "result_slope");
  const safeops::View x(input), g(grad), s(result_slope);
  const bool reduced = s.ndim == 0;
  STD_TORCH_CHECK(g.dtype == wide(x.dtype, x.dtype) && (reduced ? g.ndim == 0 : g.shape().is(1, x.sizes)) &&
                      s.dtype == DType::kDouble, kOp,
                  ": grad and result_slope must be of the results of _total_variation");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor dx = output_like(input, x.shape(), float_type(input, kOp, "input"));
  int elements;
  const Walk walk = make_walk(input, mask, &dx, kOp, elements);
  const int64_t images = x.sizes[0];
  const Upstream upstream{g.data, reduced ? 0 : g.strides[0] * size_of(Type(g.dtype)), reduced ? s.data : nullptr};
  if (images && walk.blocks)
    by_kind(walk, elements, [&](auto packet_type, auto masked) {
      start_blocks(total_variation_backward_kernel<decltype(packet_type), masked()>, unsigned(images * walk.blocks),
                   kBlock, 0, current_stream(input), walk, upstream);
    });
  check_launch(kOp);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_total_variation_backward", TORCH_BOX(&total_variation_backward));
}

}  // namespace safeops::cuda
