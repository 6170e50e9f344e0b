// What the selection ops share. They move elements and compute nothing, so an element is its bit pattern: any dtype of
// 1, 2, 4, 8 or 16 bytes.
#pragma once

#include <vector>

#include "common/elements.h"
#include "common/index.h"
#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

inline DType bits_of(int64_t bytes) {
  switch (bytes) {
    case 1: return DType::kBool;
    case 2: return DType::kHalf;
    case 4: return DType::kFloat;
    case 8: return DType::kDouble;
    default: STD_TORCH_CHECK(false, "safeops: no elements of ", bytes, " bytes");
  }
}

struct Pair {  // complex128
  uint64_t real, imag;
};

// Calls f(pattern) with a type of so many bytes.
template <class F>
void by_width(int64_t bytes, const F& f) {
  switch (bytes) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    default: return f(uint64_t{});
  }
}

template <class F>
void by_any_width(int64_t bytes, const F& f) {
  if (bytes == 16)
    f(Pair{});
  else
    by_width(bytes, f);
}

// A view that may have been given other dims than its tensor: owns its sizes and strides.
struct Bits {
  int ndim;
  int64_t size[kMaxDims], stride[kMaxDims];
  char* data;
  int64_t width;  // bytes of one element

  explicit Bits(const Tensor& t) : Bits(View(t), element_bytes(t)) {}

  // A 0-dim tensor as a vector of one.
  void make_vector() {
    if (ndim == 0) push(1, 1);
  }

  // Elements of 16 bytes as two of 8 along a further dim.
  void split() {
    if (width != 16) return;
    for (int d = 0; d < ndim; ++d) stride[d] *= 2;
    push(2, 1);
    width = 8;
  }

  Bits(const View& view, int64_t width_) : ndim(view.ndim), data(view.data), width(width_) {
    STD_TORCH_CHECK(ndim < kMaxDims, "safeops: too many dimensions");
    for (int d = 0; d < ndim; ++d) {
      size[d] = view.sizes[d];
      stride[d] = view.strides[d];
    }
  }

  void push(int64_t n, int64_t step) {
    STD_TORCH_CHECK(ndim < kMaxDims, "safeops: too many dimensions");
    size[ndim] = n;
    stride[ndim++] = step;
  }

  Shape shape() const { return Shape(ndim, size); }

  int64_t count(int from, int to) const {
    int64_t n = 1;
    for (int d = from; d < to; ++d) n *= size[d];
    return n;
  }
  int64_t numel() const { return count(0, ndim); }

  // Valid while this lives.
  View view() const {
    View v(data, bits_of(width));
    v.sizes = size;
    v.strides = stride;
    v.ndim = ndim;
    return v;
  }
};

// A mask beside elements that may have been split in two.
inline Bits mask_bits(const View& mask, bool split) {
  STD_TORCH_CHECK(mask.dtype == DType::kBool, "safeops: a mask must be bool");
  Bits m(mask, 1);
  if (split) m.push(2, 0);
  return m;
}

template <class T>
T pattern(uint64_t fill) {
  if constexpr (sizeof(T) == 16)
    return {fill, 0};
  else
    return static_cast<T>(fill);
}

// n elements of `width` bytes, from several threads where there are many.
void fill_all(char* dst, int64_t n, int64_t width, uint64_t fill);

// ---- which elements a mask keeps, and where they go

// Kept elements among n mask bytes.
using Count = int64_t (*)(const uint8_t* mask, int64_t n);
Count find_count();

// Packs x[i] where mask[i] to `out` and base + i to `index`, in order, at most `room` of them. Returns how many.
// Either output may be absent: x or index is then null. Slots below `room` beyond the result may be overwritten.
template <class T>
using Pack = int64_t (*)(const uint8_t* mask, const T* x, int64_t n, int64_t base, T* out, int64_t* index,
                         int64_t room);
template <class T> Pack<T> find_pack(bool values, bool index);

// out[i] = mask[i] ? the next of source : x[i], for `most` (> 0) of source, then x[i]. `readable` elements of source
// may be read, at least `most`.
template <class T>
using Merge = void (*)(const uint8_t* mask, const T* x, const T* source, int64_t most, int64_t readable, int64_t n,
                       T* out);
template <class T> Merge<T> find_merge();

// A mask cut into slices whose first ranks are known, so that each can be packed by itself. One slice alone is not
// counted, unless the total is wanted.
struct Slices {
  int64_t numel, length, count;
  std::vector<int64_t> first;  // if counted: rank of the first kept element of each slice, and the total

  Slices(const Source<uint8_t>& mask, int64_t numel, bool total = false);

  bool counted() const { return !first.empty(); }

  // The first slot that belongs to a later slice.
  int64_t limit(int64_t start, int64_t most) const {
    return counted() ? std::min(most, first[start / length + 1]) : most;
  }

  // Calls body(start, stop, first rank) for each slice.
  template <class Body>
  void run(const Body& body) const {
    if (count == 1) return body(int64_t{0}, numel, int64_t{0});
    parallel(count, length, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) body(s * length, std::min((s + 1) * length, numel), first[s]);
    });
  }
};

// ---- rows

constexpr int64_t kShortRun = 1024;  // bytes

