// total_variation: for each image the sum of |x - its neighbour| over the pairs of kept neighbours along the spatial
// dims, and how many pixels are kept; the gradient is g sum sign(x - neighbour).
// A thread has a packet (16 bytes, or one element) of each of a few rows that follow each other: what it reads of a row
// serves both rows beside it. A second launch adds up the blocks of an image.
// I/O: reads x and the mask, from the cache once more where threads meet; backward writes dx.
#include <algorithm>
#include <optional>

#include "cuda/engine/packets.cuh"
#include "cuda/engine/tensors.h"
#include "parts.cuh"

namespace safeops::cuda {
namespace {

constexpr int kBlock = 256, kRows = 4;  // threads; rows of a thread
constexpr int kMostBlocks = 4096;       // of an image: so few parts are added up at once

// ---- what a thread holds of a row: a packet of a type, or an element of any

template <class Codec>
struct Packed {
  using Value = typename Codec::Value;
  using Word = typename Codec::Raw;
  static constexpr int kElements = 16 / sizeof(Word);
  uint4 raw;

  __device__ void read(const char* p, Type) { raw = load<uint4>(p); }
  __device__ Value get(int k, Type) const { return Codec::decode(packet_get<Word>(raw, k)); }
  static __device__ Word read_one(const char* p, Type) { return load<Word>(p); }
  static __device__ Value decode(Word word, Type) { return Codec::decode(word); }
  static __device__ void write(char* p, const Value* value, Type) {
    Word words[kElements];
#pragma unroll
    for (int k = 0; k < kElements; ++k) words[k] = Codec::encode(value[k]);
    store(p, packet_of(words));
  }
};

template <class C>
struct Single {
  using Value = C;
  using Word = typename Dynamic<C>::Word;
  static constexpr int kElements = 1;
  Word raw;

  __device__ void read(const char* p, Type type) { raw = read_one(p, type); }
  __device__ Value get(int, Type type) const { return decode(raw, type); }
  static __device__ Word read_one(const char* p, Type type) { return load_raw<Word>(p, type); }
  static __device__ Value decode(Word word, Type type) { return Dynamic<C>::decode(word, type); }
  static __device__ void write(char* p, const Value* value, Type type) {
    store_raw(p, type, Dynamic<C>::encode(value[0], type));
  }
};

// ---- the walk

struct Dim {
  int64_t size = 1, step = 0;  // step: how far along it a pixel's neighbour lies; 0: not a spatial dim
  int64_t x = 0, mask = 0, dx = 0;  // strides in bytes
};

// An image's dims, nearest in memory first: packets lie along the first, rows along the second.
struct Walk {
  Type type;
  const char *x, *mask = nullptr;
  char* dx = nullptr;
  int64_t x_image, mask_image = 0, dx_image = 0;  // strides in bytes
  Dim dim[4];
  Divider packets, groups, planes;      // of a row; of rows; along dim[2]
  uint32_t units, blocks, block_units;  // of an image: what threads take at a time, blocks; units of a block
};

// kBefore: with the row before the first, whose neighbour it is.
template <class T, bool kMask, bool kBefore>
struct Patch {
  using Value = typename T::Value;
  static constexpr int V = T::kElements, kHeld = kRows + 1 + kBefore;
  static constexpr unsigned kAll = (1u << V) - 1;

  const Walk& walk;
  int64_t at[4];         // of its first pixel
  const char *x, *mask;  // likewise
  T row[kHeld];
  unsigned keep[kHeld];  // a bit for each element that is kept; none of a row that is not there

  __device__ Patch(const Walk& of, uint32_t image, uint32_t unit) : walk(of) {
    const auto divide = [&](const Divider& by) {
      const uint32_t next = (__umulhi(unit, by.multiplier) + unit) >> by.shift, rest = unit - next * by.divisor;
      unit = next;
      return int64_t(rest);
    };
    at[0] = divide(of.packets) * V, at[1] = divide(of.groups) * kRows, at[2] = divide(of.planes), at[3] = unit;
    x = of.x + image * of.x_image, mask = of.mask + image * of.mask_image;
#pragma unroll
    for (int d = 0; d < 4; ++d) x += at[d] * of.dim[d].x, mask += at[d] * of.dim[d].mask;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int r = i - kBefore;
      const bool own = r >= 0 && r < kRows;  // the others only where they are neighbours
      fetch(r, 0, 0, at[1] + r >= 0 && has(r) && (own || of.dim[1].step), row[i], keep[i]);
    }
  }

  __device__ bool has(int i) const { return at[1] + i < walk.dim[1].size; }

