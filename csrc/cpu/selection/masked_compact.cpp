// values[k] = the k-th kept row of input, index[k] = its row number, count = the number of kept rows; and the backward.
// I/O: read mask (twice with several threads, since each slice needs its first slot), read the kept rows, write values
// and index.
#include <atomic>

#include "cpu/selection/pack.h"
#include "cpu/selection/row_copy.h"

namespace safeops::cpu {

namespace {

struct Compaction {
  const Source<uint8_t>& mask;
  const Slices& slices;
  int64_t capacity;
  int64_t* index;

  // Calls pack(mask bytes, at, n, slot, room) for each chunk of [start, stop) of the mask. The first kept row goes to
  // slot `first`. Returns `first` plus the number of kept rows, including those beyond the capacity. If slices were
  // counted beforehand, nobody needs this number, and the loop ends when the slots are full.
  template <class P>
  int64_t run(int64_t start, int64_t stop, int64_t first, const P& pack) const {
    const Count count_kept = find_count();
    // The slots of other slices must not be written.
    const int64_t limit = slices.limit(start, capacity);
    alignas(64) uint8_t buffer[kBuffer];
    mask.prime(buffer);
    int64_t k = first;
    for (int64_t at = start; at < stop; at += kChunk) {
      if (slices.counted() && k >= limit) break;
      const int64_t n = std::min(kChunk, stop - at);
      const uint8_t* m = mask.fetch(at, n, at + kAhead, buffer);
      const int64_t room = limit - k;
      if (room <= 0) {
        k += count_kept(m, n);
        continue;
      }
      const int64_t packed = pack(m, at, n, k, room);
      k += packed == room ? count_kept(m, n) : packed;
    }
    return k;
  }
};

// Compacts rows that have one element each. Returns the number of kept rows.
template <class T>
int64_t compact_elements(const Compaction& work, const View& input, const Shape& shape, char* values) {
  Source<T> x;
  x.bind(input, shape, Order::contiguous(shape));
  const Pack<T> pack = find_pack<T>(true, true);
  T* out = reinterpret_cast<T*>(values);
  int64_t total = 0;
  work.slices.run([&](int64_t start, int64_t stop, int64_t first) {
    alignas(64) T buffer[kBuffer];
    x.prime(buffer);
    const int64_t end = work.run(start, stop, first,
                                 [&](const uint8_t* m, int64_t at, int64_t n, int64_t k, int64_t room) {
      // The input is not prefetched: with a sparse mask most of it is never read.
      return pack(m, x.fetch(at, n, INT64_MAX, buffer), n, at, out + k, work.index + k, room);
    });
    if (!work.slices.counted()) total = end;
  });
  return work.slices.counted() ? work.slices.first.back() : total;
}

int64_t compact_rows(const Compaction& work, const Rows& rows, char* values) {
  const Pack<uint8_t> pack = find_pack<uint8_t>(false, true);
  int64_t total = 0;
  work.slices.run([&](int64_t start, int64_t stop, int64_t first) {
    const int64_t end = work.run(start, stop, first,
                                 [&](const uint8_t* m, int64_t at, int64_t n, int64_t k, int64_t room) {
      const int64_t packed = pack(m, nullptr, n, at, nullptr, work.index + k, room);
      gather_rows(rows, work.index + k, packed, values + k * rows.bytes);
      return packed;
    });
    if (!work.slices.counted()) total = end;
  });
  return work.slices.counted() ? work.slices.first.back() : total;
}

std::tuple<Tensor, Tensor, Tensor> masked_compact(const Tensor& input, const Tensor& mask, int64_t capacity,
                                                  double fill_value) {
  const BitView x(input);
  const View m(mask);
  STD_TORCH_CHECK(m.dtype == DType::kBool, "_masked_compact: mask must be bool");
  STD_TORCH_CHECK(capacity >= 0, "_masked_compact: capacity must not be negative, got ", capacity);
  STD_TORCH_CHECK(m.ndim <= x.ndim, "_masked_compact: the mask has more dims than the input");
  const Shape lead(m.ndim, m.sizes);
  STD_TORCH_CHECK(lead.is(m.ndim, x.size), "_masked_compact: the mask must have the input's leading sizes");
  Shape out;
  out.size[out.ndim++] = capacity;
  for (int d = m.ndim; d < x.ndim; ++d) out.size[out.ndim++] = x.size[d];
  const Rows rows(x, m.ndim);
  const int64_t n = lead.numel();
  const Shape slots(1, &capacity), scalar(0, nullptr);
  const Tensor fresh = new_like(out, input);  // first, since it raises an error if the capacity needs too many bytes
  const Tensor values = on_huge_pages(fresh, capacity * rows.bytes);
  const Tensor index = new_output(slots, DType::kLong, input), count = empty(scalar, DType::kLong, input);
  char* packed = View(values).data;
  int64_t* index_data = reinterpret_cast<int64_t*>(View(index).data);
  int64_t& kept = *reinterpret_cast<int64_t*>(View(count).data);
  kept = 0;
  if (n > 0) {
    Source<uint8_t> keep;
    keep.bind(m, lead, Order::contiguous(lead));
    const Slices slices(keep, n);
    const Compaction work{keep, slices, capacity, index_data};
    if (x.ndim == m.ndim && x.width <= 8)
      by_width(x.width, [&](auto t) { kept = compact_elements<decltype(t)>(work, x.view(), lead, packed); });
    else
      kept = compact_rows(work, rows, packed);
  }
  const int64_t used = std::min(kept, capacity);
  fill_all(packed + used * rows.bytes, (capacity - used) * (rows.bytes / x.width), x.width,
           fill_bits(fill_value, input));
  fill_all(reinterpret_cast<char*>(index_data + used), capacity - used, 8, ~uint64_t{0});
  return {values, index, count};
}

// ---- backward

// The row that each slot holds, as an unsigned number: the -1 of an unused slot then exceeds every row.
struct Slots {
  const uint64_t* index;
  int64_t count;

