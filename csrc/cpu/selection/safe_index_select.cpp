// out[..., k, ...] = input[..., index[k], ...] along dim, or fill_value if the index is out of range.
// I/O: read the rows that the index names, write out. Backward: read grad once, write dx once.
#include "cpu/selection/indexed.h"
#include "cpu/selection/row_copy.h"

namespace safeops::cpu {

namespace {

constexpr int64_t kShort = 8;  // rows with fewer elements: scatter_add adds their gradients element by element

// Returns the index (K,) as a view (..., K, ...), with the other dims as in `like`.
BitView expand_index(const BitView& index, int dim, const BitView& like) {
  BitView all = index;
  all.ndim = 0;
  for (int d = 0; d < like.ndim; ++d) all.push(d == dim ? index.size[0] : like.size[d], d == dim ? index.stride[0] : 0);
  return all;
}

template <class I>
void select_rows(const Rows& rows, int64_t outer, int64_t length, const Source<I>& index, int64_t picks, uint64_t fill,
                 int64_t width, char* out) {
  const int64_t total = outer * picks, step = std::max<int64_t>(1, std::min(kChunk, kGrain * 4 / (rows.bytes + 1)));
  parallel((total + step - 1) / step, step * (rows.bytes / 4 + 1), [&](int64_t begin, int64_t end) {
    alignas(64) I buffer[kBuffer];
    index.prime(buffer);
    for (int64_t at = begin * step, stop = std::min(end * step, total); at < stop;) {
      const int64_t o = at / picks, k = at % picks, n = std::min({step, stop - at, picks - k});
      const I* index_values = index.fetch(k, n, INT64_MAX, buffer);
      char* to = out + at * rows.bytes;
      for (int64_t i = 0; i < n; ++i, to += rows.bytes) {
        if (i + kRowsAhead < n && in_range(index_values[i + kRowsAhead], length))
          rows.prefetch(o * length + as_signed(index_values[i + kRowsAhead]));
        if (in_range(index_values[i], length))
          rows.copy(rows.at(o * length + as_signed(index_values[i])), to);
        else if (fill == 0)
          std::memset(to, 0, rows.bytes);
        else
          by_any_width(width, [&](auto t) {
            using T = decltype(t);
            std::fill_n(reinterpret_cast<T*>(to), rows.bytes / width, pattern<T>(fill));
          });
      }
      at += n;
    }
  });
}

Tensor safe_index_select(const Tensor& input, const Tensor& index, int64_t dim, double fill_value) {
  BitView x(input);
  Index picked(index);
  STD_TORCH_CHECK(picked.bits.ndim <= 1, "_safe_index_select: index must have one dimension");
  const int d = resolve_dim(dim, x.ndim);
  picked.bits.make_vector();
  const int64_t picks = picked.bits.size[0];
  Shape shape = x.shape();
  STD_TORCH_CHECK(shape.ndim > 0 || picks == 1, "_safe_index_select: one index, the input has no dims");
  if (shape.ndim) shape.size[d] = picks;
  const uint64_t fill = fill_bits(fill_value, input);
  const Tensor result = on_huge_pages(new_like(shape, input), shape.numel() * x.width);
  char* out = View(result).data;
  x.make_vector();
  if (shape.numel() == 0) return result;
  if (x.count(d + 1, x.ndim) == 1) {
    gather_elements(x, d, expand_index(picked.bits, d, x), picked.narrow, out, fill);
  } else {
    const Rows rows(x, d + 1);
    const Shape line = picked.bits.shape();
    by_index(picked.narrow, [&](auto i) {
      Source<decltype(i)> index_values;
      index_values.bind(picked.bits.view(), line, Order::contiguous(line));
      select_rows(rows, x.count(0, d), x.size[d], index_values, picks, fill, x.width, out);
    });
  }
  return result;
}

// ---- backward

constexpr int64_t kPicksAhead = 8;

// A stable counting sort of the picks (positions in the index) by their destination (row of dx).
struct Sorted {
  std::vector<int64_t> first, pick;  // picks of destination i: pick[first[i]] to pick[first[i + 1] - 1]

  template <class I>
  Sorted(const Source<I>& index, int64_t picks, int64_t length) : first(length + 2), pick(picks) {
    each(index, picks, length, [&](int64_t i, int64_t) { ++first[i + 2]; });
    for (int64_t i = 0; i < length; ++i) first[i + 2] += first[i + 1];
    each(index, picks, length, [&](int64_t i, int64_t k) { pick[first[i + 1]++] = k; });
  }

