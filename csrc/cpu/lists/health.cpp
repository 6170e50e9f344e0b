// _health_ writes a row of statistics (common/health.h) for each tensor of a list. _pick_ reads the values of tensors
// at the index that a row's kFirst gives. Values are read as bit patterns: without the sign bit, these are ordered as
// the magnitudes.
// I/O: read each tensor once.
#include <array>

#include "common/health.h"
#include "common/real.h"
#include "cpu/lists/multi_tensor.h"

namespace safeops::cpu {

namespace {

// Lists of up to this many elements take one thread. A tracer counts after every op: on shared cores, waiting for a
// second thread costs more than it saves.
constexpr int64_t kSingleThread = 1 << 20;

using Row = std::array<int64_t, kHealthColumns>;

// The type in which bits are compared: every instruction set compares signed integers.
template <class Bits>
using Signed = std::make_signed_t<Bits>;

template <class Bits>
struct Limits {
  Signed<Bits> infinity, normal, tiny;

  explicit Limits(const HealthLimits& from)
      : infinity(static_cast<Signed<Bits>>(from.infinity)),
        normal(static_cast<Signed<Bits>>(from.normal)),
        tiny(static_cast<Signed<Bits>>(from.tiny)) {}
};

template <class Bits>
struct Finite {
  Signed<Bits> zero, tiny, normal, largest;  // numbers of values that are 0, <= 2^-25, < 2^-14; the largest magnitude
};
template <class Bits>
struct Special {
  Signed<Bits> nan, inf, minus_inf, largest;  // numbers of NaN, inf, -inf; the largest finite magnitude
};

template <class Bits>
constexpr Signed<Bits> kMagnitude = std::numeric_limits<Signed<Bits>>::max();

// Requires n <= kChunk, so that the counts fit 16 bits.
template <class Bits>
void finite_loop(const Bits* x, int64_t n, const Limits<Bits>& limits, Finite<Bits>& counts) {
  using T = Signed<Bits>;
  T zero = 0, tiny = 0, normal = 0, largest = 0;
  const T most_tiny = limits.tiny, least_normal = limits.normal;
#pragma omp simd reduction(+ : zero, tiny, normal) reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const T size = static_cast<T>(x[i]) & kMagnitude<Bits>;
    zero = static_cast<T>(zero + (size == 0));
    tiny = static_cast<T>(tiny + (size <= most_tiny));
    normal = static_cast<T>(normal + (size < least_normal));
    largest = size > largest ? size : largest;
  }
  counts = {zero, tiny, normal, largest};
}

template <class Bits>
void special_loop(const Bits* x, int64_t n, const Limits<Bits>& limits, Special<Bits>& counts) {
  using T = Signed<Bits>;
  T nan = 0, infinite = 0, minus = 0, largest = 0;
  const T infinity = limits.infinity, minus_infinity = static_cast<T>(infinity | std::numeric_limits<T>::min());
#pragma omp simd reduction(+ : nan, infinite, minus) reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const T bits = static_cast<T>(x[i]), size = bits & kMagnitude<Bits>;
    nan = static_cast<T>(nan + (size > infinity));
    infinite = static_cast<T>(infinite + (size == infinity));
    minus = static_cast<T>(minus + (bits == minus_infinity));
    const T finite = size < infinity ? size : T{0};
    largest = finite > largest ? finite : largest;
  }
  counts = {nan, static_cast<T>(infinite - minus), minus, largest};
}

double magnitude(uint64_t bits, DType type) {
  double value;
  if (type == DType::kDouble) return bit_cast<double>(bits);
  if (type == DType::kFloat) return bit_cast<float>(static_cast<uint32_t>(bits));
  const uint16_t half = static_cast<uint16_t>(bits);
  find_load<double>(type)(&half, &value, 1);
  return value;
}

template <class Bits>
Row row_of(const Member& member, int64_t start, int64_t stop) {
  const DType type = member.view.dtype;
  const Limits<Bits> limits(health_limits(type));
  const auto finite = pick<&finite_loop<Bits>>();
  const auto special = pick<&special_loop<Bits>>();
  Row row{};
  Signed<Bits> largest = 0;
  each_chunk<Bits>(member, start, stop, [&](const Bits* x, int64_t at, int64_t n) {
    Finite<Bits> f;
    finite(x, n, limits, f);
    row[kZero] += f.zero;
    row[kSmall] += f.normal - f.zero;
    row[kTiny] += f.tiny - f.zero;
    if (f.largest >= limits.infinity) {
      Special<Bits> s;
      special(x, n, limits, s);
      row[kNan] += s.nan;
      row[kInf] += s.inf;
      row[kMinusInf] += s.minus_inf;
      f.largest = s.largest;
      for (int64_t i = 0; i < n && !(member.row_by_row() && row[kFirst]); ++i)
        if ((static_cast<Signed<Bits>>(x[i]) & kMagnitude<Bits>) >= limits.infinity)
          row[kFirst] = std::max(row[kFirst], member.numel - member.elements.offset(at + i));
    }
    largest = std::max(largest, f.largest);
  });
  row[kLargest] = bit_cast<int64_t>(magnitude(static_cast<uint64_t>(largest), type));
  return row;
}

