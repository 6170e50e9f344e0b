// Runs of contiguous values of the compute type, in which loops read and write tensors of any dtype and layout.
//
// All operands of a loop are walked in one Order of the dims, chosen so that the output (or the input of a reduction)
// is dense. Each operand merges adjacent dims in that order where its own strides allow: an operand that cannot merge
// them does not slow down the other operands.
#pragma once

#include "cpu/engine/convert.h"
#include "cpu/engine/simd.h"

namespace safeops::cpu {

// Dims of a shape, innermost first; dims of size 1 are left out.
struct Order {
  int ndim = 0;
  int dim[kMaxDims];
  int64_t size[kMaxDims];

  void push(int d, int64_t n) {
    if (n == 1) return;
    dim[ndim] = d;
    size[ndim++] = n;
  }

  // Sorts the dims by stride, the smallest innermost. Broadcast dims (stride 0) keep their place, since their stride
  // says nothing about memory. If `only` is given, the order has just the dims d with only[d] == wanted.
  static Order by_strides(const Shape& shape, const int64_t* strides, const bool* only = nullptr, bool wanted = true);
  static Order contiguous(const Shape& shape);

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= size[i];
    return n;
  }
};

constexpr int64_t kAhead = 1536;  // elements by which loops over chunks prefetch ahead; a power of two would alias

constexpr int64_t kNever = INT64_MAX;  // no prefetch: for loops that compute so long that the hardware's suffices

// Elements per chunk of a loop that reads and writes all operands in place. The cache lines that the loop prefetches
// for one chunk then fit the core's queue of outstanding misses; a full queue would stop the core while memory idles.
constexpr int64_t kFine = 128;

enum class Kind : uint8_t { kDirect, kConvert, kConstant, kStrided };

struct Operand : Walk {   // strides in bytes
  char* data;
  Kind kind;
  int64_t element;        // bytes of a stored element
  Convert convert;        // converts a contiguous run to or from the compute type; nullptr if the dtype is that type
  // Copies n elements of the walk to the buffer, or from it. A read may instead return the address of the elements in
  // the tensor, if they are contiguous.
  const void* (*strided)(const Operand&, int64_t start, int64_t n, void* buffer);

  bool direct() const { return kind == Kind::kDirect || kind == Kind::kConstant; }

 protected:
  void bind_walk(const View& view, const Shape& shape, const Order& order);

  // Prefetches elements [ahead, ahead + n), which a later chunk will read: the hardware's prefetcher loses track of a
  // stream between chunks (masked mse of bf16: 0.6 of the copy bandwidth without this, 0.9 with it). A run longer than
  // a chunk is left to the hardware, which follows it; prefetching all of it at once would stop the core. The function
  // must be inlined: gcc drops calls of a function that only prefetches, as if it had no effect.
  template <int kWrite>
  __attribute__((always_inline)) void prefetch(int64_t ahead, int64_t n) const {
    if (kind > Kind::kConvert || n > kChunk || ahead >= size[0]) return;
    const char* from = data + ahead * element;
    for (int64_t byte = 0, end = n * element; byte < end; byte += 64) __builtin_prefetch(from + byte, kWrite);
  }
};

// An operand that is read as values of type C: float or double (converted), uint8_t (a mask), or uint16_t, uint32_t,
// uint64_t (bit patterns).
template <class C>
struct Source : Operand {
  void bind(const View& view, const Shape& shape, const Order& order);

  // Each thread calls prime() once, before fetch(). If the operand is constant, prime() fills `buffer` (kChunk
  // elements), and fetch() then returns it: nothing else may write to it.
  void prime(C* buffer) const;

  // Returns elements [start, start + n) of the walk, n <= kChunk: in place if possible, else in the buffer. `ahead`:
  // the element at which a later call will start, for the prefetch.
  const C* fetch(int64_t start, int64_t n, int64_t ahead, C* buffer) const {
    prefetch<0>(ahead, n);
    switch (kind) {
      case Kind::kDirect: return reinterpret_cast<const C*>(data) + start;
      case Kind::kConvert: convert(data + start * element, buffer, n); return buffer;
      case Kind::kConstant: return buffer;
      case Kind::kStrided: return static_cast<const C*>(strided(*this, start, n, buffer));
    }
    return buffer;
  }
};

// An operand that is written. A loop writes its values at `target`; then `commit` stores them in the tensor.
template <class C>
struct Sink : Operand {
  void bind(const View& view, const Shape& shape, const Order& order);

  C* target(int64_t start, C* buffer) const {
    return kind == Kind::kDirect ? reinterpret_cast<C*>(data) + start : buffer;
  }

  void commit(int64_t start, int64_t n, C* buffer) const { commit(start, n, buffer, start + kAhead); }

  void commit(int64_t start, int64_t n, C* buffer, int64_t ahead) const {
    prefetch<1>(ahead, n);
    if (kind == Kind::kConvert) convert(buffer, data + start * element, n);
    if (kind == Kind::kStrided) strided(*this, start, n, buffer);
  }
};

}  // namespace safeops::cpu
