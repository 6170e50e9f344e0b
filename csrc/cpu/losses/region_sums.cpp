// Sums for the region losses (dice, Tversky), for each image n and class c over the kept pixels:
//
//     sums[0] = sum p t    sums[1] = sum p, or p^2    sums[2] = sum t, or t^2    sums[3] = number of kept pixels
//
// p (N, C, d1, ...) is the prediction. The target has p's shape, or is class indices (N, d1, ...), for which t is 1 at
// pixels of class c, else 0.
// I/O: forward reads p, t, mask once; backward reads them and writes dp, dt.
#include "cpu/engine/vectors.h"
#include "cpu/losses/regions.h"

namespace safeops::cpu {

namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr int kSums = 4;

// ---- forward

template <class C>
auto pick_sums(bool squared) {
  if constexpr (sizeof(C) == 2)
    if (!squared) return pick_width<&pair_sums_loop<C, 64>, &pair_sums_loop<C, 32>, &pair_sums_loop<C, 16>>();
  return squared ? pick<&sums_loop<C, true>>() : pick<&sums_loop<C, false>>();
}

template <class C, bool kSquared>
auto pick_index_sums() {
  if constexpr (sizeof(C) == 2)
    return pick_width<&index_pair_sums_loop<C, 64>, &index_pair_sums_loop<C, 32>, &index_pair_sums_loop<C, 16>>();
#ifdef SAFEOPS_X86
  else if (isa() == Isa::kAvx512)
    return &index_sums_avx512<C, kSquared>;
#endif
  else
    return pick<&index_sums_loop<C, kSquared>>();
}

template <class C>
struct Sum {
  static constexpr bool kWantsAll = false;
  const Regions<C>& r;
  bool squared;
  double* partials;  // (tasks, classes of a task, kSums)
  bool reads_input = true, reads_target = !r.indexed;
  decltype(pick_sums<C>(true)) add = pick_sums<C>(squared);
  decltype(pick_index_sums<C, true>()) add_indexed = squared ? pick_index_sums<C, true>() : pick_index_sums<C, false>();
  decltype(pick<&kept_loop<C>>()) select_kept = pick<&kept_loop<C>>();
  decltype(pick<&normalize_mask_loop>()) normalize = pick<&normalize_mask_loop>();
  decltype(pick<&rows_loop<uint8_t, int64_t>>()) count = pick<&rows_loop<uint8_t, int64_t>>();
  alignas(64) C input[kBuffer] = {}, target[kBuffer] = {};
  alignas(64) uint8_t keep[kBuffer] = {};

  void chunk(int64_t task, const Tile&, int64_t c, const Pixels<C>& x) {
    double* sums = partials + (task * r.group + c % r.group) * kSums;
    int64_t kept = x.index ? x.kept : x.n;
    if (x.index) {
      add_indexed(x.p, x.index, static_cast<IndexOf<C>>(c), x.n, sums);
    } else if (x.keep) {
      normalize(x.keep, x.n, keep);
      select_kept(x.p, keep, x.n, input);
      select_kept(x.t, keep, x.n, target);
      count(keep, 1, x.n, &kept);
      add(input, target, x.n, sums);
    } else {
      add(x.p, x.t, x.n, sums);
    }
    sums[3] += static_cast<double>(kept);
  }

  bool in_place() const { return r.input.in_place() && (r.indexed || r.target.in_place()); }

  void finish(const Tile&) const {}
};

// Computes out (kSums, N, C). The tasks' partial sums are added in the order of the pixels, whatever the threads did,
// so the bits are repeatable. Returns false if a class index is out of range.
template <class C>
bool forward(const Regions<C>& r, bool squared, double* out) {
  const std::unique_ptr<double[]> partials(new double[r.images * r.blocks * r.groups * r.group * kSums]());
  const bool good = r.run([&] { return Sum<C>{r, squared, partials.get()}; });
  const int64_t classes = r.grid.classes, each = r.images * classes;
  for (int64_t i = 0; i < each; ++i) {
    const int64_t n = i / classes, c = i % classes;
    double sums[kSums] = {};
    for (int64_t b = 0; b < r.blocks; ++b) {
      const int64_t task = (n * r.blocks + b) * r.groups + c / r.group;
      for (int k = 0; k < kSums; ++k) sums[k] += partials[(task * r.group + c % r.group) * kSums + k];
    }
    for (int k = 0; k < kSums; ++k) out[k * each + i] = sums[k];
  }
  return good;
}

// ---- backward

template <class C>
auto pick_gradient(bool keep, bool squared) {
  if (squared) return keep ? pick<&gradient_loop<C, true, true>>() : pick<&gradient_loop<C, false, true>>();
  return keep ? pick<&gradient_loop<C, true, false>>() : pick<&gradient_loop<C, false, false>>();
}

template <class C>
struct Gradient {
  static constexpr bool kWantsAll = true;
  const Regions<C>& r;
  View grad;  // (kSums, N, C)
  bool squared;
  const TileSink<C>*input, *target;  // null: this gradient is not wanted
  bool reads_input = target || squared, reads_target = !r.indexed && (input || squared);
  decltype(pick_gradient<C>(true, true)) kept_slopes = pick_gradient<C>(true, squared),
                                         all_slopes = pick_gradient<C>(false, squared);
  decltype(pick<&index_gradient_loop<C, true>>()) by_index =
      squared ? pick<&index_gradient_loop<C, true>>() : pick<&index_gradient_loop<C, false>>();
  decltype(pick<&pair_gradient_loop>()) by_pairs = pick<&pair_gradient_loop>();
  decltype(pick<&kept_loop<C>>()) select_kept = pick<&kept_loop<C>>();
  TileBuffer<C> first{r.grid}, second{r.grid};

