#include "cpu/engine/operand.h"

#include <algorithm>

namespace safeops::cpu {

Order Order::contiguous(const Shape& shape) {
  Order order;
  for (int d = shape.ndim - 1; d >= 0; --d) order.push(d, shape.size[d]);
  return order;
}

Order Order::by_strides(const Shape& shape, const int64_t* strides, const bool* only, bool wanted) {
  Order order;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    if (shape.size[d] == 1 || (only && only[d] != wanted)) continue;
    // Insertion sort: the dims are few, and mostly in order already.
    int at = order.ndim++;
    for (int i = at - 1; i >= 0 && strides[d] != 0; --i) {
      const int64_t other = strides[order.dim[i]];
      if (other == 0) continue;
      if (other <= strides[d]) break;
      for (; at > i; --at) order.dim[at] = order.dim[at - 1];
    }
    order.dim[at] = d;
  }
  for (int i = 0; i < order.ndim; ++i) order.size[i] = shape.size[order.dim[i]];
  return order;
}

void Operand::bind_walk(const View& view, const Shape& shape, const Order& order) {
  data = view.data;
  element = size_of(view.dtype);
  int64_t steps[kMaxDims];
  expand_strides(view.ndim, view.sizes, view.strides, shape, steps);
  ndim = 0;
  for (int i = 0; i < order.ndim; ++i) push(order.size[i], steps[order.dim[i]] * element);
  if (ndim == 0) {
    size[0] = 1;
    stride[ndim++] = element;
  }
  if (ndim > 1)
    kind = Kind::kStrided;
  else if (stride[0] == 0)
    kind = Kind::kConstant;
  else if (stride[0] != element)
    kind = Kind::kStrided;
  else
    kind = convert ? Kind::kConvert : Kind::kDirect;
}

