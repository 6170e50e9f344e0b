// Copies rows of a tensor of any layout, one by one in any order.
#pragma once

#include "cpu/selection/patterns.h"

namespace safeops::cpu {

constexpr int64_t kShortRun = 1024;  // bytes; a longer run is copied by a call of memcpy

// Copies by memcpys of fixed lengths, which the compiler turns into a few moves; a memcpy of a variable length is a
// call.
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

// A tensor as rows. Its leading dims index the rows, its other dims the elements of a row.
struct Rows {
  const char* data;
  Walk lead, inner;   // strides in bytes; `inner` lacks the dims that `run` covers
  int64_t run;        // bytes of a row's innermost contiguous run
  int64_t bytes;      // bytes of a row, packed
  int64_t width;      // bytes of an element

  Rows(const BitView& x, int lead_dims) : data(x.data), run(x.width), bytes(x.width), width(x.width) {
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

  // Prefetches a row: rows are read in random order, so each is prefetched before its turn. If its run is long, only
  // the beginning is prefetched, since the hardware predicts the rest. The function must be inlined: gcc drops calls of
  // a function that only prefetches.
  __attribute__((always_inline)) void prefetch(int64_t row) const {
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

  // Copies n elements that are not contiguous.
  char* copy_elements(const char* from, int64_t step, int64_t n, char* to) const {
    by_any_width(width, [&](auto t) {
      using T = decltype(t);
      T* out = reinterpret_cast<T*>(to);
      const char* x = from;  // local copies: gcc assumes that a store of bytes may change captured variables
      const int64_t count = n, next = step;
      if (next == 0) return void(std::fill_n(out, count, *reinterpret_cast<const T*>(x)));
      for (int64_t i = 0; i < count; ++i, x += next) out[i] = *reinterpret_cast<const T*>(x);
    });
    return to + n * width;
  }
};

constexpr int64_t kRowsAhead = 16;

// Copies row index[k] to place k of `to`, for k in [0, n). All indices must be in range.
inline void gather_rows(const Rows& rows, const int64_t* index, int64_t n, char* to) {
  for (int64_t k = 0; k < n; ++k, to += rows.bytes) {
    if (k + kRowsAhead < n) rows.prefetch(index[k + kRowsAhead]);
    rows.copy(rows.at(index[k]), to);
  }
}

}  // namespace safeops::cpu
