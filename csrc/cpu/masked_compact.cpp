// values[k] = the k-th kept row of input, index[k] = its number, count = how many there are; and back.
// I/O: read mask (twice with several threads: each slice must know where it begins), read the kept rows, write values
// and index.
#include <atomic>

#include "selection.h"

namespace safeops::cpu {

namespace {

struct Compaction {
  const Source<uint8_t>& mask;
  const Slices& slices;
  int64_t capacity;
  int64_t* index;

  // Packs [start, stop) of the mask from slot `first` on: pack(mask bytes, at, n, slot, room) for each chunk. How many
  // are kept in all; with counted slices nobody asks.
  template <class P>
  int64_t run(int64_t start, int64_t stop, int64_t first, const P& pack) const {
    const Count kept = find_count();
    // Other slices' slots are not to be touched.
    const int64_t limit = slices.counted() ? std::min(capacity, slices.first[start / slices.length + 1]) : capacity;
    alignas(64) uint8_t buffer[kBuffer];
    mask.prime(buffer);
    int64_t k = first;
    for (int64_t at = start; at < stop; at += kChunk) {
      if (slices.counted() && k >= limit) break;
      const int64_t n = std::min(kChunk, stop - at);
      const uint8_t* m = mask.fetch(at, n, at + kAhead, buffer);
      const int64_t room = limit - k;
      if (room <= 0) {
        k += kept(m, n);
        continue;
      }
      const int64_t packed = pack(m, at, n, k, room);
      k += packed == room ? kept(m, n) : packed;
    }
    return k;
  }
};

// One element a row.
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
    const int64_t end = work.run(start, stop, first, [&](const uint8_t* m, int64_t at, int64_t n, int64_t k, int64_t room) {
      // what lies ahead is left to the hardware: of a sparse mask most is never read
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
    const int64_t end = work.run(start, stop, first, [&](const uint8_t* m, int64_t at, int64_t n, int64_t k, int64_t room) {
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
  const Bits x(input);
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
  const Tensor values = on_huge_pages(new_like(out, input), capacity * rows.bytes);
  const Tensor index = new_output(slots, DType::kLong, input), count = empty(scalar, DType::kLong, input);
  char* packed = View(values).data;
  int64_t* numbers = reinterpret_cast<int64_t*>(View(index).data);
  int64_t& kept = *reinterpret_cast<int64_t*>(View(count).data);
  kept = 0;
  if (n > 0) {
    Source<uint8_t> keep;
    keep.bind(m, lead, Order::contiguous(lead));
    const Slices slices(keep, n);
    const Compaction work{keep, slices, capacity, numbers};
    if (x.ndim == m.ndim && x.width <= 8)
      by_width(x.width, [&](auto t) { kept = compact_elements<decltype(t)>(work, x.view(), lead, packed); });
    else
      kept = compact_rows(work, rows, packed);
  }
  const int64_t used = std::min(kept, capacity);
  fill_all(packed + used * rows.bytes, (capacity - used) * (rows.bytes / x.width), x.width,
           fill_bits(fill_value, input));
  fill_all(reinterpret_cast<char*>(numbers + used), capacity - used, 8, ~uint64_t{0});
  return {values, index, count};
}

// ---- backward

// Slot k's gradient, packed, to wherever it belongs.
struct Slots {
  const uint64_t* index;  // as unsigned: an unused slot's -1 lies beyond every row
  int64_t count;

  // The first slot at or beyond a row, if they ascend, as the forward makes them.
  int64_t lower(int64_t row) const {
    return std::lower_bound(index, index + count, static_cast<uint64_t>(row)) - index;
  }
};

template <class T>
struct CopyElement {
  const char* data;
  int64_t stride;
  T* out;
  void operator()(int64_t slot, int64_t row) const { std::memcpy(out + row, data + slot * stride, sizeof(T)); }
};

struct CopyRow {
  const Rows& rows;
  char* out;
  void operator()(int64_t slot, int64_t row) const { rows.copy(rows.at(slot), out + row * rows.bytes); }
};

// Block by block: zeros, and while they are in the cache the rows that are kept. False where the slots do not ascend.
template <class Copy>
bool expand_sorted(const Slots& slots, int64_t rows, int64_t bytes, char* out, const Copy& copy) {
  const int64_t block = std::max<int64_t>(1, kGrain / 2 / std::max<int64_t>(1, bytes));
  std::atomic<bool> sorted{true};
  parallel((rows + block - 1) / block, block * std::max<int64_t>(1, bytes / 4), [&](int64_t begin, int64_t end) {
    const int64_t stop = std::min(end * block, rows);
    int64_t k = slots.lower(begin * block);
    bool ascending = true;
    for (int64_t row = begin * block; row < stop; row += block) {
      const int64_t beyond = std::min(row + block, stop);
      const bool whole = block == 1 && k < slots.count && slots.index[k] == static_cast<uint64_t>(row);
      if (!whole) std::memset(out + row * bytes, 0, (beyond - row) * bytes);
      for (; k < slots.count && slots.index[k] < static_cast<uint64_t>(beyond); ++k) {
        const int64_t to = static_cast<int64_t>(slots.index[k]);
        if (to < row) {
          ascending = false;
          break;
        }
        copy(k, to);
      }
      if (!ascending) break;
    }
    if (!ascending || k != slots.lower(stop)) sorted = false;
  });
  for (int64_t k = slots.lower(rows); k < slots.count; ++k)
    if (slots.index[k] < static_cast<uint64_t>(rows)) return false;
  return sorted;
}

template <class Copy>
void expand(const Slots& slots, int64_t rows, int64_t bytes, char* out, const Copy& copy) {
  if (rows == 0 || bytes == 0 || expand_sorted(slots, rows, bytes, out, copy)) return;
  std::memset(out, 0, rows * bytes);
  for (int64_t k = 0; k < slots.count; ++k)
    if (slots.index[k] < static_cast<uint64_t>(rows)) copy(k, static_cast<int64_t>(slots.index[k]));
}

Tensor masked_compact_backward(const Tensor& grad, const Tensor& index, const std::vector<int64_t>& size) {
  const Bits g(grad);
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
  if (slots.count > 1 && slot_index.strides[0] != 1) {  // never the forward's own
    for (int64_t k = 0; k < slots.count; ++k) packed.push_back(slots.index[k * slot_index.strides[0]]);
    slots.index = packed.data();
  }
  if (g.ndim == 1 && g.width <= 8)
    by_width(g.width, [&](auto t) {
      using T = decltype(t);
      expand(slots, rows, g.width, out, CopyElement<T>{g.data, g.stride[0] * g.width, reinterpret_cast<T*>(out)});
    });
  else
    expand(slots, rows, from.bytes, out, CopyRow{from, out});
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_masked_compact", TORCH_BOX(&masked_compact));
  m.impl("_masked_compact_backward", TORCH_BOX(&masked_compact_backward));
}

}  // namespace safeops::cpu
