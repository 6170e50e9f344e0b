// SSIM of volumes: level_kernel computes the level of each plane (n, c), the mean that is subtracted from its pixels;
// Voxels reads the pixels of a slice; Launches has the launches that forward and backward share.
#pragma once

#include <algorithm>

#include "sliding_window.cuh"
#include "parts.cuh"
#include "ssim_volumes.h"

namespace safeops::cuda {
namespace {

constexpr double kShrink = 0x1p-40;  // a factor of each pixel, so that no sum of finite pixels overflows
template <class C>
constexpr int kVolumeBlocks = sizeof(C) == 8 ? 1 : 2;  // blocks per SM

// ---- levels: for each plane, kShrink times the sums of the finite kept pixels of x and of y, and their counts

struct Level {
  double x, y, count_x, count_y;
  __device__ void merge(const Level& other) {
    x += other.x, y += other.y, count_x += other.count_x, count_y += other.count_y;
  }
};

template <class C>
__global__ void __launch_bounds__(kTileThreads) level_kernel(const __grid_constant__ Images<C> images,
                                                             const __grid_constant__ Groups groups,
                                                             char* const __grid_constant__ levels) {
  const uint32_t blocks = groups.blocks, block = blockIdx.x % blocks;
  const uint32_t plane = blockIdx.x / blocks, n = plane / images.channels;
  const uint32_t c = plane % images.channels, rows = uint32_t(images.depth) * uint32_t(images.height);
  constexpr uint32_t kWarps = kTileThreads / 32;
  Level level{0, 0, 0, 0};
  for (uint32_t r = block * kWarps + threadIdx.x / 32; r < rows; r += blocks * kWarps) {
    const uint32_t z = r / uint32_t(images.height), y = r % uint32_t(images.height);
    const auto at = [&](const Field& field) {
      return field.base + int64_t(n) * field.n + int64_t(c) * field.c + int64_t(z) * field.slice +
             int64_t(y) * field.row;
    };
    const auto add = [&](const Field& field, int x, double& sum, double& count) {
      using D = Dynamic<C>;
      const C value = D::decode(load_raw<typename D::Word>(at(field) + x * field.column, field.type), field.type);
      if (value - value == 0) sum += double(value) * kShrink, count += 1;
    };
    for (int x = int(threadIdx.x % 32); x < images.width; x += 32) {
      if (images.mask.base && !load<uint8_t>(at(images.mask) + x * images.mask.column)) continue;
      add(images.x, x, level.x, level.count_x), add(images.y, x, level.y, level.count_y);
    }
  }
  level = block_reduce<kTileThreads>(level, reinterpret_cast<Level*>(shared_memory()), merged<Level>);
  const auto finish_plane = [&](int64_t plane, const Level& sum) {
    store_part(levels, plane, sum);
    return sum;
  };
  merge_groups(groups, level, finish_plane, [](const Level&) {});
}

struct Planes {
  const char* levels;
  int64_t count;
};

template <class C>
__device__ Levels<C> level_of(const Planes& planes, uint32_t plane) {
  const auto level_entry = [&](int i) {
    return load<double>(planes.levels + (4 * int64_t(plane) + i) * sizeof(double));
  };
  const auto mean = [](double sum, double count) {
    const C m = count > 0 ? C(sum / (kShrink * count)) : C(0);
    return m - m == 0 ? m : C(0);
  };
  return {mean(level_entry(0), level_entry(2)), mean(level_entry(1), level_entry(3)), 0, 0};
}

// ---- windows

template <class C, bool kIncomplete, class M>
struct Voxels {
  using Word = typename Dynamic<C>::Word;
  struct Raw {
    Word x[M::kReads], y[M::kReads];
    unsigned keep;
  };
  const Images<C>& images;
  const M& tile;
  const int n, c;
  const Levels<C> level;
  C *s, *d;
  uint8_t* kept;

  __device__ Voxels(const Images<C>& images_, const M& at, int n_, int c_, const Levels<C>& level_)
      : images(images_), tile(at), n(n_), c(c_), level(level_), s(at.inputs()), d(s + at.rows * at.pitch),
        kept(reinterpret_cast<uint8_t*>(d + at.rows * at.pitch)) {}
  static constexpr int kBytes = 2 * int(sizeof(C)) + kIncomplete;

  __device__ void fetch(int z, Raw& raw) const {
    const auto read = [&](const Field& field, auto element, auto& to) {
      const char* p = field.base + n * field.n + c * field.c + z * field.slice;
      const auto read_one = [&](int u, int, int y, int x) {
        to[u] = load<decltype(element)>(p + y * field.row + x * field.column);
      };
      tile.each_input(read_one, [&](int u, int) { to[u] = 0; });
    };
    by_type<C>(images.x.type, [&](auto codec) { read(images.x, typename decltype(codec)::Raw(), raw.x); });
    by_type<C>(images.y.type, [&](auto codec) { read(images.y, typename decltype(codec)::Raw(), raw.y); });
    raw.keep = ~0u;
    if (!kIncomplete || images.mask.base == nullptr) return;
    uint8_t flag[M::kReads] = {};
    read(images.mask, uint8_t(), flag);
#pragma unroll
    for (int u = 0; u < M::kReads; ++u)
      if (!flag[u]) raw.keep &= ~(1u << u);
  }

