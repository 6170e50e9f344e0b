// The walk over pixels, targets and masks, which forward and backward of the region losses share.
//
// A task is a block of pixels of a few classes of one image, or of all classes if the classes are innermost in memory.
// A task is walked in tiles. A tile's class indices are read once for all classes, and are never expanded to one-hot.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "cpu/losses/region_loops.h"
#include "cpu/losses/tiles.h"

namespace safeops::cpu {

constexpr int64_t kTaskElements = 65536;  // elements of a task, approximately
constexpr int64_t kMaxBlocks = 1024;      // blocks of an image, at most

// ---- loops over class indices

// Converts indices to int32; indices that do not fit become `replacement`. The loop is separate from keep_loop: gcc
// does not vectorise a loop over both 64-bit indices and mask bytes, which would take three times as long.
inline void index_loop(const int64_t* index, int64_t n, int32_t replacement, int32_t* to) {
  int64_t overflow = 0;
  _Pragma("omp simd reduction(| : overflow)")
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<int32_t>(index[i]);
    overflow |= index[i] ^ static_cast<int64_t>(to[i]);
  }
  for (int64_t i = 0; overflow != 0 && i < n; ++i)
    if (index[i] != static_cast<int64_t>(to[i])) to[i] = replacement;
}

// Converts the indices of pixels that are all kept. Returns the largest index as an unsigned number, in which a
// negative index is large: if the result is a class, all indices are.
template <class I>
uint64_t plain_index_loop(const int64_t* index, int64_t n, I* to) {
  uint64_t most = 0;
  _Pragma("omp simd reduction(max : most)")
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t value = static_cast<uint64_t>(index[i]);
    most = value > most ? value : most;
    to[i] = static_cast<I>(value);
  }
  return most;
}

struct IndexRules {
  int32_t classes = 0, ignored = 0;
  bool ignores = false;
};

// Writes the class of each kept pixel, and -1 for other pixels. Returns the number of kept pixels, or -1 if the class
// of a kept pixel is out of range.
template <class I, bool kMask>
int64_t keep_loop(const int32_t* index, const uint8_t* mask, int64_t n, IndexRules rules, I* to) {
  int32_t kept = 0, bad = 0;
  const uint32_t classes = static_cast<uint32_t>(rules.classes);
  _Pragma("omp simd reduction(+ : kept) reduction(| : bad)")
  for (int64_t i = 0; i < n; ++i) {
    bool keep = !rules.ignores | (index[i] != rules.ignored);
    if constexpr (kMask) keep = keep & (mask[i] != 0);
    kept += keep;
    bad |= keep & (static_cast<uint32_t>(index[i]) >= classes);
    to[i] = static_cast<I>(select(keep, index[i], -1));
  }
  return bad ? -1 : kept;
}

// ---- the walk

// n elements of one region. Prediction and target (null: not wanted); or class indices, -1 where a pixel is not kept.
template <class C>
struct Pixels {
  int64_t n;
  const C *p = nullptr, *t = nullptr;
  const IndexOf<C>* index = nullptr;
  const uint8_t* keep = nullptr;  // mask, if the target is not indices; null: all are kept
  int64_t kept = 0;               // with indices: kept pixels that no earlier Pixels of this tile and class counted
};

template <class C>
struct Regions {
  using OptionalTensor = std::optional<Tensor>;

  Shape shape;  // (N, C, d1, ...)
  Grid grid;
  int64_t images;
  int64_t block, blocks, group, groups;  // block, group: pixels and classes of a task; blocks, groups: how many
  bool indexed, masked = false, by_pixel = false;  // by_pixel: the mask is the same for all classes
  IndexRules rules;
  TileSource<C> input, target;
  Source<uint64_t> index;  // walked over pixels without classes; so is the mask if by_pixel
  Source<uint8_t> mask;
  const char* exists = nullptr;  // bools, one per class: the class has sums and gradients
  int64_t exists_stride = 0;