  // What lies in row i, `pixels` further on along dim d.
  __device__ void fetch(int i, int d, int64_t pixels, bool there, T& to, unsigned& kept) const {
    to = T(), kept = 0;
    if (!there) return;
    to.read(x + i * walk.dim[1].x + pixels * walk.dim[d].x, walk.type);
    kept = kAll;
    if constexpr (kMask) kept = bits(mask + i * walk.dim[1].mask + pixels * walk.dim[d].mask);
  }

  // An element of row i, beside its packet.
  struct Beside {
    typename T::Word word;
    unsigned kept;
  };
  __device__ Beside beside(int i, int64_t pixels) const {
    const Dim& dim = walk.dim[0];
    const bool there = has(i) && dim.step && at[0] + pixels >= 0 && at[0] + pixels < dim.size;
    if (!there) return {0, 0};
    const unsigned kept = kMask ? load<uint8_t>(mask + i * walk.dim[1].mask + pixels * dim.mask) != 0 : 1;
    return {T::read_one(x + i * walk.dim[1].x + pixels * dim.x, walk.type), kept};
  }

  // f(i, packet, kept) for each row i, of what lies `pixels` further on along dim d, one of the last two.
  template <class F>
  __device__ void elsewhere(int d, int pixels, const F& f) const {
    const int64_t there = (d == 2 ? at[2] : at[3]) + pixels;
    if (walk.dim[d].step == 0 || there < 0 || there >= walk.dim[d].size) return;
    T other[kRows];
    unsigned kept[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) fetch(i, d, pixels, has(i), other[i], kept[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) f(i, other[i], kept[i]);
  }

  // f(k, a - b) for the elements k of which both are kept. Others are 0: selected before they are looked at.
  template <class F>
  __device__ void pairs(const T& a, unsigned kept, const T& b, const F& f) const {
    if (kept == 0) return;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const Value d = a.get(k, walk.type) - b.get(k, walk.type);
      f(k, !kMask || (kept >> k & 1) ? d : Value(0));
    }
  }
  // The same of neighbours in a packet: f(k, element k - element k + 1).
  template <class F>
  __device__ void inner_pairs(const T& a, unsigned kept, const F& f) const {
    if constexpr (V > 1) {
      if (walk.dim[0].step == 0 || kept == 0) return;
#pragma unroll
      for (int k = 0; k + 1 < V; ++k) {
        const Value d = a.get(k, walk.type) - a.get(k + 1, walk.type);
        f(k, !kMask || (kept >> k & 1) ? d : Value(0));
      }
    }
  }

 private:
  __device__ unsigned bits(const char* p) const {
    if (V == 1 || walk.dim[0].mask == 0) return load<uint8_t>(p) ? kAll : 0;
    const auto nibble = [](uint32_t bytes) { return (__vminu4(bytes, 0x01010101u) * 0x01020408u) >> 24 & 15; };
    if constexpr (V == 2) return nibble(load<uint16_t>(p));
    if constexpr (V == 4) return nibble(load<uint32_t>(p));
    const uint64 bytes = load<uint64>(p);
    return nibble(uint32_t(bytes)) | nibble(uint32_t(bytes >> 32)) << 4;
  }
};

// body(image, unit) for what this thread takes.
template <class Body>
__device__ void each_unit(const Walk& walk, const Body& body) {
  const uint32_t image = blockIdx.x / walk.blocks, first = blockIdx.x % walk.blocks * walk.block_units;
  const uint32_t left = walk.units - first, last = first + (left < walk.block_units ? left : walk.block_units);
#pragma unroll 1
  for (uint32_t unit = first + threadIdx.x; unit < last; unit += kBlock) body(image, unit);
}

// ---- forward

struct Total {
  double sum, count;
};

// (2, blocks of all images)
template <class T, bool kMask>
__global__ void __launch_bounds__(kBlock, kMask ? 2 : 3)
    total_variation_kernel(const __grid_constant__ Walk walk, char* const __grid_constant__ sums) {
  using C = typename T::Value;
  Total total{0, 0};
  each_unit(walk, [&](uint32_t image, uint32_t unit) {
    using P = Patch<T, kMask, false>;
    const P p(walk, image, unit);
    typename P::Beside right[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) right[i] = p.beside(i, P::V == 1 ? walk.dim[0].step : P::V);
    C sum = 0;
    int count = 0;
    const auto add = [&](int, C d) { sum += fabs(d); };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const unsigned keep = p.keep[i];
      count += __popc(keep);
      p.inner_pairs(p.row[i], keep & keep >> 1, add);
      if (right[i].kept & keep >> (P::V - 1))
        add(0, p.row[i].get(P::V - 1, walk.type) - T::decode(right[i].word, walk.type));
      if (walk.dim[1].step) p.pairs(p.row[i], keep & p.keep[i + 1], p.row[i + 1], add);
    }
#pragma unroll 1
    for (int d = 2; d < 4; ++d)
      p.elsewhere(d, 1, [&](int i, const T& other, unsigned kept) { p.pairs(p.row[i], p.keep[i] & kept, other, add); });
    total.sum += sum, total.count += count;
  });
  total = block_reduce<kBlock>(total, reinterpret_cast<Total*>(shared_memory()), [](Total a, const Total& b) {
    a.sum += b.sum, a.count += b.count;
    return a;
  });
  if (threadIdx.x) return;
  char* p = sums + int64_t(blockIdx.x) * sizeof(double);
  store(p, total.sum), store(p + int64_t(gridDim.x) * sizeof(double), total.count);
}