  __device__ void put(const Raw& raw) const {
    const auto decode = [&](Type type, const Word(&word)[M::kReads], C level_value, C(&value)[M::kReads]) {
      by_type<C>(type, [&](auto codec) {
        using Codec = decltype(codec);
#pragma unroll
        for (int u = 0; u < M::kReads; ++u)
          value[u] = (C(Codec::decode(typename Codec::Raw(word[u]))) - level_value) * images.scale;
      });
    };
    C x[M::kReads], y[M::kReads];
    decode(images.x.type, raw.x, level.x, x), decode(images.y.type, raw.y, level.y, y);
    const auto write = [&](int u, int at, bool keep) {
      s[at] = keep ? x[u] + y[u] : C(0), d[at] = keep ? x[u] - y[u] : C(0);
      if constexpr (kIncomplete) kept[at] = keep;
    };
    tile.each_input([&](int u, int at, int, int) { write(u, at, !kIncomplete || (raw.keep >> u & 1)); },
                    [&](int u, int at) { write(u, at, false); });
  }

  __device__ void get(int at, C (&value)[4 + kIncomplete]) const {
    value[0] = s[at], value[1] = d[at], value[2] = value[0] * value[0], value[3] = value[1] * value[1];
    if constexpr (kIncomplete) value[4] = kept[at] ? C(1) : C(0);
  }
};

// Calls body(slice, counted, similarity, inverse) for each window of this thread. counted: the window's central pixel
// is kept. inverse: 1 / the sum of the window's weights.
template <class C, int kSize, bool kIncomplete, class Body>
__device__ void each_window(const WindowSlider<C, kSize, 4 + kIncomplete>& tile, const Images<C>& images,
                            const Planes& planes, int n, int c, const Body& body) {
  const Levels<C> level = level_of<C>(planes, tile.plane);
  // The levels are divided by data_range before they are added, since the sum of two large levels may overflow.
  const C level_x = level.x * images.scale, level_y = level.y * images.scale;
  const SimilarityTerms<C> terms{level_x + level_y, level_x - level_y, images.c1, images.c2};
  const Voxels<C, kIncomplete, WindowSlider<C, kSize, 4 + kIncomplete>> voxels(images, tile, n, c, level);
  tile.run(voxels, [&](int z, const C(&sum)[4 + kIncomplete]) {
    bool counted = true;
    if (kIncomplete && images.mask.base) {
      const Field& mask = images.mask;
      const int centre = tile.size / 2 - images.before;
      const char* p = mask.base + n * mask.n + c * mask.c + (z + centre) * mask.slice;
      counted = load<uint8_t>(p + (tile.row + centre) * mask.row + (tile.column + centre) * mask.column) != 0;
    }
    C inverse = C(1);
    if constexpr (kIncomplete) inverse = 1 / (counted ? sum[4] : C(1));
    const auto mean = [&](int q) { return sum[q] * inverse; };
    body(z, counted, Similarity<C>::of(terms, mean(0), mean(1), mean(2), mean(3)), inverse);
  });
}

// ---- host

// Arguments and launches that forward and backward share. The constructor launches level_kernel.
template <class C>
struct Launches {
  Images<C> images;
  int64_t planes;
  SlidingWindow<C> windows, pixels;  // windows: sums pixels to windows; pixels: sums windows to pixels (backward)
  cudaStream_t stream;
  Tensor levels;

  Launches(const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask, const Options& o,
           const ImageInfo& info)
      : images(make_images<C>(input, target, mask, o, info, info.shape.size + 3, 1)),
        planes(info.shape.size[0] * info.shape.size[1]), stream(current_stream(input)),
        levels(vector(4 * planes, input)) {
    const int in[] = {images.depth, images.height, images.width};
    const int out[] = {images.window_slices, images.window_rows, images.window_columns};
    windows = make_sliding_window<C>(images.size, images.before, in, out, images.weights);
    pixels = make_sliding_window<C>(images.size, images.size - 1 - images.before, out, in, images.weights);
    constexpr int64_t kLimit = int64_t(1) << 31;
    const int64_t rows = int64_t(images.depth) * images.height;
    const bool few = rows < kLimit && planes * std::max(windows.blocks(), pixels.blocks()) < kLimit;
    STD_TORCH_CHECK(few, "safeops: volumes of more than 2^31 tiles or rows");
    const int64_t blocks = std::clamp<int64_t>(rows / 32, 1, 1024);  // blocks of level_kernel for each plane
    STD_TORCH_CHECK(planes * blocks < kLimit, "safeops: more than 2^31 planes");
    if (planes == 0) return;
    const MergeBuffers<Level> buffers(planes, blocks, input, stream);
    start_blocks(level_kernel<C>, unsigned(planes * blocks), kTileThreads, kTileThreads / 32 * int(sizeof(Level)),
                 stream, images, buffers.groups, data(levels));
  }

  static Tensor vector(int64_t n, const Tensor& like) { return safeops::empty(Shape(1, &n), DType::kDouble, like); }
  static char* data(const Tensor& t) { return static_cast<char*>(t.data_ptr()); }
  Planes plane_levels() const { return {data(levels), planes}; }

  template <class M, class Source, class Kernel, class... Arguments>
  void slide(const Kernel& kernel, const SlidingWindow<C>& window, const Arguments&... arguments) const {
    if (const unsigned blocks = unsigned(planes * window.blocks()))
      start_blocks(kernel, blocks, kTileThreads, M::bytes(window.size, Source::kBytes), stream, images, window,
                   plane_levels(), arguments...);
  }
};

// Calls run(C(), kSize, kIncomplete) for the kernel that is compiled for this call: double; float with windows of size
// 11; or float with any size. The last two arguments are std::integral_constant.
template <class Run>
void by_volume_kind(const ImageInfo& info, int64_t size, const Run& run) {
  const auto with = [&](auto compute, auto static_size) {
    info.incomplete ? run(compute, static_size, std::true_type()) : run(compute, static_size, std::false_type());
  };
  if (info.wide) with(double(), std::integral_constant<int, 0>());
  else if (size == 11) with(float(), std::integral_constant<int, 11>());
  else with(float(), std::integral_constant<int, 0>());
}

}  // namespace
}  // namespace safeops::cuda
