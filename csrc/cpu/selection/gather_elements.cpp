#include "cpu/selection/indexed.h"

namespace safeops::cpu {

namespace {

template <class T>
inline T select_pattern(bool ok, T x, T other) {
  if constexpr (sizeof(T) == 16) {
    return {select_pattern(ok, x.real, other.real), select_pattern(ok, x.imag, other.imag)};
  } else {
    const T ones = static_cast<T>(-static_cast<T>(ok));
    return static_cast<T>((x & ones) | (other & static_cast<T>(~ones)));
  }
}

// True if all n indices are in range: a loop over them then needs no check.
template <class I>
bool all_in_range(const I* index, int64_t n, int64_t size) {
  uint64_t outside = 0;  // its sign bit is set if an index is below 0, or not below size
#pragma omp simd reduction(| : outside)
  for (int64_t j = 0; j < n; ++j) {
    const uint64_t at = static_cast<uint64_t>(as_signed(index[j]));
    outside |= at | (static_cast<uint64_t>(size - 1) - at);
  }
  return static_cast<int64_t>(outside) >= 0;
}

template <class T, class I>
inline T gather_one(const char* from, int64_t jump, int64_t size, I index, T fill) {
  const bool ok = in_range(index, size);
  const int64_t at = ok ? as_signed(index) : 0;  // element 0 is read and dropped: a branch might be mispredicted
  T value;
  std::memcpy(&value, from + at * jump, sizeof(T));
  return select_pattern(ok, value, fill);
}

// Gathers n elements of one run: out[j] = input[j * step + index[j] * jump], offsets in bytes; `fill` if out of range.
template <class T, class I>
void gather_run(const char* from, int64_t step, int64_t jump, int64_t size, const I* index, int64_t n, T fill, T* out) {
  if (step == 0 && jump == sizeof(T) && all_in_range(index, n, size)) {
    const T* row = reinterpret_cast<const T*>(from);
    for (int64_t j = 0; j < n; ++j) out[j] = row[as_signed(index[j])];
    return;
  }
  for (int64_t j = 0; j < n; ++j, from += step) out[j] = gather_one(from, jump, size, index[j], fill);
}

// Gathers complete runs of a few elements each. The runs start `lead` bytes apart in the input. It avoids a division
// for the start of each run, which would take longer than the copy.
template <class T, class I>
void gather_short_runs(const char* from, int64_t lead, int64_t step, int64_t jump, int64_t size, const I* index,
                       int64_t runs, int64_t run, T fill, T* out) {
  for (; runs > 0; --runs, from += lead, index += run, out += run)
    for (int64_t j = 0; j < run; ++j) out[j] = gather_one(from + j * step, jump, size, index[j], fill);
}

constexpr int64_t kShortElements = 32;  // a run with fewer elements is short
constexpr int64_t kRowBytes = 16384;  // two rows of this many bytes stay in the L1 cache

}  // namespace

void gather_elements(const BitView& input, int dim, const BitView& index, bool narrow, char* out, uint64_t fill) {
  const Shape shape = index.shape();
  const int64_t numel = shape.numel(), size = input.size[dim], jump = input.stride[dim] * input.width;
  if (numel == 0) return;
  if (size == 0) return fill_all(out, numel, input.width, fill);
  Walk walk;  // for each position of the index: its offset in the input, without index * jump
  for (int d = index.ndim - 1; d >= 0; --d) walk.push(index.size[d], d == dim ? 0 : input.stride[d] * input.width);
  const int64_t run = walk.ndim ? walk.size[0] : 1, step = walk.ndim ? walk.stride[0] : 0;
  // True if the input's rows are contiguous and short, and large parts of them are read.
  const bool rows_contiguous = step == 0 && jump == input.width && run >= size / 2 && size * jump <= kRowBytes;
  const int64_t row = rows_contiguous ? size * jump : 0;
  by_any_width(input.width, [&](auto t) {
    using T = decltype(t);
    by_index(narrow, [&](auto i) {
      using I = decltype(i);
      Source<I> indices;
      indices.bind(index.view(), shape, Order::contiguous(shape));
      const auto gather = pick<&gather_run<T, I>>();
      const auto gather_short = pick<&gather_short_runs<T, I>>();
      T* to = reinterpret_cast<T*>(out);
      parallel((numel + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
        alignas(64) I buffer[kBuffer];
        indices.prime(buffer);
        for (int64_t at = begin * kChunk, stop = std::min(end * kChunk, numel); at < stop; at += kChunk) {
          const int64_t n = std::min(kChunk, stop - at);
          const I* index_values = indices.fetch(at, n, at + kAhead, buffer);
          for (int64_t done = 0; done < n;) {
            const int64_t length = std::min(n - done, run - (at + done) % run);
            const char* from = input.data + walk.offset(at + done);
            if (const int64_t runs = (n - done) / run; walk.ndim == 2 && length == run && run < kShortElements &&
                runs > 1) {
              gather_short(from, walk.stride[1], step, jump, size, index_values + done, runs, run, pattern<T>(fill),
                           to + at + done);
              done += runs * run;
              continue;
            }
            // Prefetches the next row at the pace of the current row: elements of a row are read in random order, which
            // the hardware cannot predict.
            if (row > 0 && at + done + run < numel) {
              const int64_t begin = (at + done) % run * size / run * jump, end = begin + length * size / run * jump;
              const char* next = input.data + walk.offset(at + done + run);
              for (int64_t byte = begin; byte < end; byte += 64) __builtin_prefetch(next + byte);
            }
            gather(from, step, jump, size, index_values + done, length, pattern<T>(fill), to + at + done);
            done += length;
          }
        }
      });
    });
  });
}

}  // namespace safeops::cpu