  // Returns the first slot in [from, to) whose row is at least `row`. The rows must ascend, as in the forward's index.
  int64_t lower(int64_t row, int64_t from, int64_t to) const {
    return std::lower_bound(index + from, index + to, static_cast<uint64_t>(row)) - index;
  }
  int64_t lower(int64_t row) const { return lower(row, 0, count); }

  bool none_from(int64_t row) const {
    uint64_t rows = static_cast<uint64_t>(row);
    for (int64_t k = lower(row); k < count; ++k)
      if (index[k] < rows) return false;
    return true;
  }
};

// Sets flags[i] = 1 if a slot holds row + i, else 0. If the slots' rows do not ascend or are outside [row, row + n),
// returns 1 and writes nothing; else returns 0.
int64_t flag_loop(const uint64_t* index, int64_t slots, uint64_t row, int64_t n, uint8_t* flags) {
  uint64_t wrong = 0;
  _Pragma("omp simd reduction(+ : wrong)")
  for (int64_t k = 1; k < slots; ++k) wrong += index[k] <= index[k - 1];
  if (wrong || (slots && (index[0] < row || index[slots - 1] - row >= static_cast<uint64_t>(n)))) return 1;
  std::memset(flags, 0, n);
  for (int64_t k = 0; k < slots; ++k) flags[index[k] - row] = 1;
  return 0;
}

// Writes the gradient chunk by chunk: turns the slots' rows into a mask again, and merges grad into zeros by this mask.
// Returns false if the slots' rows do not ascend.
template <class T>
bool expand_elements(const Slots& slots, int64_t rows, const Source<T>& grad, T* out) {
  std::atomic<bool> sorted{true};
  const auto flag = pick<&flag_loop>();
  const Merge<T> merge = find_merge<T>();
  parallel((rows + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
    alignas(64) T values[kBuffer], zeros[kChunk] = {};
    alignas(64) uint8_t flags[kBuffer];
    grad.prime(values);
    const int64_t stop = std::min(end * kChunk, rows);
    int64_t k = slots.lower(begin * kChunk);
    for (int64_t row = begin * kChunk; row < stop; row += kChunk) {
      const int64_t n = std::min(kChunk, stop - row);
      const int64_t used = slots.lower(row + n, k, std::min(k + n, slots.count)) - k;
      if (flag(slots.index + k, used, static_cast<uint64_t>(row), n, flags)) {
        sorted = false;
        return;
      }
      if (used == 0) {
        std::memset(out + row, 0, n * sizeof(T));
        continue;
      }
      const T* g = grad.fetch(k, used, k + kAhead, values);
      const int64_t readable = grad.kind == Kind::kDirect ? slots.count - k : g == values ? kChunk : used;
      merge(flags, zeros, g, used, readable, n, out + row);
      k += used;
    }
    if (k != slots.lower(stop)) sorted = false;
  });
  return sorted && slots.none_from(rows);
}

// Writes the gradient block by block: zeroes a block, and copies its kept rows while it is in the cache. Returns false
// if the slots' rows do not ascend.
bool expand_rows(const Slots& slots, int64_t rows, const Rows& grad, char* out) {
  const int64_t bytes = grad.bytes, block = std::max<int64_t>(1, kGrain / 2 / bytes);
  std::atomic<bool> sorted{true};
  parallel((rows + block - 1) / block, block * std::max<int64_t>(1, bytes / 4), [&](int64_t begin, int64_t end) {
    const int64_t stop = std::min(end * block, rows);
    int64_t k = slots.lower(begin * block);
    for (int64_t row = begin * block; row < stop; row += block) {
      const int64_t beyond = std::min(row + block, stop);
      const bool one_row = block == 1 && k < slots.count && slots.index[k] == static_cast<uint64_t>(row);
      if (!one_row) std::memset(out + row * bytes, 0, (beyond - row) * bytes);
      for (; k < slots.count && slots.index[k] < static_cast<uint64_t>(beyond); ++k) {
        if (slots.index[k] < static_cast<uint64_t>(row)) {
          sorted = false;
          return;
        }
        grad.copy(grad.at(k), out + static_cast<int64_t>(slots.index[k]) * bytes);
      }
    }
    if (k != slots.lower(stop)) sorted = false;
  });
  return sorted && slots.none_from(rows);
}

Tensor masked_compact_backward(const Tensor& grad, const Tensor& index, const std::vector<int64_t>& size) {
  const BitView g(grad);
  const View slot_index(index);
  STD_TORCH_CHECK(slot_index.dtype == DType::kLong && slot_index.ndim == 1 && g.ndim >= 1 &&
                      slot_index.sizes[0] == g.size[0],
                  "_masked_compact_backward: index must be int64, one number a slot of grad");
  const Shape shape(static_cast<int>(size.size()), size.data());
  const int lead = shape.ndim - (g.ndim - 1);
  STD_TORCH_CHECK(lead >= 0, "_masked_compact_backward: grad has more dims than size");
  int64_t rows = 1;
  for (int d = 0; d < lead; ++d) rows *= shape.size[d];
  for (int d = lead; d < shape.ndim; ++d)
    STD_TORCH_CHECK(shape.size[d] == g.size[d - lead + 1], "_masked_compact_backward: grad and size differ");
  const Rows from(g, 1);
  const Tensor dx = on_huge_pages(new_like(shape, grad), rows * from.bytes);
  char* out = View(dx).data;
  std::vector<uint64_t> packed;
  Slots slots{reinterpret_cast<const uint64_t*>(slot_index.data), g.size[0]};
  if (slots.count > 1 && slot_index.strides[0] != 1) {  // never true for the forward's index
    for (int64_t k = 0; k < slots.count; ++k) packed.push_back(slots.index[k * slot_index.strides[0]]);
    slots.index = packed.data();
  }
  if (rows == 0 || from.bytes == 0) return dx;
  bool done = false;
  if (g.ndim == 1 && g.width <= 8)
    by_width(g.width, [&](auto t) {
      using T = decltype(t);
      Source<T> values;
      values.bind(g.view(), g.shape(), Order::contiguous(g.shape()));
      done = expand_elements(slots, rows, values, reinterpret_cast<T*>(out));
    });
  else
    done = expand_rows(slots, rows, from, out);
  if (!done) {  // the index is not one that the forward returned
    fill_all(out, rows, from.bytes, 0);
    for (int64_t k = 0; k < slots.count; ++k)
      if (slots.index[k] < static_cast<uint64_t>(rows))
        from.copy(from.at(k), out + static_cast<int64_t>(slots.index[k]) * from.bytes);
  }
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_masked_compact", TORCH_BOX(&masked_compact));
  m.impl("_masked_compact_backward", TORCH_BOX(&masked_compact_backward));
}

}  // namespace safeops::cpu
