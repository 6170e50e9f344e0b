#include "cpu/classification/classification.h"

#include <atomic>

#include "common/index.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

ClassRows::ClassRows(const char* op, const View& x, int dim_) : dim(dim_) {
  STD_TORCH_CHECK(x.is_floating() && x.ndim > 0, op, ": input must be floating point, with a dim of classes");
  classes = x.sizes[dim];
  shape = row_shape(x.shape(), dim, false);
  count = shape.numel();
}

Shape ClassRows::with(int64_t many) const {
  Shape out;
  out.size[out.ndim++] = many;
  for (int d = 0; d < shape.ndim; ++d) out.size[out.ndim++] = shape.size[d];
  return out;
}

Tensor ClassRows::weight_tensor(DType compute, DType dtype, const Tensor& like) const {
  if (!weight) return empty_vector(dtype, like);
  const Tensor out = empty(shape, compute, like);
  char* to = View(out).data;
  if (compute == DType::kDouble)
    std::copy_n(weight.get(), count, reinterpret_cast<double*>(to));
  else
    std::copy_n(weight.get(), count, reinterpret_cast<float*>(to));
  return out;
}

void set_zero(const Tensor& t) {
  const View view(t);
  std::memset(view.data, 0, view.shape().numel() * size_of(view.dtype));
}

void ClassRows::read_weights(const char* op, const Tensor& weight_) {
  const View view(weight_);
  STD_TORCH_CHECK(view.is_floating() && view.ndim == 1 && view.sizes[0] == classes, op,
                  ": weight must be floating point, with one number for each class");
  weighted = true;
  weights.resize(classes);
  read_all(view, view.shape(), weights.data());
}

void read_all(const View& view, const Shape& shape, double* to) {
  Source<double> source;
  source.bind(view, shape, Order::contiguous(shape));
  double buffer[kBuffer];
  source.prime(buffer);
  for (int64_t at = 0, count = shape.numel(); at < count; at += kChunk) {
    const int64_t n = std::min(kChunk, count - at);
    std::copy_n(source.fetch(at, n, at + kAhead, buffer), n, to + at);
  }
}

namespace {

constexpr int64_t kNoRow = INT64_MAX;

// Sets class_index, weight and keep of every row. Index is uint32_t or uint64_t. Returns the first row whose class
// counts but is out of range, or kNoRow.
template <class Index>
int64_t read_classes(const ClassRows& rows, const View& target, const View* mask, int64_t ignore_index, uint8_t* keep) {
  const Order order = Order::contiguous(rows.shape);
  Source<Index> source;
  Source<uint8_t> kept;
  View bits = target;  // the index is read as bit patterns: no Source reads int32 or int64
  bits.dtype = sizeof(Index) == 4 ? DType::kFloat : DType::kDouble;
  source.bind(bits, rows.shape, order);
  if (mask) kept.bind(*mask, rows.shape, order);
  const uint64_t classes = static_cast<uint64_t>(rows.classes);
  const double* weights = rows.weighted ? rows.weights.data() : nullptr;
  constexpr int64_t kLittle = 8 * kGrain;  // rows; fewer run on one thread, since a row is little work
  std::atomic<int64_t> missing{kNoRow};
  parallel((rows.count + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
    alignas(64) Index indices[kBuffer];
    alignas(64) uint8_t bytes[kBuffer];
    source.prime(indices);
    if (mask) kept.prime(bytes);
    for (int64_t at = begin * kChunk, stop = std::min(end * kChunk, rows.count); at < stop; at += kChunk) {
      const int64_t n = std::min(kChunk, stop - at);
      const Index* index_values = source.fetch(at, n, at + kAhead, indices);
      const uint8_t* m = mask ? kept.fetch(at, n, at + kAhead, bytes) : nullptr;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t index = static_cast<std::make_signed_t<Index>>(index_values[i]);
        const bool counts = (!m || m[i] != 0) && index != ignore_index;
        bool in_range = counts && static_cast<uint64_t>(index) < classes;
        if (counts && !in_range) {
          int64_t first = missing.load();
          while (at + i < first && !missing.compare_exchange_weak(first, at + i)) {
          }
        }
        const double other = counts && !in_range && rows.partial ? static_cast<double>(classes) : -1.0;
        if (weights) {
          const double w = in_range ? weights[index] : 0.0;
          in_range = in_range && w != 0;
          rows.weight[at + i] = w;
        }
        rows.class_index[at + i] = in_range ? static_cast<double>(index) : other;
        if (keep) keep[at + i] = in_range;
      }
    }
  }, kLittle);
  return missing.load();
}

void find_kept(const ClassRows& rows, const View* mask, uint8_t* keep) {
  Source<uint8_t> kept;
  if (mask) kept.bind(*mask, rows.shape, Order::contiguous(rows.shape));
  alignas(64) uint8_t bytes[kBuffer];
  if (mask) kept.prime(bytes);
  for (int64_t at = 0; at < rows.count; at += kChunk) {
    const int64_t n = std::min(kChunk, rows.count - at);
    const uint8_t* m = mask ? kept.fetch(at, n, at + kAhead, bytes) : nullptr;
    for (int64_t i = 0; i < n; ++i) {
      const bool keep_row = !m || m[i] != 0;
      rows.class_index[at + i] = keep_row ? 0.0 : -1.0;
      if (keep) keep[at + i] = keep_row;
    }
  }
}

}  // namespace

void ClassRows::read(const char* op, const Tensor* target, const std::optional<Tensor>& mask, int64_t ignore_index,
                     bool refuse, uint8_t* keep) {
  class_index.reset(new double[std::max<int64_t>(1, count)]);
  std::optional<View> masked;
  if (mask) masked.emplace(*mask);
  const View* m = masked ? &*masked : nullptr;
  if (!target) return find_kept(*this, m, keep);
  const View view(*target);
  STD_TORCH_CHECK(shape.is(view.ndim, view.sizes), op, ": target must have the shape of input without its classes");
  if (weighted) weight.reset(new double[std::max<int64_t>(1, count)]);
  const bool narrow = is_narrow_index(*target);
  const int64_t missing =
      (narrow ? read_classes<uint32_t> : read_classes<uint64_t>)(*this, view, m, ignore_index, keep);
  STD_TORCH_CHECK(!refuse || missing == kNoRow, op + (*op == '_'), ": target is out of range for the ", classes,
                  " classes, at row ", missing);
}

}  // namespace safeops::cpu
