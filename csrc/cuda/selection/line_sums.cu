// I/O: read index and grad (again, from cache, if a block has more entries than its threads hold), write dx.
//
// dx has the shape (slabs, length, columns), where length is the indexed dim; a line is dx along that dim. A block owns
// whole lines, or a segment of the lines of neighbouring columns. It adds every entry of grad that names one of its
// destinations to a 64-bit integer in shared memory. Integer sums do not depend on their order, so that atomics give
// the same bits every time. The integers are fixed point, scaled in one of two ways:
//
// (1) by the largest exponent of all entries of the block, if its smallest nonzero entry still fits: sums are exact.
// (2) else by the largest exponent of each destination's entries, found by another pass. An entry then loses only bits
//     below 2^-44 of the destination's largest entry (2^-61 if it has few), less than a sum in fp32 loses.
//
// A destination that gets an inf or NaN counts infs and NaNs instead.
#include "line_sums.cuh"

#include "moves.cuh"

namespace safeops::cuda {
namespace {

constexpr int kMostHeld = 8;                            // entries in a thread's registers; half as many if strided
constexpr int kRoom = 2048, kMostRoom = 8192;           // destinations of a block; most of a block for long lines
constexpr int kBytes = 12;                              // bytes of shared memory for a destination
constexpr int64_t kFew = 256, kAlone = 1 << 15;         // fewer than kFew blocks may have at most kAlone entries each
constexpr int64_t kReads = 16, kMostEntries = 1 << 18;  // most blocks that read one index; most entries of a line

template <class Codec>
constexpr int kDigits = sizeof(typename Codec::Raw) == 4 ? 24 : Codec::kType == kF16 ? 11 : 8;

struct Lines {
  Plan<3> outer, inner;  // operands order, grad, index: over the dims before the indexed one; over those after it
  int64_t along[3];      // strides of these operands along the indexed dim, in bytes
  char* dx;
  int64_t slabs, length, columns;  // shape of dx
  uint32_t entries;                // entries of a line
  uint32_t slab, rows, width;      // part of a block: slabs, rows (destinations along a line), columns
  uint32_t segments, strips;       // blocks along a line; blocks along the columns
  Divider by_width, by_entries;
  int shift;  // left shift of an entry with the largest exponent
  Type dx_type;
  bool narrow;
};

struct Range {  // the largest and the smallest nonzero magnitude, as bits
  unsigned largest = 0, smallest = ~0u;
};

__device__ inline uint32_t quotient(uint32_t n, const Divider& by) {
  return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// The exponent of a magnitude, given as bits: 0 for zero, 1 for subnormal numbers, 255 for inf and NaN.
__device__ inline unsigned exponent_of(uint32_t magnitude) {
  return magnitude >> 23 ? magnitude >> 23 : magnitude != 0;
}

// Adds `number` to the 64-bit integer (high, low) by two atomics on 32-bit words. In whatever order threads add to
// `low`, the thread whose addition overflows sees it, and adds the carry to `high`.
__device__ inline void add(uint32_t* low, uint32_t* high, int64_t number) {
  const uint32_t word = uint32_t(number), carry = atomicAdd(low, word) > ~word;
  const uint32_t rest = uint32_t(uint64(number) >> 32) + carry;
  if (rest) atomicAdd(high, rest);
}

// Counts a +inf in `high`, a -inf in `low`, and a NaN in both.
__device__ inline void count(uint32_t* low, uint32_t* high, uint32_t bits) {
  if (bits << 1 < 0xff000000u) return;
  const bool nan = bits << 1 > 0xff000000u;
  if (nan || bits >> 31 == 0) atomicAdd(high, 1u);
  if (nan || bits >> 31) atomicAdd(low, 1u);
}

template <class Codec>  // the significand of a finite number, with its sign
__device__ inline int64_t digits_of(uint32_t bits) {
  const uint32_t all = (bits & 0x7fffff) | (bits << 1 >> 24 ? 0x800000 : 0);
  const int digits = int(all >> (24 - kDigits<Codec>));
  return bits >> 31 ? -digits : digits;
}

enum Pass { kRange, kTops, kAdd };  // range of all magnitudes; largest exponent of each destination; sums

// kFlat: the bytes of an index, if a block's entries are contiguous in grad and in index, and dx has the type of grad;
// else 0.
template <class Codec, int kFlat>
__global__ void __launch_bounds__(kBlock, kFlat ? 3 : 4) line_kernel(const __grid_constant__ Lines lines) {
  using Raw = typename Codec::Raw;
  constexpr int kHeld = kFlat ? kMostHeld : kMostHeld / 2;
  const uint32_t segment = blockIdx.x % lines.segments, strip = blockIdx.x / lines.segments % lines.strips;
  const int64_t first_slab = int64_t(blockIdx.x / lines.segments / lines.strips) * lines.slab;
  const int64_t first_row = int64_t(segment) * lines.rows, first_column = int64_t(strip) * lines.width;
  const uint32_t slabs = uint32_t(std::min<int64_t>(lines.slab, lines.slabs - first_slab));
  const uint32_t rows = uint32_t(std::min<int64_t>(lines.rows, lines.length - first_row));
  const uint32_t columns = uint32_t(std::min<int64_t>(lines.width, lines.columns - first_column));
  const uint32_t entries = slabs * lines.entries * lines.width;
  const uint32_t room = (lines.slab * lines.rows * lines.width + 3) & ~3u;
  uint32_t* low = reinterpret_cast<uint32_t*>(shared_memory());
  uint32_t *high = low + room, *tops = high + room;

  const int64_t first = first_slab * lines.entries * lines.width;
  const char *grad = lines.outer.base[1] + first * int64_t(sizeof(Raw)), *indices = lines.outer.base[2] + first * kFlat;

  Raw raw[kHeld];
  int target[kHeld];  // destination of each entry in `raw`; -1: none
  const auto read = [&](uint32_t begin) {
    int64_t index[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const uint32_t i = begin + u * kBlock + threadIdx.x, entry = i < entries ? i : 0;
      const char *g = grad + int64_t(entry) * int64_t(sizeof(Raw)), *at_index = indices + int64_t(entry) * kFlat;
      if constexpr (kFlat == 0) {
        const uint32_t place = quotient(entry, lines.by_width), slab = quotient(place, lines.by_entries);
        const uint32_t column = entry - place * lines.width, k = place - slab * lines.entries;
        const int64_t o = first_slab + slab, c = first_column + (column < columns ? column : 0);
        g = at(lines.outer, 1, o) + (at(lines.inner, 1, c) - lines.inner.base[1]) + k * lines.along[1];
        at_index = at(lines.outer, 2, o) + (at(lines.inner, 2, c) - lines.inner.base[2]) + k * lines.along[2];
      }
      index[u] = index_at(at_index, kFlat ? kFlat == 4 : lines.narrow);
      raw[u] = load<Raw>(g);
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const uint32_t i = begin + u * kBlock + threadIdx.x, place = quotient(i, lines.by_width);
      const uint32_t column = i - place * lines.width, slab = quotient(place, lines.by_entries);
      const bool named = i < entries && (kFlat || column < columns) && in_range(index[u] - first_row, rows);
      target[u] = named ? int((slab * lines.rows + uint32_t(index[u] - first_row)) * lines.width + column) : -1;
    }
  };
  for (uint32_t i = threadIdx.x; i < room / 2; i += kBlock) reinterpret_cast<uint4*>(low)[i] = {};
  const bool held = entries <= kHeld * kBlock;  // registers hold all entries, so only the first pass reads them
  Range range;
  bool exact = false;
  unsigned top = 0;
#pragma unroll 1
  for (int pass = kRange; pass <= kAdd; ++pass) {
    if (pass == kTops && exact) continue;
    if (pass == kTops) {
      for (uint32_t i = threadIdx.x; i < room; i += kBlock) tops[i] = 0;
      __syncthreads();
    }
#pragma unroll 1
    for (uint32_t begin = 0; begin < entries; begin += kHeld * kBlock) {
      if (pass == kRange || !held) read(begin);
      const auto each = [&](const auto& f) {  // calls f(destination, bits, magnitude) for each nonzero entry
#pragma unroll
        for (int u = 0; u < kHeld; ++u) {
          const uint32_t bits = __float_as_uint(Codec::decode(raw[u])), magnitude = bits & 0x7fffffff;
          if (target[u] >= 0 && magnitude) f(target[u], bits, magnitude);
        }
      };
      if (pass == kRange) {
        each([&](int, uint32_t, uint32_t magnitude) {
          range.largest = std::max(range.largest, magnitude);
          range.smallest = std::min(range.smallest, magnitude);
        });
      } else if (pass == kTops) {
        each([&](int at, uint32_t, uint32_t magnitude) { atomicMax(tops + at, exponent_of(magnitude)); });
      } else if (exact) {
        each([&](int at, uint32_t bits, uint32_t magnitude) {
          const int up = lines.shift - int(top) + int(exponent_of(magnitude));
          add(low + at, high + at, digits_of<Codec>(bits) << up);
        });
      } else {
        each([&](int at, uint32_t bits, uint32_t magnitude) {
          if (tops[at] == 255) return count(low + at, high + at, bits);
          const int up = lines.shift - int(tops[at]) + int(exponent_of(magnitude));
          const int64_t digits = digits_of<Codec>(bits);
          add(low + at, high + at, up >= 0 ? digits << up : digits >> (up < -31 ? 31 : -up));
        });
      }
    }
    if (pass == kRange) {
      range = block_reduce<kBlock>(range, reinterpret_cast<Range*>(tops + room), [](Range a, const Range& b) {
        return Range{std::max(a.largest, b.largest), std::min(a.smallest, b.smallest)};
      });
      top = exponent_of(range.largest);
      exact = top < 255 && (top == 0 || int(top - exponent_of(range.smallest)) <= lines.shift);
    } else {
      __syncthreads();
    }
  }

  // A block with several slabs has all of their rows and columns, which are contiguous in dx.
  const uint32_t numel = (lines.slab == 1 ? rows : slabs * lines.rows) * lines.width;
  const int64_t begin = (first_slab * lines.length + first_row) * lines.columns + first_column;
  char* dx = lines.dx + begin * size_of(lines.dx_type);
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < numel; i += kBlock) {
    const uint32_t row = quotient(i, lines.by_width), column = i - row * lines.width;
    if (!kFlat && column >= columns) continue;
    const int most = int(exact ? top : tops[i]);
    float value;
    if (most == 255) {
      value = __uint_as_float(low[i] && high[i] ? 0x7fc00000u : high[i] ? 0x7f800000u : 0xff800000u);
    } else {
      const int64_t sum = int64_t(uint64(high[i]) << 32 | low[i]), power = most - lines.shift - 126 - kDigits<Codec>;
      value = float(double(sum) * __longlong_as_double((1023 + power) << 52));
    }
    if constexpr (kFlat > 0) {
      store(dx + i * int64_t(sizeof(Raw)), Codec::encode(value));
    } else {
      const int64_t to = (row * lines.columns + column) * size_of(lines.dx_type);
      store_raw(dx + to, lines.dx_type, Dynamic<float>::encode(value, lines.dx_type));
    }
  }
}

int64_t parts(int64_t n, int64_t most) { return (n + most - 1) / most; }

// Sets the part of each block. Returns false if sorting (run_sums.cu) is faster.
bool divide(Lines& lines, int64_t width) {
  const int64_t slabs = lines.slabs, length = lines.length, columns = lines.columns, entries = lines.entries;
  const int64_t sector = 32 / width;  // columns in 32 bytes, which are read together
  int64_t slab = 1, strip = columns, rows = length;
  if (length * columns <= kRoom) {
    slab = std::max<int64_t>(1, std::min({kRoom / (length * columns), kMostHeld * kBlock / (entries * columns),
                                          slabs / kFew}));
  } else {
    if (columns >= 2 * sector) strip = std::max<int64_t>(1, kRoom / length / sector) * sector;
    strip = std::min(strip, columns);
    rows = parts(length, parts(length, kMostRoom / strip));
  }
  const int64_t segments = parts(length, rows), strips = parts(columns, strip);
  const int64_t blocks = parts(slabs, slab) * strips * segments, each = slab * entries * strip;
  lines.slab = uint32_t(slab);
  lines.rows = uint32_t(rows);
  lines.width = uint32_t(strip);
  lines.segments = uint32_t(segments);
  lines.strips = uint32_t(strips);
  return (segments <= kReads || segments * entries <= length) && (each <= kAlone || blocks >= kFew) &&
         blocks < (int64_t(1) << 31) && each < (int64_t(1) << 31);
}

// True if the entries of all slabs are contiguous in operand number `operand`, whose elements have `width` bytes.
bool lie_together(const Lines& lines, int operand, int64_t width) {
  const Plan<3>&outer = lines.outer, &inner = lines.inner;
  const int64_t line = lines.columns * width;
  return (inner.numel == 1 || (inner.ndim == 1 && inner.stride[operand][0] == width)) &&
         (lines.entries == 1 || lines.along[operand] == line) &&
         (outer.numel == 1 || (outer.ndim == 1 && outer.stride[operand][0] == line * lines.entries));
}

}  // namespace

bool add_lines(const Bits& grad, Type type, int dim, const Bits& index, const Shape& size, Type dx_type, char* dx,
               cudaStream_t stream) {
  const int64_t entries = grad.shape.size[dim];
  if (type == kF64 || dx_type == kF64 || entries > kMostEntries) return false;
  for (int d = 0; d < size.ndim; ++d)
    if (d != dim && grad.shape.size[d] != size.size[d]) return false;
  Bits g = grad, indices = along_lines(index, grad.shape, dim);
  g.in_bytes(), indices.in_bytes();
  const auto plan = [&](int from, int to) {
    return plan_in_order<2>(Shape(to - from, size.size + from), {g.dims(from, to), indices.dims(from, to)});
  };
  Lines lines{};
  lines.outer = plan(0, dim);
  lines.inner = plan(dim + 1, size.ndim);
  lines.along[1] = g.stride[dim], lines.along[2] = indices.stride[dim];
  lines.dx = dx;
  lines.slabs = lines.outer.numel, lines.length = size.size[dim], lines.columns = lines.inner.numel;
  lines.entries = uint32_t(entries);
  if (!divide(lines, size_of(dx_type))) return false;
  lines.by_width = Divider(lines.width);
  lines.by_entries = Divider(lines.entries);
  lines.dx_type = dx_type;
  lines.narrow = index.width == 4;
  const bool flat = type == dx_type && lines.width == lines.columns && lie_together(lines, 1, grad.width) &&
                    lie_together(lines, 2, index.width);
  const int64_t blocks = parts(lines.slabs, lines.slab) * lines.strips * lines.segments;
  const int shared = int((lines.slab * lines.rows * lines.width + 3) & ~3u) * kBytes + kBlock / 32 * int(sizeof(Range));
  const auto launch = [&](auto codec) {
    using Codec = decltype(codec);
    lines.shift = 62 - kDigits<Codec>;
    for (int64_t n = entries - 1; n > 0; n /= 2) --lines.shift;  // leaves bits for the sum of a line's entries
    const auto kernel = !flat ? line_kernel<Codec, 0> : lines.narrow ? line_kernel<Codec, 4> : line_kernel<Codec, 8>;
    start_blocks(kernel, unsigned(blocks), kBlock, shared, stream, lines);
  };
  type == kF16 ? launch(F16()) : type == kBF16 ? launch(BF16()) : launch(F32());
  return true;
}

}  // namespace safeops::cuda
