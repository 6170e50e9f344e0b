// A launch reads its operands through base pointers and byte strides over one broadcast shape. Host only.
//
// Dimensions are ordered by the output's strides, innermost first, and two are merged wherever every operand allows it.
// So if all operands are dense in one memory format, one dimension is left.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "common/shape.h"

namespace safeops::cuda {

enum Type : int32_t { kF16, kBF16, kF32, kF64, kBool };  // types of elements

__host__ __device__ constexpr int size_of(Type type) {
  return type == kBool ? 1 : type <= kBF16 ? 2 : type == kF32 ? 4 : 8;
}

constexpr int kLoopDims = 25;  // most dims after merging, as many as torch's own CUDA loops take

struct Operand {  // broadcasts to the launch's shape; data == nullptr: an output that is not wanted
  void* data;
  Type type;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
};

// n / d for n < 2^31 by one multiplication: q = (umulhi(n, multiplier) + n) >> shift
// (Granlund & Montgomery 1994, figure 4.1).
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    while ((uint64_t(1) << shift) < d) ++shift;
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << shift) - d)) / d + 1);
  }
};

template <int N>  // N operands: outputs first, then inputs, a byte mask last
struct Plan {
  int64_t numel = 1;
  int ndim = 0;
  Type type[N];
  char* base[N];
  int64_t size[kLoopDims];
  int64_t stride[N][kLoopDims];  // in bytes
  Divider by[kLoopDims];         // by[d] divides by size[d]; if packets lie along dim 0, by[0] by the packets of a row
};

template <int N>
Plan<N> make_plan(const Shape& shape, const std::array<Operand, N>& operands) {
  Plan<N> plan;
  int64_t stride[N][safeops::kMaxDims];
  int lead = 0;  // the operand whose memory order the loop follows: the first output that exists
  while (operands[lead].data == nullptr && lead + 1 < N) ++lead;
  for (int i = 0; i < N; ++i) {
    const Operand& x = operands[i];
    plan.type[i] = x.type;
    plan.base[i] = static_cast<char*>(x.data);
    expand_strides(x.data ? int(x.ndim) : 0, x.sizes, x.strides, shape, stride[i]);
    for (int dim = 0; dim < shape.ndim; ++dim) stride[i][dim] *= size_of(x.type);
  }
  int order[safeops::kMaxDims], dims = 0;
  for (int dim = shape.ndim - 1; dim >= 0; --dim) {
    plan.numel *= shape.size[dim];
    if (shape.size[dim] == 1) continue;
    int at = dims++;
    for (; at > 0 && stride[lead][order[at - 1]] > stride[lead][dim]; --at) order[at] = order[at - 1];
    order[at] = dim;
  }
  if (plan.numel == 0) return plan;
  for (int k = 0; k < dims; ++k) {
    const int dim = order[k];
    bool merges = plan.ndim > 0;
    for (int i = 0; i < N && merges; ++i)
      merges = stride[i][dim] == plan.stride[i][plan.ndim - 1] * plan.size[plan.ndim - 1];
    if (merges) {
      plan.size[plan.ndim - 1] *= shape.size[dim];
      continue;
    }
    STD_TORCH_CHECK(plan.ndim < kLoopDims, "safeops: more than ", kLoopDims, " dimensions that do not merge");
    plan.size[plan.ndim] = shape.size[dim];
    for (int i = 0; i < N; ++i) plan.stride[i][plan.ndim] = stride[i][dim];
    ++plan.ndim;
  }
  if (plan.ndim == 0) {  // the shape has one element
    plan.ndim = 1;
    plan.size[0] = 1;
    for (int i = 0; i < N; ++i) plan.stride[i][0] = operands[i].data ? size_of(operands[i].type) : 0;
  }
  return plan;
}

// True if all operands are dense in one order of their dims, and the outputs (the first `outputs` operands) are aligned
// to 16 bytes. The loop then needs no index arithmetic.
template <int N>
bool is_flat(const Plan<N>& plan, int outputs) {
  if (plan.ndim != 1) return false;
  for (int i = 0; i < N; ++i) {
    if (plan.base[i] == nullptr) continue;
    if (plan.stride[i][0] != size_of(plan.type[i]) || (i < outputs && uintptr_t(plan.base[i]) % 16)) return false;
  }
  return true;
}

// True if rows, along the innermost dimension, consist of whole packets of `elements` elements: each operand is dense
// there or (inputs only) repeats one element, every packet is aligned, and 31 bits are enough to index the packets.
template <int N>
bool has_rows(const Plan<N>& plan, int elements, int outputs) {
  if (plan.size[0] % elements || plan.numel / elements >= (int64_t(1) << 31)) return false;
  for (int i = 0; i < N; ++i) {
    if (plan.base[i] == nullptr) continue;
    const int size = size_of(plan.type[i]);
    if (plan.stride[i][0] != size && (plan.stride[i][0] != 0 || i < outputs)) return false;
    if (plan.stride[i][0] == 0) continue;
    const int64_t alignment = size == 1 ? elements : 16;
    if (int64_t(uintptr_t(plan.base[i]) % alignment)) return false;
    for (int dim = 1; dim < plan.ndim; ++dim)
      if (plan.stride[i][dim] % alignment) return false;
  }
  return true;
}

template <int N>
void set_dividers(Plan<N>& plan, int elements) {
  for (int dim = 0; dim < plan.ndim; ++dim) plan.by[dim] = Divider(uint32_t(plan.size[dim] / (dim ? 1 : elements)));
}

// Calls launch(plan) for parts of fewer than 2^31 elements. A larger plan is halved along its outermost dimension,
// recursively.
#ifndef SAFEOPS_INDEX_LIMIT  // tests define a small one
#define SAFEOPS_INDEX_LIMIT (int64_t(1) << 31)
#endif
template <int N, class Launch>
void for_each_part(Plan<N> plan, const Launch& launch) {
  if (plan.numel < SAFEOPS_INDEX_LIMIT) return launch(plan);
  while (plan.size[plan.ndim - 1] == 1) --plan.ndim;
  const int outer = plan.ndim - 1;
  const int64_t size = plan.size[outer], inner = plan.numel / size, at = size / 2;
  plan.size[outer] = at;
  plan.numel = inner * at;
  for_each_part(plan, launch);
  plan.size[outer] = size - at;
  plan.numel = inner * (size - at);
  for (int i = 0; i < N; ++i)
    if (plan.base[i]) plan.base[i] += at * plan.stride[i][outer];
  for_each_part(plan, launch);
}

}  // namespace safeops::cuda