 private:
  template <class I, class F>
  static void each(const Source<I>& index, int64_t picks, int64_t length, const F& f) {
    alignas(64) I buffer[kBuffer];
    index.prime(buffer);
    for (int64_t at = 0; at < picks; at += kChunk) {
      const int64_t n = std::min(kChunk, picks - at);
      const I* index_values = index.fetch(at, n, INT64_MAX, buffer);
      for (int64_t j = 0; j < n; ++j)
        if (in_range(index_values[j], length)) f(as_signed(index_values[j]), at + j);
    }
  }
};

void add_loop(double* sum, const double* x, int64_t n) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

// Computes each row of dx: the sum, in double, of the rows of grad that the forward took from this row.
void add_rows(const View& grad, const Shape& shape, const Sorted& sorted, int64_t outer, int64_t picks, int64_t length,
              int64_t inner, const View& dx) {
  const Order order = Order::contiguous(shape);
  const int64_t width = size_of(dx.dtype);
  Source<double> g;
  g.bind(grad, shape, order);
  View bits = grad;
  bits.dtype = bits_of(width);
  const Convert store = find_store<double>(dx.dtype);
  const auto add = pick<&add_loop>();
  const int64_t count = sorted.first[length];  // picks that are in range
  const int64_t line = grad.contiguous() && inner * width <= kShortRun ? inner * width : 0;  // bytes to prefetch
  by_width(width, [&](auto t) {
    using T = decltype(t);
    Source<T> alone;  // copies the gradient of a row that was taken once
    alone.bind(bits, shape, order);
    parallel(outer * length, inner, [&](int64_t begin, int64_t end) {
      alignas(64) double sum[kBuffer], values[kBuffer];
      alignas(64) T plain[kBuffer];
      g.prime(values);
      alone.prime(plain);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t o = row / length, i = row % length;
        // Later picks are rows of grad in any order, which the hardware cannot predict, so they are prefetched.
        const int64_t soon = std::min(count, sorted.first[i + 1] + kPicksAhead);
        for (int64_t k = sorted.first[i] + kPicksAhead; k < soon; ++k)
          for (int64_t at = 0; at < line; at += 64)
            __builtin_prefetch(bits.data + (o * picks + sorted.pick[k]) * line + at);
        const int64_t *k = &sorted.pick[0] + sorted.first[i], *last = &sorted.pick[0] + sorted.first[i + 1];
        char* out = dx.data + row * inner * width;
        for (int64_t at = 0; at < inner; at += kChunk, out += kChunk * width) {
          const int64_t n = std::min(kChunk, inner - at);
          const auto start = [&](const int64_t* from) { return (o * picks + *from) * inner + at; };
          if (k == last) {
            std::memset(out, 0, n * width);
          } else if (last - k == 1) {
            std::memcpy(out, alone.fetch(start(k), n, INT64_MAX, plain), n * width);
          } else {
            std::memset(sum, 0, n * sizeof(double));
            for (const int64_t* from = k; from < last; ++from) add(sum, g.fetch(start(from), n, INT64_MAX, values), n);
            if (store)
              store(sum, out, n);
            else
              std::memcpy(out, sum, n * width);
          }
        }
      }
    });
  });
}

Tensor safe_index_select_backward(const Tensor& grad, const Tensor& index, int64_t dim,
                                  const std::vector<int64_t>& size) {
  const DType dtype = View(grad).dtype;
  STD_TORCH_CHECK(View(grad).is_floating(), "_safe_index_select_backward: grad must be floating point");
  BitView g(grad);
  Index picked(index);
  STD_TORCH_CHECK(picked.bits.ndim <= 1, "_safe_index_select_backward: index must have one dimension");
  picked.bits.make_vector();
  g.make_vector();
  Shape shape(static_cast<int>(size.size()), size.data());
  const int d = resolve_dim(dim, shape.ndim);
  const Tensor result = new_output(shape, dtype, grad);
  if (shape.ndim == 0) shape.size[shape.ndim++] = 1;
  const int64_t picks = picked.bits.size[0];
  STD_TORCH_CHECK(g.ndim == shape.ndim, "_safe_index_select_backward: grad and size differ");
  for (int i = 0; i < shape.ndim; ++i)
    STD_TORCH_CHECK(g.size[i] == (i == d ? picks : shape.size[i]), "_safe_index_select_backward: grad and size differ");
  if (shape.numel() == 0) return result;
  const int64_t inner = g.count(d + 1, g.ndim);
  View v = g.view();
  v.dtype = dtype;
  if (inner < kShort || picks == 0) {
    scatter_add(v, d, expand_index(picked.bits, d, g), picked.narrow, shape, View(result));
    return result;
  }
  const Shape line = picked.bits.shape();
  by_index(picked.narrow, [&](auto i) {
    Source<decltype(i)> index_values;
    index_values.bind(picked.bits.view(), line, Order::contiguous(line));
    const Sorted sorted(index_values, picks, shape.size[d]);
    add_rows(v, g.shape(), sorted, g.count(0, d), picks, shape.size[d], inner, View(result));
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_safe_index_select", TORCH_BOX(&safe_index_select));
  m.impl("_safe_index_select_backward", TORCH_BOX(&safe_index_select_backward));
}

}  // namespace safeops::cpu
