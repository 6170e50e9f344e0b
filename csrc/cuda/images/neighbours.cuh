// Reads pixels with their neighbours along the spatial dims, for any dtype, strides and mask. A thread has a patch: one
// packet (16 bytes, or one element) in each of kRows consecutive rows. So each row that it reads also serves as the
// neighbour of the rows before and after it.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/engine/launch.cuh"
#include "cuda/engine/packets.cuh"
#include "cuda/engine/tensors.h"

namespace safeops::cuda {
namespace {

constexpr int kBlock = 256, kRows = 4;  // threads of a block; rows of a patch
constexpr int64_t kMostBlocks = 2048;   // blocks of a launch, approximately: few, since each stores a sum to merge

// ---- the registers for one row of a patch: Packed is a packet of one type, Single is one element of any type

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
  int64_t size = 1, step = 0;  // step: from a pixel to its neighbour, in elements of this dim; 0: not a spatial dim
  int64_t x = 0, mask = 0, dx = 0;  // strides in bytes
};

// The operands of a launch, and the dims of one image, smallest stride first: packets lie along dim[0], and the rows of
// a patch follow each other along dim[1].
struct Walk {
  Type type;
  const char *x, *mask = nullptr;
  char* dx = nullptr;
  int64_t x_image, mask_image = 0, dx_image = 0;  // strides in bytes
  Dim dim[4];
  Divider packets, groups, planes;          // by the packets of a row; the groups of kRows rows; the size of dim[2]
  uint32_t patches, blocks, block_patches;  // patches and blocks of an image; patches of a block
};

// A patch with the row after it and, with kBefore, the row before it, which are only neighbours.
template <class T, bool kMask, bool kBefore>
struct Patch {
  using Value = typename T::Value;
  static constexpr int V = T::kElements, kPatchRows = kRows + 1 + kBefore;
  static constexpr unsigned kAll = (1u << V) - 1;

  const Walk& walk;
  int64_t at[4];         // index of the first pixel along each dim
  const char *x, *mask;  // addresses of the first pixel
  T row[kPatchRows];
  unsigned keep[kPatchRows];  // bit k: element k of the row is kept; 0 for a row that does not exist

  __device__ Patch(const Walk& walk_, uint32_t image, uint32_t patch) : walk(walk_) {
    const auto divide = [&](const Divider& by) {
      const uint32_t next = (__umulhi(patch, by.multiplier) + patch) >> by.shift, rest = patch - next * by.divisor;
      patch = next;
      return int64_t(rest);
    };
    at[0] = divide(walk_.packets) * V, at[1] = divide(walk_.groups) * kRows, at[2] = divide(walk_.planes),
    at[3] = patch;
    x = walk_.x + image * walk_.x_image, mask = walk_.mask + image * walk_.mask_image;
#pragma unroll
    for (int d = 0; d < 4; ++d) x += at[d] * walk_.dim[d].x, mask += at[d] * walk_.dim[d].mask;
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      const int r = i - kBefore;
      const bool in_patch = r >= 0 && r < kRows;  // else the row is only a neighbour
      fetch(r, 0, 0, at[1] + r >= 0 && has(r) && (in_patch || walk_.dim[1].step), row[i], keep[i]);
    }
  }

  __device__ bool has(int i) const { return at[1] + i < walk.dim[1].size; }

  // Reads into `to` the packet that lies `pixels` after row i's packet along dim d. kept: a bit for each kept element.
  __device__ void fetch(int i, int d, int64_t pixels, bool exists, T& to, unsigned& kept) const {
    to = T(), kept = 0;
    if (!exists) return;
    to.read(x + i * walk.dim[1].x + pixels * walk.dim[d].x, walk.type);
    kept = kAll;
    if constexpr (kMask) kept = bits(mask + i * walk.dim[1].mask + pixels * walk.dim[d].mask);
  }

  // The element `pixels` after the first one of row i's packet, beside the packet. kept: 1 if it exists and is kept.
  struct Adjacent {
    typename T::Word word;
    unsigned kept;
  };
  __device__ Adjacent adjacent(int i, int64_t pixels) const {
    const Dim& dim = walk.dim[0];
    const bool exists = has(i) && dim.step && at[0] + pixels >= 0 && at[0] + pixels < dim.size;
    if (!exists) return {0, 0};
    const unsigned kept = kMask ? load<uint8_t>(mask + i * walk.dim[1].mask + pixels * dim.mask) != 0 : 1;
    return {T::read_one(x + i * walk.dim[1].x + pixels * dim.x, walk.type), kept};
  }

  // Calls f(i, packet, kept) for each row i, where `packet` lies `pixels` after row i's packet along dim d (2 or 3).
  // Does nothing if d is not a spatial dim or has no such neighbour.
  template <class F>
  __device__ void each_along(int d, int pixels, const F& f) const {
    const int64_t neighbour = (d == 2 ? at[2] : at[3]) + pixels;
    if (walk.dim[d].step == 0 || neighbour < 0 || neighbour >= walk.dim[d].size) return;
    T other[kRows];
    unsigned kept[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) fetch(i, d, pixels, has(i), other[i], kept[i]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) f(i, other[i], kept[i]);
  }

  // Calls f(k, a[k] - b[k]) for each element k of two packets, or f(k, 0) if bit k of `kept` is 0.
  template <class F>
  __device__ void pairs(const T& a, unsigned kept, const T& b, const F& f) const {
    if (kept == 0) return;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const Value d = a.get(k, walk.type) - b.get(k, walk.type);
      f(k, !kMask || (kept >> k & 1) ? d : Value(0));
    }
  }
  // Calls f(k, a[k] - a[k + 1]) for neighbours within a packet, or f(k, 0) if bit k of `kept` is 0.
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