  Regions(const View& x, const View& y, const OptionalTensor& mask_, const OptionalTensor& exists_,
          const std::optional<int64_t>& ignore_index)
      : shape(x.shape()), grid(shape, x), images(shape.size[0]), indexed(y.dtype == DType::kLong) {
    STD_TORCH_CHECK(grid.classes <= INT32_MAX, "safeops: too many classes");
    input.bind(x, shape, grid);
    if (indexed) {
      int64_t sizes[kMaxDims], strides[kMaxDims];
      index.bind(with_classes(y, sizes, strides), shape, grid.by_pixel);
    } else {
      STD_TORCH_CHECK(shape.is(y.ndim, y.sizes), "safeops: target must have the shape of input");
      target.bind(y, shape, grid);
    }
    if (mask_) {
      const View view(*mask_);
      const int d = view.ndim - (shape.ndim - 1);  // the mask's dim of classes; < 0: it has none
      masked = true, by_pixel = indexed && (d < 0 || view.sizes[d] == 1 || view.strides[d] == 0);
      mask.bind(view, shape, by_pixel ? grid.by_pixel : grid.by_row);
    }
    rules.classes = static_cast<int32_t>(grid.classes);
    if (ignore_index) {
      STD_TORCH_CHECK(*ignore_index == static_cast<int32_t>(*ignore_index), "safeops: ignore_index must be an int32");
      rules.ignores = true, rules.ignored = static_cast<int32_t>(*ignore_index);
    }
    if (exists_) {
      const View view(*exists_);
      STD_TORCH_CHECK(view.dtype == DType::kBool && view.ndim == 1 && view.sizes[0] == grid.classes,
                      "safeops: exists must be bools, one a class");
      exists = view.data, exists_stride = view.strides[0];
    }
    const int64_t most = std::max<int64_t>(grid.classes, 1), least = (grid.pixels + kMaxBlocks - 1) / kMaxBlocks;
    block = std::max({kTile, least, grid.channels_last ? kTaskElements / most : 0});
    block = std::min((block + grid.tile - 1) / grid.tile * grid.tile, std::max<int64_t>(grid.pixels, 1));
    blocks = (grid.pixels + block - 1) / block;
    group = grid.channels_last ? most : std::clamp<int64_t>(kTaskElements / block, 1, most);
    groups = (grid.classes + group - 1) / group;
  }

  bool has_class(int64_t c) const { return !exists || exists[c * exists_stride]; }

