// Loops over masks that count the kept elements, pack them together, and merge them back.
#pragma once

#include <vector>

#include "cpu/engine/operand.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

// Counts the kept elements among n mask bytes.
using Count = int64_t (*)(const uint8_t* mask, int64_t n);
Count find_count();

// Packs x[i] to `out` and base + i to `index` for the i with mask[i], in order, at most `room` of them. Returns their
// number k. If one of the outputs is absent, x or index is null. Entries [k, room) may be overwritten.
template <class T>
using Pack = int64_t (*)(const uint8_t* mask, const T* x, int64_t n, int64_t base, T* out, int64_t* index,
                         int64_t room);
template <class T> Pack<T> find_pack(bool values, bool index);

// out[i] = mask[i] ? the next element of source : x[i]. After `most` (> 0) elements of source, out[i] = x[i]. readable:
// number of elements of source that may be read, at least `most`.
template <class T>
using Merge = void (*)(const uint8_t* mask, const T* x, const T* source, int64_t most, int64_t readable, int64_t n,
                       T* out);
template <class T> Merge<T> find_merge();

// A mask cut into slices. The kept elements of each slice are counted, which gives the rank of its first kept element,
// so that the slices can be packed independently. A single slice is not counted, unless the total is wanted.
struct Slices {
  int64_t numel, length, count;
  std::vector<int64_t> first;  // if counted: rank of each slice's first kept element, then the total

  Slices(const Source<uint8_t>& mask, int64_t numel, bool total = false);

  bool counted() const { return !first.empty(); }

  // Returns the end of the slots of the slice that begins at `start`, at most `most`.
  int64_t limit(int64_t start, int64_t most) const {
    return counted() ? std::min(most, first[start / length + 1]) : most;
  }

  // Calls body(start, stop, rank of the first kept element) for each slice.
  template <class Body>
  void run(const Body& body) const {
    if (count == 1) return body(int64_t{0}, numel, int64_t{0});
    parallel(count, length, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) body(s * length, std::min((s + 1) * length, numel), first[s]);
    });
  }
};

}  // namespace safeops::cpu
