#include "cpu/selection/selection.h"

namespace safeops::cpu {

void fill_all(char* dst, int64_t n, int64_t width, uint64_t fill) {
  if (n <= 0) return;
  parallel((n + kChunk - 1) / kChunk, kChunk, [&](int64_t begin, int64_t end) {
    const int64_t start = begin * kChunk, stop = std::min(end * kChunk, n);
    if (fill == 0)
      std::memset(dst + start * width, 0, (stop - start) * width);
    else
      by_any_width(width, [&](auto t) {
        using T = decltype(t);
        T* to = reinterpret_cast<T*>(dst);
        std::fill(to + start, to + stop, pattern<T>(fill));
      });
  });
}

// ---- gather

namespace {

template <class T>
inline T chosen(bool ok, T x, T other) {
  if constexpr (sizeof(T) == 16) {
    return {chosen(ok, x.real, other.real), chosen(ok, x.imag, other.imag)};
  } else {
    const T ones = static_cast<T>(-static_cast<T>(ok));
    return static_cast<T>((x & ones) | (other & static_cast<T>(~ones)));
  }
}

// Whether all n indices are: then a loop over them needs no look at each.
template <class I>
bool all_in_range(const I* index, int64_t n, int64_t size) {
  uint64_t outside = 0;  // its sign: some index is below 0, or not below size
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
  const int64_t at = ok ? as_signed(index) : 0;  // read something: there is no branch to guess wrong
  T value;
  std::memcpy(&value, from + at * jump, sizeof(T));
  return chosen(ok, value, fill);
}

// n elements of one run: input[j * step + index[j] * jump]
template <class T, class I>
void gather_run(const char* from, int64_t step, int64_t jump, int64_t size, const I* index, int64_t n, T fill, T* out) {
  if (step == 0 && jump == sizeof(T) && all_in_range(index, n, size)) {
    const T* row = reinterpret_cast<const T*>(from);
    for (int64_t j = 0; j < n; ++j) out[j] = row[as_signed(index[j])];
    return;
  }
  for (int64_t j = 0; j < n; ++j, from += step) out[j] = gather_one(from, jump, size, index[j], fill);
}

// The same for whole runs, `lead` bytes apart: of a few elements each, finding where one begins would take longer.
template <class T, class I>
void gather_short_runs(const char* from, int64_t lead, int64_t step, int64_t jump, int64_t size, const I* index,
                       int64_t runs, int64_t run, T fill, T* out) {
  for (; runs > 0; --runs, from += lead, index += run, out += run)
    for (int64_t j = 0; j < run; ++j) out[j] = gather_one(from + j * step, jump, size, index[j], fill);
}

constexpr int64_t kFew = 32;  // elements of a short run
constexpr int64_t kRowBytes = 16384;  // a row to read and the next one stay in the L1 cache

}  // namespace

void gather_elements(const Bits& input, int dim, const Bits& index, bool narrow, char* out, uint64_t fill) {
  const Shape shape = index.shape();
  const int64_t numel = shape.numel(), size = input.size[dim], jump = input.stride[dim] * input.width;
  if (numel == 0) return;
  if (size == 0) return fill_all(out, numel, input.width, fill);
  Walk walk;  // where an element lies in the input, but for its index
  for (int d = index.ndim - 1; d >= 0; --d) walk.push(index.size[d], d == dim ? 0 : input.stride[d] * input.width);
  const int64_t run = walk.ndim ? walk.size[0] : 1, step = walk.ndim ? walk.stride[0] : 0;
  // Rows that lie together, and are read nearly whole.
  const bool together = step == 0 && jump == input.width && run >= size / 2 && size * jump <= kRowBytes;
  const int64_t row = together ? size * jump : 0;
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
          const I* numbers = indices.fetch(at, n, at + kAhead, buffer);
          for (int64_t done = 0; done < n;) {
            const int64_t length = std::min(n - done, run - (at + done) % run);
            const char* from = input.data + walk.offset(at + done);
            if (const int64_t runs = (n - done) / run; walk.ndim == 2 && length == run && run < kFew && runs > 1) {
              gather_short(from, walk.stride[1], step, jump, size, numbers + done, runs, run, pattern<T>(fill),
                           to + at + done);
              done += runs * run;
              continue;
            }
            // The share of the next row that this piece stands for: a row is read in any order, which nobody foresees.
            if (row > 0 && at + done + run < numel) {
              const int64_t begin = (at + done) % run * size / run * jump, end = begin + length * size / run * jump;
              const char* next = input.data + walk.offset(at + done + run);
              for (int64_t byte = begin; byte < end; byte += 64) __builtin_prefetch(next + byte);
            }
            gather(from, step, jump, size, numbers + done, length, pattern<T>(fill), to + at + done);
            done += length;
          }
        }
      });
    });
  });
}