  // Each thread makes work = start(). For each tile of a task it calls work.chunk(task, tile, c, pixels) for every
  // class that exists (for all classes if kWantsAll), then work.finish(tile). work.reads_input and reads_target are
  // true if chunk() needs these values. Returns false if a class index is out of range.
  template <class Start>
  bool run(const Start& start) const {
    using Work = decltype(start());
    std::atomic<bool> good{true};
    parallel(images * blocks * groups, block * group, [&](int64_t begin, int64_t end) {
      const auto buffers = std::make_unique<Buffers>(grid, indexed);
      Work work = start();
      // Memory that is read in place needs no short pieces: the hardware's prefetcher follows runs as long as a tile.
      const bool in_place = work.in_place() && (!masked || by_pixel);
      const int64_t piece = in_place && !grid.channels_last ? grid.tile : grid.piece;
      input.prime(buffers->p), target.prime(buffers->t);
      if (masked) mask.prime(buffers->mask);
      if (indexed) index.prime(buffers->index);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t g = task % groups, b = task / groups % blocks, n = task / groups / blocks;
        const int64_t last = std::min((b + 1) * block, grid.pixels);
        for (int64_t at = b * block; at < last; at += grid.tile) {
          const Tile tile{n, at, std::min(grid.tile, last - at)};
          const int64_t kept = indexed ? read_indices(tile, *buffers) : 0;
          if (kept < 0) good = false;
          if (work.reads_input) input.load(tile, buffers->p);
          if (work.reads_target) target.load(tile, buffers->t);
          for (int64_t c = g * group; c < std::min((g + 1) * group, grid.classes); ++c) {
            if (!has_class(c) && !Work::kWantsAll) continue;
            for (int64_t i = 0; i < tile.m; i += piece) {
              const Tile part{n, at + i, std::min(piece, tile.m - i)};
              Pixels<C> x{part.m};
              if (work.reads_input) x.p = input.row(part, c, buffers->p);
              if (work.reads_target) x.t = target.row(part, c, buffers->t);
              if (indexed) x.index = buffers->kept.get() + i, x.kept = i == 0 ? kept : 0;
              if (masked && !by_pixel && !read_mask(part, c, i, *buffers, x)) good = false;
              work.chunk(task, part, c, x);
            }
          }
          work.finish(tile);
        }
      }
    });
    return good;
  }

 private:
  struct Buffers {
    TileBuffer<C> p, t;
    alignas(64) uint8_t mask[kBuffer];
    alignas(64) uint64_t index[kBuffer];
    std::unique_ptr<int32_t[]> classes;  // each pixel's class index; `kept`: likewise, but -1 if not kept
    std::unique_ptr<IndexOf<C>[]> kept;

    Buffers(const Grid& grid, bool indexed)
        : p(grid), t(grid), classes(indexed ? new int32_t[grid.tile] : nullptr),
          kept(indexed ? new IndexOf<C>[grid.tile] : nullptr) {}
  };

  // Returns indices (N, d1, ...) as a view (N, 1, d1, ...).
  View with_classes(const View& y, int64_t* sizes, int64_t* strides) const {
    STD_TORCH_CHECK(y.ndim == shape.ndim - 1, "safeops: class indices must be (N, d1, ...)");
    View view = y;
    view.ndim = shape.ndim;
    for (int d = 0; d < shape.ndim; ++d) {
      sizes[d] = d == 1 ? 1 : y.sizes[d > 1 ? d - 1 : 0];
      strides[d] = d == 1 ? 0 : y.strides[d > 1 ? d - 1 : 0];
      STD_TORCH_CHECK(d == 1 || sizes[d] == shape.size[d], "safeops: class indices must be (N, d1, ...)");
    }
    view.sizes = sizes, view.strides = strides;
    return view;
  }

  // Reads a tile's indices. Returns the number of kept pixels, or -1 if an index is out of range. A mask that differs
  // between classes is applied later, by read_mask.
  int64_t read_indices(const Tile& tile, Buffers& buffers) const {
    int64_t sum = 0;
    bool good = true;
    const bool in_place = index.kind == Kind::kDirect && (!masked || !by_pixel || mask.kind == Kind::kDirect);
    const int64_t piece = in_place ? tile.m : kFine;
    for (int64_t i = 0; i < tile.m; i += piece) {
      const int64_t m = std::min(piece, tile.m - i), start = tile.n * grid.pixels + tile.at + i;
      const uint64_t* from = index.fetch(start, m, start + kAhead, buffers.index);
      const int64_t* indices = reinterpret_cast<const int64_t*>(from);
      const uint64_t class_count = static_cast<uint64_t>(grid.classes);
      if (!masked && !rules.ignores && plain_(indices, m, buffers.kept.get() + i) < class_count) {
        sum += m;
        continue;
      }
      int32_t* to = buffers.classes.get() + i;
      // An index beyond int32 becomes a number that is neither a class nor the ignored index.
      index_(indices, m, rules.ignored == -1 ? -2 : -1, to);
      if (masked && !by_pixel) continue;
      const uint8_t* keep = masked ? mask.fetch(start, m, start + kAhead, buffers.mask) : nullptr;
      const int64_t kept = (keep ? keep_masked_ : keep_unmasked_)(to, keep, m, rules, buffers.kept.get() + i);
      good &= kept >= 0, sum += kept;
    }
    return good ? sum : -1;
  }

  bool read_mask(const Tile& part, int64_t c, int64_t i, Buffers& buffers, Pixels<C>& x) const {
    const int64_t start = grid.start(part, c);
    x.keep = mask.fetch(start, part.m, start + kAhead, buffers.mask);
    if (indexed)
      x.kept = keep_masked_(buffers.classes.get() + i, x.keep, part.m, rules, buffers.kept.get() + i);
    return x.kept >= 0;
  }

  decltype(pick<&plain_index_loop<IndexOf<C>>>()) plain_ = pick<&plain_index_loop<IndexOf<C>>>();
  decltype(pick<&index_loop>()) index_ = pick<&index_loop>();
  decltype(pick<&keep_loop<IndexOf<C>, true>>()) keep_masked_ = pick<&keep_loop<IndexOf<C>, true>>(),
                                                 keep_unmasked_ = pick<&keep_loop<IndexOf<C>, false>>();
};

}  // namespace safeops::cpu