// Copies of a short known length are a few moves; memcpy itself costs more than that.
inline void copy_run(char* to, const char* from, int64_t bytes) {
  if (bytes > kShortRun) {
    std::memcpy(to, from, bytes);
  } else if (bytes >= 64) {
    int64_t at = 0;
    for (; at + 64 < bytes; at += 64) std::memcpy(to + at, from + at, 64);
    std::memcpy(to + bytes - 64, from + bytes - 64, 64);
  } else if (bytes >= 16) {
    int64_t at = 0;
    for (; at + 16 < bytes; at += 16) std::memcpy(to + at, from + at, 16);
    std::memcpy(to + bytes - 16, from + bytes - 16, 16);
  } else if (bytes >= 8) {
    uint64_t head, tail;
    std::memcpy(&head, from, 8);
    std::memcpy(&tail, from + bytes - 8, 8);
    std::memcpy(to, &head, 8);
    std::memcpy(to + bytes - 8, &tail, 8);
  } else {
    for (int64_t at = 0; at < bytes; ++at) to[at] = from[at];
  }
}

// A tensor as rows: its first dims number them, the others are their elements.
struct Rows {
  const char* data;
  Walk lead, inner;   // in bytes; `inner` without the run
  int64_t run;        // bytes that lie together
  int64_t bytes;      // of a whole row, packed
  int64_t width;      // of an element

  Rows(const Bits& x, int lead_dims) : data(x.data), run(x.width), bytes(x.width), width(x.width) {
    for (int d = lead_dims - 1; d >= 0; --d) lead.push(x.size[d], x.stride[d] * x.width);
    for (int d = x.ndim - 1; d >= lead_dims; --d) {
      if (inner.ndim == 0 && x.stride[d] * x.width == run)
        run *= x.size[d];
      else
        inner.push(x.size[d], x.stride[d] * x.width);
      bytes *= x.size[d];
    }
  }

  const char* at(int64_t row) const { return data + lead.offset(row); }

  // Asks for a row before its turn: their order is any. Of a long run the hardware foresees what follows.
  // (Inlined by force: gcc drops the call of a function that only prefetches.)
  __attribute__((always_inline)) void ask(int64_t row) const {
    const char* from = at(row);
    for (int64_t byte = 0, end = std::min(run, kShortRun); byte < end; byte += 64) __builtin_prefetch(from + byte);
  }

  void copy(const char* from, char* to) const {
    if (inner.ndim == 0) return copy_run(to, from, run);
    if (bytes) copy_dim(inner.ndim - 1, from, to);
  }

 private:
  char* copy_dim(int d, const char* from, char* to) const {
    if (d == 0 && run == width) return copy_elements(from, inner.stride[d], inner.size[d], to);
    for (int64_t i = 0; i < inner.size[d]; ++i, from += inner.stride[d]) {
      if (d > 0) {
        to = copy_dim(d - 1, from, to);
      } else {
        copy_run(to, from, run);
        to += run;
      }
    }
    return to;
  }

  // n elements that do not lie together.
  char* copy_elements(const char* from, int64_t step, int64_t n, char* to) const {
    by_any_width(width, [&](auto t) {
      using T = decltype(t);
      T* out = reinterpret_cast<T*>(to);
      const char* x = from;  // (its own, and the count: a store of bytes may be to anything that is captured)
      const int64_t count = n, next = step;
      if (next == 0) return void(std::fill_n(out, count, *reinterpret_cast<const T*>(x)));
      for (int64_t i = 0; i < count; ++i, x += next) out[i] = *reinterpret_cast<const T*>(x);
    });
    return to + n * width;
  }
};

constexpr int64_t kRowsAhead = 16;

// to[k] = row number index[k], n of them, all in range.
inline void gather_rows(const Rows& rows, const int64_t* index, int64_t n, char* to) {
  for (int64_t k = 0; k < n; ++k, to += rows.bytes) {
    if (k + kRowsAhead < n) rows.ask(index[k + kRowsAhead]);
    rows.copy(rows.at(index[k]), to);
  }
}

// ---- indices

// An index tensor: int32 or int64, read in chunks as the unsigned pattern; a negative one is then out of range too.
struct Index {
  bool narrow;
  Bits bits;

  explicit Index(const Tensor& t) : narrow(is_narrow_index(t)), bits(t) {}
};

// Calls f(I{}) with uint32_t or uint64_t.
template <class F>
void by_index(bool narrow, const F& f) {
  if (narrow)
    f(uint32_t{});
  else
    f(uint64_t{});
}

// index as int64, sign kept
inline int64_t as_signed(uint32_t i) { return static_cast<int32_t>(i); }
inline int64_t as_signed(uint64_t i) { return static_cast<int64_t>(i); }

// 0 <= i < size, also for sizes that an int32 cannot reach
template <class I>
inline bool in_range(I i, int64_t size) {
  return static_cast<uint64_t>(as_signed(i)) < static_cast<uint64_t>(size);
}

// out[...] = input[..., index[...], ...] along `dim`, `fill` where the index is out of range. `out` is contiguous.
void gather_elements(const Bits& input, int dim, const Bits& index, bool narrow, char* out, uint64_t fill);

// The other way: gradients added up at their index along `dim` of a contiguous dx of `size`. Any shape of index with
// index.size[d] <= size[d] beside dim. Bitwise the same for any number of threads.
void scatter_add(const View& grad, int dim, const Bits& index, bool narrow, const Shape& size, const View& dx);

}  // namespace safeops::cpu