// ---- backward

struct Upstream {
  const char* grad;  // fp64, one number for each image
  int64_t image;     // stride in bytes
};

template <class T, bool kMask>
__global__ void __launch_bounds__(kBlock, 2)
    total_variation_backward_kernel(const __grid_constant__ Walk walk, const __grid_constant__ Upstream upstream) {
  using C = typename T::Value;
  each_unit(walk, [&](uint32_t image, uint32_t unit) {
    using P = Patch<T, kMask, true>;
    constexpr int V = P::V;
    const C g = C(load<double>(upstream.grad + image * upstream.image));
    const P p(walk, image, unit);
    typename P::Beside left[kRows], right[kRows];
    const int64_t step = V == 1 ? walk.dim[0].step : 1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = p.beside(i, -step), right[i] = p.beside(i, V - 1 + step);
    const auto sign = [](C d) { return fabs(d) > 0 ? copysign(C(1), d) : d; };  // 0 of equal ones, NaN of NaN
    C sum[P::kHeld][V] = {};
    unsigned paired[P::kHeld] = {};
    if (walk.dim[1].step) {
#pragma unroll
      for (int i = 0; i + 1 < P::kHeld; ++i) {
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
    for (int j = 4; j < 8; ++j)  // before and behind, along the other dims
      p.elsewhere(j / 2, j % 2 ? 1 : -1, [&](int i, const T& other, unsigned kept) {
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
      for (int k = 0; k < V; ++k) value[k] = paired[i + 1] >> k & 1 ? g * sum[i + 1][k] : C(0);  // 0 if g is NaN, too
      T::write(dx, value, walk.type);
    }
  });
}

// ---- host

// dx: of x's shape, or none. elements: of a packet of 16 bytes, where all rows are made of whole ones; else 1.
Walk make_walk(const Tensor& input, const std::optional<Tensor>& mask, const Tensor* dx, const char* op,
               int& elements) {
  const safeops::View x(input);
  STD_TORCH_CHECK(x.ndim == 4 || x.ndim == 5, op, ": needs (N, C, H, W) or (N, C, D, H, W)");
  Walk walk;
  walk.type = float_type(input, op, "input"), walk.x = x.data;
  const Shape shape = x.shape();
  int64_t of_mask[safeops::kMaxDims] = {};
  if (mask) {
    const safeops::View m(*mask);
    check_device(*mask, input, op, "mask");
    STD_TORCH_CHECK(m.dtype == DType::kBool, op, ": mask must be bool");
    expand_strides(m.ndim, m.sizes, m.strides, shape, of_mask);
    walk.mask = m.data, walk.mask_image = of_mask[0];
  }
  const int64_t size = size_of(walk.type);
  walk.x_image = x.strides[0] * size;
  int64_t of_dx[safeops::kMaxDims] = {};
  if (dx) {
    const safeops::View d(*dx);
    for (int i = 0; i < d.ndim; ++i) of_dx[i] = d.strides[i] * size;
    walk.dx = d.data, walk.dx_image = of_dx[0];
  }
  int dims = 0;
  const auto farther = [](const Dim& a, const Dim& b) { return b.x && (a.x == 0 || a.x > b.x); };
  for (int d = shape.ndim - 1; d > 0; --d) {
    if (shape.size[d] == 1) continue;
    const Dim dim{shape.size[d], d > 1, x.strides[d] * size, of_mask[d], of_dx[d]};
    int at = dims++;
    for (; at > 0 && farther(walk.dim[at - 1], dim); --at) walk.dim[at] = walk.dim[at - 1];
    walk.dim[at] = dim;
  }
  Dim &near = walk.dim[0], &next = walk.dim[1];
  const int64_t n = near.size;
  if (near.step == 0 && next.step && next.x == n * near.x && next.mask == n * near.mask && next.dx == n * near.dx) {
    next.step = n, next.size *= n, next.x = near.x, next.mask = near.mask, next.dx = near.dx;  // channels come last
    std::copy(walk.dim + 1, walk.dim + 4, walk.dim), walk.dim[3] = Dim();
  }

  elements = int(16 / size);
  const auto whole = [&](const char* base, int64_t image, int64_t Dim::*stride, int64_t element) {
    int64_t odd = int64_t(uintptr_t(base)) | image;
    for (int d = 1; d < 4; ++d) odd |= walk.dim[d].*stride;
    return near.*stride == element && odd % (elements * element) == 0;
  };
  const bool masks = !mask || near.mask == 0 || whole(walk.mask, walk.mask_image, &Dim::mask, 1);
  if (near.size % elements || near.step > 1 || !masks || !whole(walk.x, walk.x_image, &Dim::x, size) ||
      (dx && !whole(walk.dx, walk.dx_image, &Dim::dx, size)))
    elements = 1;

  const int64_t packets = near.size / elements, groups = (next.size + kRows - 1) / kRows;
  const int64_t units = shape.numel() ? packets * groups * walk.dim[2].size * walk.dim[3].size : 0;
  const int64_t block_units = (units + kMostBlocks * kBlock - 1) / (kMostBlocks * kBlock) * kBlock;
  const int64_t blocks = units ? (units + block_units - 1) / block_units : 0;
  constexpr int64_t kLimit = int64_t(1) << 31;
  STD_TORCH_CHECK(units < kLimit && shape.size[0] * blocks < kLimit, op, ": too many pixels");
  walk.units = uint32_t(units), walk.blocks = uint32_t(blocks), walk.block_units = uint32_t(block_units);
  if (units) walk.packets = Divider(packets), walk.groups = Divider(groups), walk.planes = Divider(walk.dim[2].size);
  return walk;
}

// run(T(), whether there is a mask) of those that are compiled.
template <class Run>
void by_kind(const Walk& walk, int elements, const Run& run) {
  const auto with = [&](auto held) { walk.mask ? run(held, std::true_type()) : run(held, std::false_type()); };
  if (elements == 1) return walk.type == kF64 ? with(Single<double>()) : with(Single<float>());
  if (walk.type == kF16) with(Packed<F16>());
  if (walk.type == kBF16) with(Packed<BF16>());
  if (walk.type == kF32) with(Packed<F32>());
  if (walk.type == kF64) with(Packed<F64>());
}

// (2, N): the sums, and the counts
Tensor total_variation(const Tensor& input, const std::optional<Tensor>& mask) {
  constexpr const char* kOp = "safeops::_total_variation";
  check_device(input, input, kOp, "input");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  int elements;
  const Walk walk = make_walk(input, mask, nullptr, kOp, elements);
  const int64_t images = input.size(0), shape[] = {2, images}, parts = 2 * images * walk.blocks;
  const Tensor out = safeops::empty(Shape(2, shape), DType::kDouble, input);
  const cudaStream_t stream = current_stream(input);
  const auto launch = [&](const Tensor& sums) {
    by_kind(walk, elements, [&](auto held, auto masked) {
      start_blocks(total_variation_kernel<decltype(held), masked()>, unsigned(images * walk.blocks), kBlock,
                   kBlock / 32 * int(sizeof(Total)), stream, walk, static_cast<char*>(sums.data_ptr()));
    });
  };
  if (walk.blocks == 1) {
    launch(out);
  } else if (images) {  // (the sums of no blocks are 0)
    const Tensor workspace = safeops::empty(Shape(1, &parts), DType::kDouble, input);
    if (walk.blocks) launch(workspace);
    merge_parts({static_cast<char*>(workspace.data_ptr()), static_cast<char*>(out.data_ptr()), walk.blocks}, 2 * images,
                stream);
  }
  check_launch(kOp);
  return out;
}

Tensor total_variation_backward(const Tensor& grad, const Tensor& input, const std::optional<Tensor>& mask) {
  constexpr const char* kOp = "safeops::_total_variation_backward";
  check_device(grad, input, kOp, "grad");
  const safeops::View x(input), g(grad);
  const bool good = x.ndim && g.dtype == DType::kDouble && g.ndim == 2 && g.sizes[0] == 2 && g.sizes[1] == x.sizes[0];
  STD_TORCH_CHECK(good, kOp, ": grad must be float64 of shape (2, N)");
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Tensor dx = output_like(input, x.shape(), float_type(input, kOp, "input"));
  int elements;
  const Walk walk = make_walk(input, mask, &dx, kOp, elements);
  const int64_t images = x.sizes[0];
  if (images && walk.blocks)
    by_kind(walk, elements, [&](auto held, auto masked) {
      start_blocks(total_variation_backward_kernel<decltype(held), masked()>, unsigned(images * walk.blocks), kBlock, 0,
                   current_stream(input), walk, Upstream{g.data, g.strides[1] * int64_t(sizeof(double))});
    });
  check_launch(kOp);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CUDA, m) {
  m.impl("_total_variation", TORCH_BOX(&total_variation));
  m.impl("_total_variation_backward", TORCH_BOX(&total_variation_backward));
}

}  // namespace safeops::cuda