// Returns a pointer to row `row` of a contiguous matrix, which must have at least `row + count` rows.
template <class T>
T* rows_of(const Tensor& matrix, DType dtype, int64_t columns, int64_t row, int64_t count, const char* op) {
  const View view(matrix);
  STD_TORCH_CHECK(view.dtype == dtype && view.ndim == 2 && view.sizes[1] == columns && view.contiguous(), op,
                  ": needs contiguous rows of ", columns, dtype == DType::kLong ? " int64" : " float64");
  STD_TORCH_CHECK(row >= 0 && row <= view.sizes[0] - count, op, ": rows ", row, " to ", row + count, " of ",
                  view.sizes[0]);
  return reinterpret_cast<T*>(view.data) + row * columns;
}

void health(const Tensor& out, int64_t row, const std::vector<Tensor>& inputs) {
  const TensorList list(inputs, "_health_");
  const int64_t count = static_cast<int64_t>(inputs.size());
  int64_t* to = rows_of<int64_t>(out, DType::kLong, kHealthColumns, row, count, "_health_");
  std::vector<Row> parts(list.pieces());
  list.each_piece([&](const Member& member, int64_t piece, int64_t start, int64_t stop) {
    switch (size_of(member.view.dtype)) {
      case 2: parts[piece] = row_of<uint16_t>(member, start, stop); break;
      case 4: parts[piece] = row_of<uint32_t>(member, start, stop); break;
      default: parts[piece] = row_of<uint64_t>(member, start, stop);
    }
  }, kSingleThread);
  for (int64_t m = 0, piece = 0; m < count; ++m, to += kHealthColumns)
    for (const int64_t end = m + 1 < count ? list.members()[m + 1].first : list.pieces(); piece < end; ++piece)
      for (int c = 0; c < kHealthColumns; ++c)
        to[c] = c < kLargest ? to[c] + parts[piece][c] : std::max(to[c], parts[piece][c]);
}

double read_real(const char* at, const Real& real) {
  const auto as = [at](auto value) {
    std::memcpy(&value, at, sizeof(value));
    return static_cast<double>(value);
  };
  if (real.floating == DType::kDouble) return as(double{});
  if (real.floating != DType::kOther) {
    double value;
    find_load<double>(real.floating)(at, &value, 1);
    return value;
  }
  switch (real.bytes) {
    case 1: return real.is_signed ? as(int8_t{}) : as(uint8_t{});
    case 2: return real.is_signed ? as(int16_t{}) : as(uint16_t{});
    case 4: return real.is_signed ? as(int32_t{}) : as(uint32_t{});
    default: return real.is_signed ? as(int64_t{}) : as(uint64_t{});
  }
}

void pick_at(const Tensor& out, int64_t row, const Tensor& health, int64_t health_row,
             const std::vector<Tensor>& inputs, const std::vector<int64_t>& size) {
  double* to = rows_of<double>(out, DType::kDouble, 4, row, 1, "_pick_");
  const int64_t* row_values = rows_of<int64_t>(health, DType::kLong, kHealthColumns, health_row, 1, "_pick_");
  const Shape shape(static_cast<int>(size.size()), size.data());
  const int64_t numel = shape.numel();
  for (size_t i = 0; i < inputs.size() && i < 4; ++i) {
    const View x(inputs[i]);
    const Real real = real_of(inputs[i], "_pick_");
    int64_t strides[kMaxDims];
    expand_strides(x.ndim, x.sizes, x.strides, shape, strides);
    const int64_t first = numel - row_values[kFirst];
    if (row_values[kFirst] <= 0 || first < 0) continue;
    Walk walk;
    for (int d = shape.ndim - 1; d >= 0; --d) walk.push(shape.size[d], strides[d]);
    to[i] = read_real(x.data + walk.offset(first) * real.bytes, real);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_health_", TORCH_BOX(&health));
  m.impl("_pick_", TORCH_BOX(&pick_at));
}

}  // namespace safeops::cpu