// ---- scatter_add

namespace {

constexpr int64_t kWide = 32768;  // sums in double that still lie in the L2 cache
constexpr int64_t kDummies = 16;  // where what is out of range is added: several, not to wait for one another

// Sums of one unit: destinations [first, first + size) along dim, `tile` columns, `block` rows of the outer dims.
template <class C>
struct Sums {
  C* to;
  int64_t first, size, tile;
  C dummy[kDummies];

  // g[j] at index[j], all of one row: T columns from `column` on, or with one column any number of indices.
  // (Not inlined: the loops around it leave gcc too few registers for its own, which then takes 1.3 times as long.)
  template <class I>
  __attribute__((noinline)) void add(C* row, const I* index, const C* g, int64_t n, int64_t column) {
    const int64_t columns = tile;
    for (int64_t j = 0; j < n; ++j) {
      const uint64_t wanted = static_cast<uint64_t>(as_signed(index[j]));
      const int64_t at = static_cast<int64_t>(wanted - static_cast<uint64_t>(first));
      const bool ok = static_cast<uint64_t>(at) < static_cast<uint64_t>(size);
      C* place = ok ? row + at * columns + (columns == 1 ? 0 : column + j) : dummy + j % kDummies;
      *place += g[j];
    }
  }

  // The same for whole lines of a few picks each, in one column.
  template <class I>
  __attribute__((noinline)) void add_lines(C* row, const I* index, const C* g, int64_t lines, int64_t picks) {
    for (; lines > 0; --lines, row += size, index += picks, g += picks)
      for (int64_t j = 0; j < picks; ++j) {
        const uint64_t at = static_cast<uint64_t>(as_signed(index[j])) - static_cast<uint64_t>(first);
        *(at < static_cast<uint64_t>(size) ? row + at : dummy + j) += g[j];
      }
  }
};

struct Scatter {
  Shape size, sizes;      // of dx, of index
  int dim;
  int64_t outer, picks, columns;  // of index: before dim, along dim, behind dim
  int64_t length, stride;         // of dx: along dim, behind dim
  bool exact;                     // index spans dx beside dim
  Walk before, behind;            // where a position of index's dims before and behind dim lies in those of dx
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
            put(from + t, to + behind.offset(column + t) * width, 1);
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
  const int64_t share = block * s.picks * tile + block * span * tile;
  const bool in_place = !store && s.exact && block == 1 && tile == s.columns && s.length * tile > kWide;
  parallel(blocks * tiles * ranges, share, [&](int64_t begin, int64_t end) {
    alignas(64) C values[kBuffer];
    alignas(64) I numbers[kBuffer];
    g.prime(values);
    indices.prime(numbers);
    std::vector<C> memory(in_place ? 0 : block * span * tile);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / ranges / tiles * block, column = unit / ranges % tiles * tile;
      const int64_t rows = std::min(block, s.outer - row);
      Sums<C> sums;
      sums.first = unit % ranges * span;
      sums.size = std::max<int64_t>(0, std::min(span, s.length - sums.first));
      sums.tile = std::min(tile, s.columns - column);
      sums.to = in_place ? reinterpret_cast<C*>(s.out) + (row * s.length + sums.first) * s.stride : memory.data();
      std::fill_n(sums.to, rows * sums.size * sums.tile, C{0});
      std::fill_n(sums.dummy, kDummies, C{0});
      const int64_t chunk = sums.tile == s.columns ? kChunk : sums.tile;
      // Positions of index in memory order: whole rows at once, or a tile of one pick after another.
      const int64_t first = row * s.picks * s.columns, last = (row + rows) * s.picks * s.columns;
      const int64_t stride = sums.tile == s.columns ? chunk : s.columns;
      for (int64_t at = first + column; at < last; at += stride) {
        const int64_t n = std::min(chunk, last - at);
        const I* i = indices.fetch(at, n, at + kAhead, numbers);
        const C* v = g.fetch(at, n, at + kAhead, values);
        for (int64_t done = 0; done < n;) {
          const int64_t position = at + done - first;
          const int64_t t = position % s.columns - column, r = position / (s.picks * s.columns);
          // to the end of the columns, or with one column of the row
          const int64_t left = sums.tile == 1 ? (s.columns == 1 ? s.picks - position % s.picks : 1) : sums.tile - t;
          const int64_t m = std::min(n - done, left), lines = (n - done) / s.picks;
          if (s.columns == 1 && m == s.picks && m <= kDummies && lines > 1) {
            sums.add_lines(sums.to + r * sums.size, i + done, v + done, lines, m);
            done += lines * m;
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

// One pick of each line, as a loss picks its class: nothing is added up, and nearly all of dx is 0.
template <class T, class I>
void place_with(const Scatter& s, const View& grad, const View& index) {
  const Order order = Order::contiguous(s.sizes);
  Source<T> g;
  Source<I> indices;
  g.bind(grad, s.sizes, order);
  indices.bind(index, s.sizes, order);
  const int64_t span = s.length * s.stride;  // of dx, for one row of columns
  const int64_t rows = std::max<int64_t>(1, std::min(kChunk / s.columns, kWide / span));
  parallel((s.outer + rows - 1) / rows, rows * span, [&](int64_t begin, int64_t end) {
    alignas(64) T values[kBuffer];
    alignas(64) I numbers[kBuffer];
    g.prime(values);
    indices.prime(numbers);
    for (int64_t row = begin * rows, stop = std::min(end * rows, s.outer); row < stop; row += rows) {
      const int64_t some = std::min(rows, stop - row), last = (row + some) * s.columns;
      T* to = reinterpret_cast<T*>(s.out) + row * span;
      std::memset(to, 0, some * span * sizeof(T));
      for (int64_t at = row * s.columns, column = 0; at < last; at += kChunk) {
        const int64_t n = std::min(kChunk, last - at);
        const I* i = indices.fetch(at, n, at + kAhead, numbers);
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

void scatter_add(const View& grad, int dim, const Bits& index, bool narrow, const Shape& size, const View& dx) {
  Scatter s{size, index.shape(), dim, index.count(0, dim), index.size[dim], index.count(dim + 1, index.ndim), 0, 1};
  s.length = size.size[dim];
  s.exact = true;
  int64_t rows = 1;
  for (int d = size.ndim - 1; d >= 0; --d) {
    if (d == dim) continue;
    int64_t& step = d > dim ? s.stride : rows;
    (d > dim ? s.behind : s.before).push(index.size[d], step);
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
  // Sums in double wherever they fit the cache; else in the compute dtype, several threads each with a range of dx.
  const int64_t most = kWide / s.length;
  const bool wide = most >= std::min<int64_t>(8, s.columns) && most > 0;
  // (A tile of fewer than all columns is read at once: no more than a buffer holds.)
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