// Calls body(image, patch) for the patches of this thread.
template <class Body>
__device__ void each_patch(const Walk& walk, const Body& body) {
  const uint32_t image = blockIdx.x / walk.blocks, first = blockIdx.x % walk.blocks * walk.block_patches;
  const uint32_t left = walk.patches - first, last = first + (left < walk.block_patches ? left : walk.block_patches);
#pragma unroll 1
  for (uint32_t patch = first + threadIdx.x; patch < last; patch += kBlock) body(image, patch);
}

// ---- host

// dx: the output, or null. elements: is set to the number of elements in a 16-byte packet if rows of all operands
// consist of whole, aligned packets, else to 1.
Walk make_walk(const Tensor& input, const std::optional<Tensor>& mask, const Tensor* dx, const char* op,
               int& elements) {
  const safeops::View x(input);
  STD_TORCH_CHECK(x.ndim == 4 || x.ndim == 5, op, ": needs (N, C, H, W) or (N, C, D, H, W)");
  Walk walk;
  walk.type = float_type(input, op, "input"), walk.x = x.data;
  const Shape shape = x.shape();
  int64_t mask_strides[safeops::kMaxDims] = {};
  if (mask) {
    const safeops::View m(*mask);
    check_device(*mask, input, op, "mask");
    STD_TORCH_CHECK(m.dtype == DType::kBool, op, ": mask must be bool");
    expand_strides(m.ndim, m.sizes, m.strides, shape, mask_strides);
    walk.mask = m.data, walk.mask_image = mask_strides[0];
  }
  const int64_t size = size_of(walk.type);
  walk.x_image = x.strides[0] * size;
  int64_t dx_strides[safeops::kMaxDims] = {};
  if (dx) {
    const safeops::View d(*dx);
    for (int i = 0; i < d.ndim; ++i) dx_strides[i] = d.strides[i] * size;
    walk.dx = d.data, walk.dx_image = dx_strides[0];
  }
  int dims = 0;
  const auto farther = [](const Dim& a, const Dim& b) { return b.x && (a.x == 0 || a.x > b.x); };
  for (int d = shape.ndim - 1; d > 0; --d) {
    if (shape.size[d] == 1) continue;
    const Dim dim{shape.size[d], d > 1, x.strides[d] * size, mask_strides[d], dx_strides[d]};
    int at = dims++;
    for (; at > 0 && farther(walk.dim[at - 1], dim); --at) walk.dim[at] = walk.dim[at - 1];
    walk.dim[at] = dim;
  }
  Dim &near = walk.dim[0], &next = walk.dim[1];
  const int64_t n = near.size;
  if (near.step == 0 && next.step && next.x == n * near.x && next.mask == n * near.mask && next.dx == n * near.dx) {
    next.step = n, next.size *= n, next.x = near.x, next.mask = near.mask, next.dx = near.dx;  // channels last: step n
    std::copy(walk.dim + 1, walk.dim + 4, walk.dim), walk.dim[3] = Dim();
  }

  elements = int(16 / size);
  const auto has_packets = [&](const char* base, int64_t image, int64_t Dim::*stride, int64_t element) {
    int64_t odd = int64_t(uintptr_t(base)) | image;
    for (int d = 1; d < 4; ++d) odd |= walk.dim[d].*stride;
    return near.*stride == element && odd % (elements * element) == 0;
  };
  const bool masks = !mask || near.mask == 0 || has_packets(walk.mask, walk.mask_image, &Dim::mask, 1);
  if (near.size % elements || near.step > 1 || !masks || !has_packets(walk.x, walk.x_image, &Dim::x, size) ||
      (dx && !has_packets(walk.dx, walk.dx_image, &Dim::dx, size)))
    elements = 1;

  const int64_t packets = near.size / elements, groups = (next.size + kRows - 1) / kRows;
  const int64_t patches = shape.numel() ? packets * groups * walk.dim[2].size * walk.dim[3].size : 0;
  const int64_t images = std::max<int64_t>(shape.size[0], 1), most = (kMostBlocks + images - 1) / images * kBlock;
  const int64_t block_patches = (patches + most - 1) / most * kBlock;
  const int64_t blocks = patches ? (patches + block_patches - 1) / block_patches : 0;
  constexpr int64_t kLimit = int64_t(1) << 31;
  STD_TORCH_CHECK(patches < kLimit && images * blocks < kLimit, op, ": too many pixels");
  walk.patches = uint32_t(patches), walk.blocks = uint32_t(blocks), walk.block_patches = uint32_t(block_patches);
  if (patches) walk.packets = Divider(packets), walk.groups = Divider(groups), walk.planes = Divider(walk.dim[2].size);
  return walk;
}

// Calls run(T(), masked): T is Packed or Single for the walk's dtype, masked is std::true_type if there is a mask.
template <class Run>
void by_kind(const Walk& walk, int elements, const Run& run) {
  const auto with = [&](auto packet_type) {
    walk.mask ? run(packet_type, std::true_type()) : run(packet_type, std::false_type());
  };
  if (elements == 1) return walk.type == kF64 ? with(Single<double>()) : with(Single<float>());
  if (walk.type == kF16) with(Packed<F16>());
  if (walk.type == kBF16) with(Packed<BF16>());
  if (walk.type == kF32) with(Packed<F32>());
  if (walk.type == kF64) with(Packed<F64>());
}

}  // namespace
}  // namespace safeops::cuda
