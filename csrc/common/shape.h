// Shapes and strides without tensors. The public functions check their arguments and explain a caller's mistake; the
// checks here only keep a direct call of a raw op from reading memory outside its tensors.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace safeops {

constexpr int kMaxDims = 64;

struct Shape {
  int ndim = 0;
  int64_t size[kMaxDims];

  Shape() = default;
  Shape(int ndim_, const int64_t* sizes) : ndim(ndim_) {
    STD_TORCH_CHECK(ndim <= kMaxDims, "safeops: at most 64 dimensions, got ", ndim);
    for (int d = 0; d < ndim; ++d) size[d] = sizes[d];
  }

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= size[d];
    return n;
  }

  bool is(int other_ndim, const int64_t* sizes) const {
    if (other_ndim != ndim) return false;
    for (int d = 0; d < ndim; ++d)
      if (sizes[d] != size[d]) return false;
    return true;
  }
};

// The shape to which a and b broadcast: (3, 1) and (4) give (3, 4).
inline Shape broadcast(const Shape& a, const Shape& b) {
  const Shape& longer = a.ndim >= b.ndim ? a : b;
  const Shape& shorter = a.ndim >= b.ndim ? b : a;
  Shape out(longer.ndim, longer.size);
  const int shift = longer.ndim - shorter.ndim;
  for (int d = 0; d < shorter.ndim; ++d) {
    int64_t& n = out.size[shift + d];
    if (n == 1) n = shorter.size[d];
    STD_TORCH_CHECK(shorter.size[d] == n || shorter.size[d] == 1, "safeops: sizes ", n, " and ", shorter.size[d],
                    " do not broadcast");
  }
  return out;
}

// Sets `out` to the strides (in elements) that read a tensor of `sizes` as if it had `shape`: 0 along broadcast dims.
inline void expand_strides(int ndim, const int64_t* sizes, const int64_t* strides, const Shape& shape, int64_t* out) {
  const int shift = shape.ndim - ndim;
  STD_TORCH_CHECK(shift >= 0, "safeops: a tensor of ", ndim, " dims does not broadcast to ", shape.ndim, " dims");
  for (int d = 0; d < shift; ++d) out[d] = 0;
  for (int d = 0; d < ndim; ++d) {
    const int64_t n = shape.size[shift + d];
    STD_TORCH_CHECK(sizes[d] == n || sizes[d] == 1, "safeops: size ", sizes[d], " does not broadcast to ", n);
    out[shift + d] = sizes[d] == 1 ? 0 : strides[d];
  }
}

inline void contiguous_strides(const Shape& shape, int64_t* strides) {
  int64_t step = 1;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    strides[d] = step;
    step *= shape.size[d] > 1 ? shape.size[d] : 1;
  }
}

// A walk over the elements of a strided tensor: its dims, innermost first, with their strides. push() adds a dim; it
// merges the new dim into the previous one if the two form one dim in memory.
struct Walk {
  int ndim = 0;
  int64_t size[kMaxDims], stride[kMaxDims];

  void push(int64_t n, int64_t step) {
    if (n == 1) return;
    if (ndim && step == stride[ndim - 1] * size[ndim - 1]) {
      size[ndim - 1] *= n;
    } else {
      size[ndim] = n;
      stride[ndim++] = step;
    }
  }

  // Offset of element number i of the walk, in units of `stride`.
  int64_t offset(int64_t i) const {
    if (ndim == 0) return 0;
    int64_t at = 0;
    for (int d = 0; d + 1 < ndim; ++d) {
      at += i % size[d] * stride[d];
      i /= size[d];
    }
    return at + i * stride[ndim - 1];
  }
};

// Returns `dim` as a number in [0, ndim); a 0-dim tensor accepts 0 and -1 and gets 0.
inline int resolve_dim(int64_t dim, int ndim) {
  const int64_t span = ndim == 0 ? 1 : ndim;
  STD_TORCH_CHECK(-span <= dim && dim < span, "safeops: dim ", dim, " is out of range for ", ndim, " dims");
  return static_cast<int>(dim < 0 ? dim + span : dim);
}

// The dims that a reduction removes. count < 0 means that the caller passed dim=None; dim=None and dim=() reduce all
// dims.
struct ReducedDims {
  bool reduced[kMaxDims];

  ReducedDims(const Shape& shape, const int64_t* dims, int64_t count) {
    const bool all = count <= 0;
    for (int d = 0; d < shape.ndim; ++d) reduced[d] = all;
    for (int64_t i = 0; i < count; ++i) {
      const int d = resolve_dim(dims[i], shape.ndim);
      if (shape.ndim == 0) continue;
      STD_TORCH_CHECK(!reduced[d], "safeops: dim ", d, " is named twice");
      reduced[d] = true;
    }
  }

  Shape output(const Shape& shape, bool keepdim) const {
    Shape out;
    for (int d = 0; d < shape.ndim; ++d) {
      if (!reduced[d])
        out.size[out.ndim++] = shape.size[d];
      else if (keepdim)
        out.size[out.ndim++] = 1;
    }
    return out;
  }
};

}  // namespace safeops