  void chunk(int64_t, const Tile& tile, int64_t c, const Pixels<C>& x) {
    if (input) write(*input, tile, c, x, x.p, x.t, 1, first);
    if (target) write(*target, tile, c, x, x.t, x.p, 2, second);
  }

  bool in_place() const {
    return (!reads_input || r.input.in_place()) && (!reads_target || r.target.in_place()) &&
           (!input || input->in_place()) && (!target || target->in_place());
  }

  void finish(const Tile& tile) {
    if (input) input->commit(tile, first);
    if (target) target->commit(tile, second);
  }

  // Writes the gradient of `operand`, whose own sum is sums[k].
  void write(const TileSink<C>& sink, const Tile& tile, int64_t c, const Pixels<C>& x, const C* operand, const C* other,
             int k, TileBuffer<C>& buffer) {
    const double both = of(0, tile.n, c), g = of(k, tile.n, c) * (squared ? 2 : 1);
    C* to = sink.row(tile, c, buffer);
    if (!r.has_class(c))
      std::fill_n(to, x.n, C(0));
    else if (x.index)
      by_index(operand, x.index, static_cast<IndexOf<C>>(c), x.n, both, g, to);
    else
      by_values(operand, other, x, both, g, to);
    sink.commit(tile, c, buffer);
  }

  void by_values(const C* operand, const C* other, const Pixels<C>& x, double both, double g, C* to) {
    if constexpr (sizeof(C) == 2) {
      if (!squared && is_moderate(both) && is_moderate(g)) {
        by_pairs(other, x.n, both, g, to);
        if (x.keep) select_kept(to, x.keep, x.n, to);
        return;
      }
    }
    (x.keep ? kept_slopes : all_slopes)(operand, other, x.keep, x.n, both, g, to);
  }

  double of(int k, int64_t n, int64_t c) const {
    return reinterpret_cast<const double*>(grad.data)[k * grad.strides[0] + n * grad.strides[1] + c * grad.strides[2]];
  }
};

template <class C>
bool backward(const Regions<C>& r, const Tensor& grad, bool squared, const Tensor* dx, const Tensor* dy) {
  TileSink<C> input, target;
  if (dx) input.bind(View(*dx), r.shape, r.grid);
  if (dy) target.bind(View(*dy), r.shape, r.grid);
  return r.run([&] {
    return Gradient<C>{r, View(grad), squared, dx ? &input : nullptr, dy ? &target : nullptr};
  });
}

// ---- the ops

// Calls body with a zero of the type in which the loops read x and y. double: x or y is double. uint16_t (stored bf16):
// x is bf16, y is bf16 or class indices, and there are no squares. float: all other cases.
template <class Body>
bool with_values(const View& x, const View& y, bool squared, const Body& body) {
  if (x.dtype == DType::kDouble || y.dtype == DType::kDouble) return body(0.0);
  const bool indexed = !y.is_floating() && x.sizes[1] <= INT16_MAX;
  if (x.dtype == DType::kBFloat16 && !squared && (indexed || y.dtype == x.dtype)) return body(uint16_t{0});
  return body(0.0f);
}

void check(bool good, int64_t classes) {
  STD_TORCH_CHECK(good, "region sums: a class index of target is out of range for the ", classes, " classes of input");
}

Tensor region_sums(const Tensor& input, const Tensor& target, const OptionalTensor& mask, const OptionalTensor& exists,
                   const std::optional<int64_t>& ignore_index, bool squared) {
  const View x(input), y(target);
  STD_TORCH_CHECK(x.ndim >= 2, "safeops: input must be (N, C, d1, ...)");
  const int64_t sizes[] = {kSums, x.sizes[0], x.sizes[1]};
  const Tensor sums = empty(Shape(3, sizes), DType::kDouble, input);
  double* out = reinterpret_cast<double*>(View(sums).data);
  check(with_values(x, y, squared, [&](auto zero) {
    return forward(Regions<decltype(zero)>(x, y, mask, exists, ignore_index), squared, out);
  }), x.sizes[1]);
  return sums;
}

std::tuple<Tensor, Tensor> region_sums_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                const OptionalTensor& mask, const OptionalTensor& exists,
                                                const std::optional<int64_t>& ignore_index, bool squared,
                                                bool need_input, bool need_target) {
  const View x(input), y(target), g(grad);
  STD_TORCH_CHECK(x.ndim >= 2 && g.dtype == DType::kDouble && g.ndim == 3 && g.sizes[0] == kSums &&
                      g.sizes[1] == x.sizes[0] && g.sizes[2] == x.sizes[1],
                  "_region_sums_backward: grad must be float64 of shape (4, N, C)");
  STD_TORCH_CHECK(!need_target || y.is_floating(), "_region_sums_backward: class indices have no gradient");
  const Tensor dx = need_input ? output_like(x.shape(), x.dtype, input, x) : empty_vector(x.dtype, input);
  const DType type = y.is_floating() ? y.dtype : DType::kFloat;
  const Tensor dy = need_target ? output_like(y.shape(), type, target, y) : empty_vector(type, target);
  const Tensor *first = need_input ? &dx : nullptr, *second = need_target ? &dy : nullptr;
  if (first || second)
    check(with_values(x, y, squared, [&](auto zero) {
      return backward(Regions<decltype(zero)>(x, y, mask, exists, ignore_index), grad, squared, first, second);
    }), x.sizes[1]);
  return {dx, dy};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_region_sums", TORCH_BOX(&region_sums));
  m.impl("_region_sums_backward", TORCH_BOX(&region_sums_backward));
}

}  // namespace safeops::cpu
