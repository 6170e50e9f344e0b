// Orders rows by their segment ids with a stable counting sort.
// I/O: read the ids (rows,), three times if they are not sorted; write bounds (S + 1,) and order (rows,).
#include <numeric>

#include "cpu/reductions/segments.h"

namespace safeops::cpu {

namespace {

// True if no id is smaller than the previous id. The loop has no early exit, so that it vectorises.
template <class T>
bool are_sorted(const T* id, int64_t n) {
  int decreases = 0;
  for (int64_t i = 1; i < n; ++i) decreases |= id[i] < id[i - 1];
  return decreases == 0;
}

// Returns the first row >= `at` with an id >= s. The search doubles its step, since that row is usually near.
template <class T>
int64_t first_of(const T* id, int64_t at, int64_t rows, int64_t s) {
  int64_t step = 64;
  for (; at + step <= rows && id[at + step - 1] < s; step *= 2) at += step;
  return std::lower_bound(id + at, id + std::min(at + step, rows), s) - id;
}

template <class T>
void sort_rows(const T* id, int64_t rows, int64_t segments, int64_t* bounds, int64_t* order) {
  if (pick<&are_sorted<T>>()(id, rows)) {  // as in a packed batch: then no row has to move
    for (int64_t s = 0, at = 0; s <= segments; ++s) bounds[s] = at = first_of(id, at, rows, s);
    std::iota(order, order + rows, int64_t{0});
    return;
  }
  // Bucket 0 gets the ids below 0, bucket s + 1 the id s, bucket segments + 1 the ids >= segments. At first places[b +
  // 1] counts the rows of bucket b. After the prefix sum places[b] is the place of bucket b's next row.
  const auto bucket = [=](T s) { return s < 0 ? 0 : std::min<int64_t>(s, segments) + 1; };
  std::vector<int64_t> places(segments + 3);
  for (int64_t i = 0; i < rows; ++i) ++places[bucket(id[i]) + 1];
  for (int64_t s = 0; s <= segments; ++s) bounds[s] = places[s + 1] += places[s];
  for (int64_t i = 0; i < rows; ++i) order[places[bucket(id[i])]++] = i;
}

template <class T>
void sort_rows(const View& ids, int64_t segments, int64_t* bounds, int64_t* order) {
  const int64_t rows = ids.sizes[0];
  const T* id = reinterpret_cast<const T*>(ids.data);
  std::vector<T> copy;
  if (!ids.contiguous()) {
    for (int64_t i = 0; i < rows; ++i) copy.push_back(id[i * ids.strides[0]]);
    id = copy.data();
  }
  sort_rows(id, rows, segments, bounds, order);
}

std::tuple<Tensor, Tensor> segment_order(const Tensor& segment_ids, int64_t num_segments) {
  const View ids(segment_ids);
  STD_TORCH_CHECK(ids.ndim == 1 && num_segments >= 0, "_segment_order: ids must have one dim");
  const ScalarType type = segment_ids.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, "_segment_order: ids must be int64 or int32");
  const int64_t count = num_segments + 1;
  const Tensor bounds = empty(Shape(1, &count), DType::kLong, segment_ids);
  const Tensor order = empty(ids.shape(), DType::kLong, segment_ids);
  auto *to = reinterpret_cast<int64_t*>(View(bounds).data), *places = reinterpret_cast<int64_t*>(View(order).data);
  if (type == ScalarType::Long)
    sort_rows<int64_t>(ids, num_segments, to, places);
  else
    sort_rows<int32_t>(ids, num_segments, to, places);
  return {bounds, order};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_segment_order", TORCH_BOX(&segment_order)); }

}  // namespace safeops::cpu
