// scatter_add (indexed.h). I/O: read grad and index, write dx once.
#include <vector>

#include "cpu/selection/indexed.h"

namespace safeops::cpu {

namespace {

constexpr int64_t kWide = 32768;  // sums; so many doubles still fit the L2 cache
constexpr int64_t kDummies = 16;  // sums for indices out of range, never read; several, so that additions do not wait

// The sums of a task: of destinations [first, first + size) along dim, of `tile` columns, for `block` rows of the outer
// dims.
template <class C>
struct Sums {
  C* to;
  int64_t first, size, tile;
  C dummy[kDummies];

  // Adds g[j] to destination index[j] of one row: in column `column` + j, or in the only column. Not inlined: in the
  // loops around it gcc has too few registers for this loop, which then takes 1.3 times as long.
  template <class I>
  __attribute__((noinline)) void add(C* row, const I* index, const C* g, int64_t n, int64_t column) {
    const int64_t columns = tile;
    for (int64_t j = 0; j < n; ++j) {
      const uint64_t destination = static_cast<uint64_t>(as_signed(index[j]));
      const int64_t at = static_cast<int64_t>(destination - static_cast<uint64_t>(first));
      const bool ok = static_cast<uint64_t>(at) < static_cast<uint64_t>(size);
      C* place = ok ? row + at * columns + (columns == 1 ? 0 : column + j) : dummy + j % kDummies;
      *place += g[j];
    }
  }

  // Adds several rows, each with a few indices, if there is only one column.
  template <class I>
  __attribute__((noinline)) void add_rows(C* row, const I* index, const C* g, int64_t rows, int64_t picks) {
    for (; rows > 0; --rows, row += size, index += picks, g += picks)
      for (int64_t j = 0; j < picks; ++j) {
        const uint64_t at = static_cast<uint64_t>(as_signed(index[j])) - static_cast<uint64_t>(first);
        *(at < static_cast<uint64_t>(size) ? row + at : dummy + j) += g[j];
      }
  }
};

struct Scatter {
  Shape size, sizes;      // the shapes of dx and of index
  int dim;
  int64_t outer, picks, columns;  // elements of index before dim, along dim, after dim
  int64_t length, stride;         // elements of dx along dim, after dim
  bool exact;                     // index is as large as dx in all dims but dim
  Walk before, after;             // offsets in dx of index's positions, for the dims before and after dim
  DType dtype;
  char* out;

  template <class C>
  void write(const Sums<C>& sums, int64_t row, int64_t rows, int64_t column, Convert store) const {
    const int64_t width = size_of(dtype);
    const auto put = [&](const C* from, char* to, int64_t n) {
      if (store)
        store(from, to, n);
      else if (reinterpret_cast<const char*>(from) != to)
        std::memcpy(to, from, n * width);
    };
    if (exact && sums.tile == columns && sums.size == length)
      return put(sums.to, out + row * length * stride * width, rows * length * stride);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t base = (exact ? row + r : before.offset(row + r)) * length;
      const C* from = sums.to + r * sums.size * sums.tile;
      for (int64_t i = 0; i < sums.size; ++i, from += sums.tile) {
        char* to = out + (base + sums.first + i) * stride * width;
        if (exact) {
          put(from, to + column * width, sums.tile);
        } else {
          for (int64_t t = 0; t < sums.tile; ++t)
            put(from + t, to + after.offset(column + t) * width, 1);
        }
      }
    }
  }
};

template <class C, class I>
void scatter_with(const Scatter& s, const View& grad, const View& index, int64_t block, int64_t tile, int64_t ranges) {
  const Order order = Order::contiguous(s.sizes);
  Source<C> g;
  Source<I> indices;
  g.bind(grad, s.sizes, order);
  indices.bind(index, s.sizes, order);
  const Convert store = find_store<C>(s.dtype);
  const int64_t blocks = (s.outer + block - 1) / block, tiles = (s.columns + tile - 1) / tile;
  const int64_t span = (s.length + ranges - 1) / ranges;
  const int64_t task_elements = block * s.picks * tile + block * span * tile;
  const bool in_place = !store && s.exact && block == 1 && tile == s.columns && s.length * tile > kWide;
  parallel(blocks * tiles * ranges, task_elements, [&](int64_t begin, int64_t end) {
    alignas(64) C values[kBuffer];
    alignas(64) I index_values[kBuffer];
    g.prime(values);
    indices.prime(index_values);
    std::vector<C> memory(in_place ? 0 : block * span * tile);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / ranges / tiles * block, column = task / ranges % tiles * tile;
      const int64_t rows = std::min(block, s.outer - row);
      Sums<C> sums;
      sums.first = task % ranges * span;
      sums.size = std::max<int64_t>(0, std::min(span, s.length - sums.first));
      sums.tile = std::min(tile, s.columns - column);
      sums.to = in_place ? reinterpret_cast<C*>(s.out) + (row * s.length + sums.first) * s.stride : memory.data();
      std::fill_n(sums.to, rows * sums.size * sums.tile, C{0});
      std::fill_n(sums.dummy, kDummies, C{0});
      const int64_t chunk = sums.tile == s.columns ? kChunk : sums.tile;
      // Walks the positions of index in memory order: whole rows at once, or, of each pick, the columns of the tile.
      const int64_t first = row * s.picks * s.columns, last = (row + rows) * s.picks * s.columns;
      const int64_t stride = sums.tile == s.columns ? chunk : s.columns;
      for (int64_t at = first + column; at < last; at += stride) {
        const int64_t n = std::min(chunk, last - at);
        const I* i = indices.fetch(at, n, at + kAhead, index_values);
        const C* v = g.fetch(at, n, at + kAhead, values);
        for (int64_t done = 0; done < n;) {
          const int64_t position = at + done - first;
          const int64_t t = position % s.columns - column, r = position / (s.picks * s.columns);
          // left: elements up to the end of the tile's columns; if index has one column, up to the end of the row's
          // picks.
          const int64_t left = sums.tile == 1 ? (s.columns == 1 ? s.picks - position % s.picks : 1) : sums.tile - t;
          const int64_t m = std::min(n - done, left), rows_left = (n - done) / s.picks;
          if (s.columns == 1 && m == s.picks && m <= kDummies && rows_left > 1) {
            sums.add_rows(sums.to + r * sums.size, i + done, v + done, rows_left, m);
            done += rows_left * m;
            continue;
          }
          sums.add(sums.to + r * sums.size * sums.tile, i + done, v + done, m, t);
          done += m;
        }
      }
      s.write(sums, row, rows, column, store);
    }
  });
}

