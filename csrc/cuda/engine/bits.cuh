// For the ops that move elements: elements of any dtype as bit patterns, and plans that walk operands in row-major
// order.
#pragma once

#include "common/elements.h"
#include "launch.cuh"
#include "tensors.h"
#include "types.cuh"

namespace safeops::cuda {

// A view of a tensor, whose dims, strides and element width can be changed.
struct Bits {
  Shape shape;
  int64_t stride[safeops::kMaxDims];  // in elements of `width` bytes
  char* data;
  int64_t width;

  explicit Bits(const Tensor& t) : shape(View(t).shape()), data(View(t).data), width(element_bytes(t)) {
    for (int d = 0; d < shape.ndim; ++d) stride[d] = View(t).strides[d];
  }

  void push(int64_t n, int64_t step) {
    STD_TORCH_CHECK(shape.ndim < safeops::kMaxDims, "safeops: too many dimensions");
    shape.size[shape.ndim] = n;
    stride[shape.ndim++] = step;
  }

  // Turns a 0-dim tensor into a vector of one element.
  void make_vector() {
    if (shape.ndim == 0) push(1, 1);
  }

  // Turns the strides from elements into bytes.
  void in_bytes() {
    for (int d = 0; d < shape.ndim; ++d) stride[d] *= width;
    width = 1;
  }

  // Splits each element of 16 bytes into two of 8 bytes, along an added last dim. Narrower elements stay.
  void split() {
    if (width != 16) return;
    for (int d = 0; d < shape.ndim; ++d) stride[d] *= 2;
    push(2, 1);
    width = 8;
  }

  Type type() const { return width == 1 ? kBool : width == 2 ? kF16 : width == 4 ? kF32 : kF64; }

  Operand dims(int from, int to) const { return {data, type(), to - from, shape.size + from, stride + from}; }
  Operand all() const { return dims(0, shape.ndim); }
};

// A plan that walks the operands in row-major order of `shape`, whatever their layouts. Its operand 0 only defines that
// order, and no memory is accessed through it.
template <int N>
Plan<N + 1> plan_in_order(const Shape& shape, const std::array<Operand, N>& operands) {
  int64_t strides[safeops::kMaxDims];
  contiguous_strides(shape, strides);
  std::array<Operand, N + 1> all{Operand{operands[0].data, kBool, shape.ndim, shape.size, strides}};
  for (int i = 0; i < N; ++i) all[i + 1] = operands[i];
  return make_plan<N + 1>(shape, all);
}

// How many elements a thread loads before it uses the first.
template <class T>
constexpr int kInFlight = sizeof(T) == 16 ? 2 : 4;

// Returns the largest width of a packet, a power of two from `width` (of an element) to 16 bytes, that divides
// `offsets`: the bitwise or of all addresses, offsets and sizes in bytes.
inline int64_t packet_width(int64_t offsets, int64_t width) {
  int64_t wide = 16;
  while (wide > width && offsets % wide) wide /= 2;
  return wide;
}

inline int64_t address(const void* p) { return int64_t(uintptr_t(p)); }

// Calls f(T()) for a T of `width` bytes. by_width takes up to 8 bytes: its callers have split() wider elements.
template <class F>
void by_width(int64_t width, const F& f) {
  switch (width) {
    case 1: return f(uint8_t());
    case 2: return f(uint16_t());
    case 4: return f(uint32_t());
    default: return f(uint64());
  }
}
template <class F>
void by_any_width(int64_t width, const F& f) {
  if (width == 16) return f(uint4());
  by_width(width, f);
}

// Returns a T, which is one element of `width` bytes or a packet of such elements. Each element has the bits `fill`; in
// an element of 16 bytes (complex) these are the real part, and the imaginary part is 0.
template <class T>
T filled(uint64_t fill, int64_t width) {
  T packet{};
  for (int64_t at = 0; at < int64_t(sizeof(T)); at += width)
    std::memcpy(reinterpret_cast<char*>(&packet) + at, &fill, width < 8 ? width : 8);
  return packet;
}

}  // namespace safeops::cuda
