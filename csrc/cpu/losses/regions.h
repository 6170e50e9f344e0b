// What the forward and the backward of the region losses share: which elements of which region (n, c) a thread takes,
// and what the target and the mask say of them.
//
// A unit of work is a block of pixels of some classes of one image. Within it one class comes after the other, so that
// class indices are read once, for all classes of the unit, and never become a one-hot tensor.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "cpu/engine/elementwise.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

constexpr int64_t kPixels = 8192;     // of a unit, at least: their class indices stay in the L2 cache
constexpr int64_t kUnit = 65536;      // elements of a unit, about
constexpr int64_t kMaxBlocks = 1024;  // of an image

// ---- loops over pixels

// Class indices as int32 (out of its range: `lost_as`); whether one is beyond the classes. In loops of their own,
// because gcc vectorises no loop over both widths and a byte: three times slower.
inline bool index_loop(const int64_t* index, int64_t n, int64_t classes, int32_t lost_as, int32_t* to) {
  int64_t lost = 0;
  _Pragma("omp simd reduction(| : lost)")
  for (int64_t i = 0; i < n; ++i) {
    to[i] = static_cast<int32_t>(index[i]);
    lost |= index[i] ^ static_cast<int64_t>(to[i]);
  }
  for (int64_t i = 0; lost != 0 && i < n; ++i)
    if (index[i] != static_cast<int64_t>(to[i])) to[i] = lost_as;
  uint32_t most = 0;
  _Pragma("omp simd reduction(max : most)")
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = static_cast<uint32_t>(to[i]);
    most = x > most ? x : most;
  }
  return most >= static_cast<uint32_t>(classes);
}

// Which pixels have another index than `ignored`.
inline void not_ignored_loop(const int32_t* index, int64_t n, int32_t ignored, uint8_t* keep) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) keep[i] = index[i] != ignored;
}

inline bool any_kept_beyond(const int32_t* index, const uint8_t* keep, int64_t n, int64_t classes) {
  for (int64_t i = 0; i < n; ++i)
    if (static_cast<uint32_t>(index[i]) >= static_cast<uint32_t>(classes) && (!keep || keep[i])) return true;
  return false;
}

// t = 1 where the pixel is of class c, else 0
template <class C>
void one_hot_loop(const int32_t* index, int64_t n, int32_t c, C* t) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) t[i] = index[i] == c ? C(1) : C(0);
}

// Bytes of 0 and 1: kept by the mask, and by the indices where they say so too.
template <bool kBoth>
void keep_loop(const uint8_t* mask, const uint8_t* other, int64_t n, uint8_t* keep) {
  SAFEOPS_SIMD
  for (int64_t i = 0; i < n; ++i) keep[i] = kBoth ? static_cast<uint8_t>((mask[i] != 0) & other[i]) : mask[i] != 0;
}

// ---- the walk

// n elements of one region: prediction and target (null where nobody wants them), class indices (null: there are none),
// and which are kept (null: all).
template <class C>
struct Pixels {
  int64_t n, at;  // `at`: their place in the walk
  const C *p, *t;
  const int32_t* index;
  const uint8_t* keep;
};

template <class C>
struct Regions {
  using OptionalTensor = std::optional<Tensor>;

  Shape shape;  // (N, C, d1, ...)
  Order order;  // pixels innermost, as they lie in the input's memory; then classes, then images
  int64_t images, classes, pixels;
  int64_t block, blocks, group, groups;  // pixels of a unit, and how many such; the same of classes
  int64_t step;  // pixels of a chunk: few where nothing goes through a buffer, as in Elementwise
  bool indexed, masked = false, ignores = false;
  int32_t ignored = 0;
  Source<C> input, target;
  Source<uint64_t> index;
  Source<uint8_t> mask;
  const char* exists = nullptr;  // bools, one a class
  int64_t exists_stride = 0;

  Regions(const View& x, const View& y, const OptionalTensor& mask_, const OptionalTensor& exists_,
          const std::optional<int64_t>& ignore_index)
      : shape(x.shape()) {
    STD_TORCH_CHECK(shape.ndim >= 2, "safeops: input must be (N, C, d1, ...)");
    bool spatial[kMaxDims];
    for (int d = 0; d < shape.ndim; ++d) spatial[d] = d >= 2;
    order = Order::by_strides(shape, x.strides, spatial, true);
    images = shape.size[0], classes = shape.size[1], pixels = order.numel();
    order.push(1, classes);
    order.push(0, images);
    indexed = y.dtype == DType::kLong;
    input.bind(x, shape, order);
    if (indexed) {
      int64_t sizes[kMaxDims], strides[kMaxDims];
      index.bind(with_classes(y, sizes, strides), shape, order);
      STD_TORCH_CHECK(classes <= INT32_MAX, "safeops: too many classes");
    } else {
      STD_TORCH_CHECK(shape.is(y.ndim, y.sizes), "safeops: target must have the shape of input");
      target.bind(y, shape, order);
    }
    if (mask_) mask.bind(View(*mask_), shape, order), masked = true;
    if (ignore_index) {
      STD_TORCH_CHECK(*ignore_index == static_cast<int32_t>(*ignore_index), "safeops: ignore_index must be an int32");
      ignores = indexed, ignored = static_cast<int32_t>(*ignore_index);
    }
    if (exists_) {
      const View view(*exists_);
      STD_TORCH_CHECK(view.dtype == DType::kBool && view.ndim == 1 && view.sizes[0] == classes,
                      "safeops: exists must be bools, one a class");
      exists = view.data, exists_stride = view.strides[0];
    }
    block = std::max(kPixels, (pixels + kMaxBlocks - 1) / kMaxBlocks);
    block = std::min((block + kChunk - 1) / kChunk * kChunk, std::max<int64_t>(pixels, 1));
    blocks = (pixels + block - 1) / block;
    group = std::clamp<int64_t>(kUnit / block, 1, std::max<int64_t>(classes, 1));
    groups = (classes + group - 1) / group;
    step = input.direct() && !indexed && target.direct() ? 2 * kFine : kChunk / 2;
  }