// For one index per row, as when a loss picks a class: nothing is added up, and nearly all of dx is 0.
template <class T, class I>
void place_with(const Scatter& s, const View& grad, const View& index) {
  const Order order = Order::contiguous(s.sizes);
  Source<T> g;
  Source<I> indices;
  g.bind(grad, s.sizes, order);
  indices.bind(index, s.sizes, order);
  const int64_t span = s.length * s.stride;  // elements of dx per row
  const int64_t rows = std::max<int64_t>(1, std::min(kChunk / s.columns, kWide / span));
  parallel((s.outer + rows - 1) / rows, rows * span, [&](int64_t begin, int64_t end) {
    alignas(64) T values[kBuffer];
    alignas(64) I index_values[kBuffer];
    g.prime(values);
    indices.prime(index_values);
    for (int64_t row = begin * rows, stop = std::min(end * rows, s.outer); row < stop; row += rows) {
      const int64_t row_count = std::min(rows, stop - row), last = (row + row_count) * s.columns;
      T* to = reinterpret_cast<T*>(s.out) + row * span;
      std::memset(to, 0, row_count * span * sizeof(T));
      for (int64_t at = row * s.columns, column = 0; at < last; at += kChunk) {
        const int64_t n = std::min(kChunk, last - at);
        const I* i = indices.fetch(at, n, at + kAhead, index_values);
        const T* v = g.fetch(at, n, at + kAhead, values);
        for (int64_t j = 0; j < n; ++j) {
          if (in_range(i[j], s.length)) to[as_signed(i[j]) * s.stride + column] = v[j];
          if (++column == s.columns) column = 0, to += span;
        }
      }
    }
  });
}

}  // namespace

void scatter_add(const View& grad, int dim, const BitView& index, bool narrow, const Shape& size, const View& dx) {
  Scatter s{size, index.shape(), dim, index.count(0, dim), index.size[dim], index.count(dim + 1, index.ndim), 0, 1};
  s.length = size.size[dim];
  s.exact = true;
  int64_t rows = 1;
  for (int d = size.ndim - 1; d >= 0; --d) {
    if (d == dim) continue;
    int64_t& step = d > dim ? s.stride : rows;
    (d > dim ? s.after : s.before).push(index.size[d], step);
    step *= size.size[d];
    s.exact = s.exact && size.size[d] == index.size[d];
    STD_TORCH_CHECK(index.size[d] <= size.size[d], "safeops: index is larger than the input beside dim");
  }
  s.dtype = dx.dtype;
  s.out = dx.data;
  const int64_t numel = size.numel();
  if (!s.exact || index.numel() == 0) fill_all(dx.data, numel, size_of(dx.dtype), 0);
  if (numel == 0 || index.numel() == 0) return;
  if (s.picks == 1 && s.exact && grad.dtype == dx.dtype) {
    const int64_t width = size_of(dx.dtype);
    View bits = grad;
    bits.dtype = bits_of(width);
    return by_width(width, [&](auto t) {
      by_index(narrow, [&](auto i) { place_with<decltype(t), decltype(i)>(s, bits, index.view()); });
    });
  }
  // Sums are kept in double if they fit the cache; else in the compute dtype, and each thread sums a range of dx.
  const int64_t most = kWide / s.length;
  const bool wide = most >= std::min<int64_t>(8, s.columns) && most > 0;
  // If a tile has only some of the columns, they are read at once, so they must fit a buffer.
  const int64_t tile = !wide || most >= s.columns ? s.columns : std::min(most, kChunk);
  const int64_t all = s.length * s.columns;
  const int64_t block = wide && tile == s.columns ? std::min(s.outer, std::max<int64_t>(1, kWide / 8 / all)) : 1;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t ranges = wide || s.outer >= threads ? 1 : std::min(threads, std::max<int64_t>(1, s.length / 1024));
  by_index(narrow, [&](auto i) {
    using I = decltype(i);
    if (wide || dx.dtype == DType::kDouble || grad.dtype == DType::kDouble)
      scatter_with<double, I>(s, grad, index.view(), block, tile, ranges);
    else
      scatter_with<float, I>(s, grad, index.view(), block, tile, ranges);
  });
}

}  // namespace safeops::cpu