namespace {

constexpr int64_t kLongRun = 16;  // elements; runs at least this long go through the vectorised conversion

// Prefetches `length` elements, starting kAhead elements beyond element `index` of the innermost run at `row`. If that
// is beyond the end of this run, prefetches in the next run instead.
template <int kWrite>
__attribute__((always_inline)) inline void prefetch_run(const Operand& op, const char* row, int64_t index,
                                                        int64_t length) {
  if (op.stride[0] != op.element || length < kLongRun) return;
  const int64_t ahead = index + kAhead;
  const bool same = op.ndim == 1 || ahead < op.size[0];
  const char* from = row + (same ? ahead * op.element : op.stride[1] + (ahead - op.size[0]) * op.element);
  if (!same && ahead >= 2 * op.size[0]) return;
  for (int64_t byte = 0, end = length * op.element; byte < end; byte += 64) __builtin_prefetch(from + byte, kWrite);
}

// Splits elements [start, start + n) of the walk at the ends of the innermost dim. Calls run(pointer, stride, done,
// length) for each run of `length` elements; `done` elements came before it.
template <int kWrite, class Run>
inline void for_runs(const Operand& op, int64_t start, int64_t n, const Run& run) {
  int64_t index[kMaxDims];
  char* row = op.data;
  for (int d = 0; d < op.ndim; ++d) {
    index[d] = start % op.size[d];
    start /= op.size[d];
    if (d > 0) row += index[d] * op.stride[d];
  }
  for (int64_t done = 0; done < n;) {
    const int64_t length = std::min(n - done, op.size[0] - index[0]);
    prefetch_run<kWrite>(op, row, index[0], length);
    run(row + index[0] * op.stride[0], op.stride[0], done, length);
    done += length;
    index[0] = 0;
    for (int d = 1; d < op.ndim; ++d) {
      row += op.stride[d];
      if (++index[d] < op.size[d]) break;
      row -= op.stride[d] * op.size[d];
      index[d] = 0;
    }
  }
}

template <class S, class C>
inline C read(const char* at) {
  S value;
  std::memcpy(&value, at, sizeof(S));
  if constexpr (std::is_integral_v<C>)
    return value;
  else if constexpr (std::is_same_v<S, double>)
    return Narrow<C>::from(value);
  else
    return static_cast<C>(widen(value));
}

template <class S, class C>
const void* gather(const Operand& op, int64_t start, int64_t n, void* buffer) {
  const void* result = buffer;
  for_runs<0>(op, start, n, [&](const char* at, int64_t stride, int64_t done, int64_t length) {
    C* out = static_cast<C*>(buffer) + done;
    if (stride == 0) {
      const C value = read<S, C>(at);
      for (int64_t i = 0; i < length; ++i) out[i] = value;
    } else if (stride == static_cast<int64_t>(sizeof(S)) && length >= kLongRun) {
      if (op.convert)
        op.convert(at, out, length);
      else if (length == n)
        result = at;
      else
        std::memcpy(out, at, length * sizeof(S));
    } else {
      for (int64_t i = 0; i < length; ++i) out[i] = read<S, C>(at + i * stride);
    }
  });
  return result;
}

template <class S, class C>
const void* scatter(const Operand& op, int64_t start, int64_t n, void* buffer) {
  for_runs<1>(op, start, n, [&](char* at, int64_t stride, int64_t done, int64_t length) {
    const C* in = static_cast<const C*>(buffer) + done;
    if (stride == static_cast<int64_t>(sizeof(S)) && length >= kLongRun) {
      if (op.convert)
        op.convert(in, at, length);
      else
        std::memcpy(at, in, length * sizeof(S));
    } else {
      for (int64_t i = 0; i < length; ++i) {
        if constexpr (std::is_integral_v<C>) {
          std::memcpy(at + i * stride, in + i, sizeof(S));
        } else if constexpr (std::is_same_v<S, double>) {
          const double value = in[i];
          std::memcpy(at + i * stride, &value, sizeof(S));
        } else {
          const S value = Narrow<S>::from(in[i]);
          std::memcpy(at + i * stride, &value, sizeof(S));
        }
      }
    }
  });
  return nullptr;
}

using Strided = const void* (*)(const Operand&, int64_t, int64_t, void*);

template <class C>
Strided find_gather(DType from) {
  if constexpr (std::is_integral_v<C>) {
    return pick<&gather<C, C>>();
  } else {
    switch (from) {
      case DType::kHalf: return pick<&gather<Half, C>>();
      case DType::kBFloat16: return pick<&gather<BFloat16, C>>();
      case DType::kFloat: return pick<&gather<float, C>>();
      default: return pick<&gather<double, C>>();
    }
  }
}

template <class C>
Strided find_scatter(DType to) {
  if constexpr (std::is_integral_v<C>) {
    return pick<&scatter<C, C>>();
  } else {
    switch (to) {
      case DType::kHalf: return pick<&scatter<Half, C>>();
      case DType::kBFloat16: return pick<&scatter<BFloat16, C>>();
      case DType::kFloat: return pick<&scatter<float, C>>();
      default: return pick<&scatter<double, C>>();
    }
  }
}

template <class C>
void check_bits(DType dtype) {
  STD_TORCH_CHECK(size_of(dtype) == sizeof(C), "safeops: a tensor has an unexpected dtype");
  if (sizeof(C) == 1) STD_TORCH_CHECK(dtype == DType::kBool, "safeops: a mask must be bool");
}

}  // namespace

template <class C>
void Source<C>::bind(const View& view, const Shape& shape, const Order& order) {
  if constexpr (std::is_integral_v<C>) {
    check_bits<C>(view.dtype);
    convert = nullptr;
  } else {
    convert = find_load<C>(view.dtype);
  }
  bind_walk(view, shape, order);
  if (kind == Kind::kStrided || kind == Kind::kConstant) strided = find_gather<C>(view.dtype);
}

template <class C>
void Source<C>::prime(C* buffer) const {
  if (kind == Kind::kConstant && size[0] > 0) strided(*this, 0, std::min(size[0], kChunk), buffer);
}

template <class C>
void Sink<C>::bind(const View& view, const Shape& shape, const Order& order) {
  if constexpr (std::is_integral_v<C>) {
    check_bits<C>(view.dtype);
    convert = nullptr;
  } else {
    convert = find_store<C>(view.dtype);
  }
  bind_walk(view, shape, order);
  if (kind == Kind::kStrided) strided = find_scatter<C>(view.dtype);
}

template struct Source<uint8_t>;
template struct Source<uint16_t>;
template struct Source<uint32_t>;
template struct Source<uint64_t>;
template struct Source<float>;
template struct Source<double>;
template struct Sink<uint8_t>;
template struct Sink<uint16_t>;
template struct Sink<uint32_t>;
template struct Sink<uint64_t>;
template struct Sink<float>;
template struct Sink<double>;

}  // namespace safeops::cpu