  bool there(int64_t c) const { return !exists || exists[c * exists_stride]; }

  // For each thread work = start(); then for each of its units and each class of it work.begin(unit, n, c),
  // work.chunk(pixels) chunk by chunk, where the class exists or work wants them all, and work.end(unit, number of the
  // class in its unit). work.by_index(): it reads class indices alone. False where a class index is out of range.
  template <class Start>
  bool run(const Start& start) const {
    using Work = decltype(start());
    std::atomic<bool> good{true};
    parallel(images * blocks * groups, block * group, [&](int64_t begin, int64_t end) {
      auto buffers = std::make_unique<Buffers>(block, indexed);
      Work work = start();
      indexed ? index.prime(buffers->index) : target.prime(buffers->t);
      input.prime(buffers->p);
      if (masked) mask.prime(buffers->mask);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t g = unit % groups, b = unit / groups % blocks, n = unit / groups / blocks;
        const int64_t first = b * block, last = std::min(first + block, pixels);
        const bool beyond = indexed && read_indices(n, first, last, *buffers);
        for (int64_t c = g * group; c < std::min((g + 1) * group, classes); ++c) {
          work.begin(unit, n, c);
          for (int64_t at = first; at < last && (there(c) || Work::kWantsAll); at += step) {
            const Pixels<C> x = fetch(n, c, first, at, std::min(step, last - at), work.by_index(), *buffers);
            if (beyond && any_kept_beyond(x.index, x.keep, x.n, classes)) good = false;
            work.chunk(x);
          }
          work.end(unit, c - g * group);
        }
      }
    });
    return good;
  }

 private:
  struct Buffers {
    alignas(64) C p[kBuffer], t[kBuffer];
    alignas(64) uint8_t mask[kBuffer], keep[kBuffer];
    alignas(64) uint64_t index[kBuffer];
    std::unique_ptr<int32_t[]> classes;  // of the block's pixels
    std::unique_ptr<uint8_t[]> kept;

    Buffers(int64_t block, bool indexed) {
      if (indexed) classes.reset(new int32_t[block]), kept.reset(new uint8_t[block]);
    }
  };

  // Indices (N, d1, ...) as (N, 1, d1, ...).
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

  // Those of pixels [first, last) of image n; whether one is beyond the classes, and so perhaps an error.
  bool read_indices(int64_t n, int64_t first, int64_t last, Buffers& buffers) const {
    const int32_t lost_as = ignored == -1 ? -2 : -1;  // no class, and not the index that is ignored
    bool beyond = false;
    for (int64_t at = first; at < last; at += kChunk) {
      const int64_t m = std::min(kChunk, last - at), start = n * classes * pixels + at;
      int32_t* to = buffers.classes.get() + at - first;
      const uint64_t* from = index.fetch(start, m, start + kAhead, buffers.index);
      beyond |= read_(reinterpret_cast<const int64_t*>(from), m, classes, lost_as, to);
      if (ignores) not_ignored_(to, m, ignored, buffers.kept.get() + at - first);
    }
    return beyond;
  }

  Pixels<C> fetch(int64_t n, int64_t c, int64_t first, int64_t at, int64_t m, bool by_index, Buffers& buffers) const {
    const int64_t start = (n * classes + c) * pixels + at;
    Pixels<C> x{m, start, nullptr, nullptr, indexed ? buffers.classes.get() + at - first : nullptr, nullptr};
    if (!by_index) {
      x.p = input.fetch(start, m, start + kAhead, buffers.p);
      x.t = indexed ? buffers.t : target.fetch(start, m, start + kAhead, buffers.t);
      if (indexed) one_hot_(x.index, m, static_cast<int32_t>(c), buffers.t);
    }
    const uint8_t* kept = ignores ? buffers.kept.get() + at - first : nullptr;
    if (masked) {
      const uint8_t* given = mask.fetch(start, m, start + kAhead, buffers.mask);
      (kept ? both_ : one_)(given, kept, m, buffers.keep);
      x.keep = buffers.keep;
    } else {
      x.keep = kept;
    }
    return x;
  }

  decltype(pick<&index_loop>()) read_ = pick<&index_loop>();
  decltype(pick<&not_ignored_loop>()) not_ignored_ = pick<&not_ignored_loop>();
  decltype(pick<&one_hot_loop<C>>()) one_hot_ = pick<&one_hot_loop<C>>();
  decltype(pick<&keep_loop<true>>()) both_ = pick<&keep_loop<true>>();
  decltype(pick<&keep_loop<false>>()) one_ = pick<&keep_loop<false>>();
};

}  // namespace safeops::cpu
