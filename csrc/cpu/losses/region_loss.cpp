// dice_loss and tversky_loss from the sums of region_sums.cpp, and the gradients of the sums and weights, in fp64. With
// both = sum p t, p = sum p (or p^2), t = sum t (or t^2) of a region:
//
//     loss = w (1 - numerator / total)
//     dice:     numerator = 2 both + smooth_nr,  total = p + t + smooth_dr
//     Tversky:  numerator = both + smooth_nr,    total = both + alpha (p - both) + beta (t - both) + smooth_dr
//
// A mean divides by the number of kept regions, or by the sum of their weights. Backward computes this divisor again.
// I/O: a few numbers of each region, which are in the cache.
#include <limits>
#include <memory>
#include <optional>
#include <tuple>

#include "cpu/engine/convert.h"

namespace safeops::cpu {

namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalNumber = std::optional<double>;
constexpr int kSums = 4;
enum Reduction { kNone, kMean, kSum };  // as REDUCTION in safeops/core/loss_reduction.py

double element(const View& view, int64_t offset) {
  return read_scalar(View(view.data + offset * size_of(view.dtype), view.dtype));
}

// Writes n numbers in the dtype of a contiguous tensor.
void write(const double* from, const Tensor& to, int64_t n) {
  const View view(to);
  const Convert store = find_store<double>(view.dtype);
  if (store)
    store(from, view.data, n);
  else
    std::copy_n(from, n, reinterpret_cast<double*>(view.data));
}

struct Region {
  double numerator, total, weight;
  bool sloped, kept;

  double loss() const { return 1 - (sloped ? numerator / total : 1); }
};

struct Regions {
  View sums;  // the sums of region_sums.cpp, (kSums, N, C)
  const OptionalTensor &weight, &denominator;
  OptionalNumber divisor;
  int64_t reduction;
  bool empty_nan, batch;
  double smooth_nr, smooth_dr;
  OptionalNumber alpha, beta;  // of the Tversky loss; null for dice

  const double* data = reinterpret_cast<const double*>(sums.data);
  int64_t images = sums.sizes[1], classes = sums.sizes[2], rows = batch ? 1 : images, count = rows * classes;
  std::unique_ptr<double[]> weights = std::make_unique<double[]>(classes);

  void check(const char* op) {
    STD_TORCH_CHECK(sums.ndim == 3 && sums.sizes[0] == kSums && sums.dtype == DType::kDouble, op,
                    ": sums must be float64 of shape (4, N, C)");
    std::fill_n(weights.get(), classes, 1.0);
    if (!weight) return;
    const View w(*weight);
    STD_TORCH_CHECK(w.ndim == 1 && w.sizes[0] == classes && w.is_floating(), op,
                    ": weight must be floating point, with one number for each class");
    for (int64_t c = 0; c < classes; ++c) weights[c] = element(w, c * w.strides[0]);
  }

  double sum(int k, int64_t row, int64_t c) const {
    double total = 0;
    for (int64_t n = batch ? 0 : row; n < (batch ? images : row + 1); ++n)
      total += data[k * sums.strides[0] + n * sums.strides[1] + c * sums.strides[2]];
    return total;
  }

  Region region(int64_t row, int64_t c) const {
    const double both = sum(0, row, c), p = sum(1, row, c), t = sum(2, row, c), w = weights[c];
    const double total = alpha ? both + *alpha * (p - both) + *beta * (t - both) : p + t;
    return {(alpha ? both : 2 * both) + smooth_nr, total + smooth_dr, w, total + smooth_dr != 0,
            sum(3, row, c) > 0 && w != 0};
  }

  struct Mean {
    double loss = 0, by = 1;  // the sum of the kept losses; its divisor, inf if nothing is kept
    bool some = false, nothing = true;  // some: a region is kept on this rank; nothing: none is kept on any rank
  };

  Mean reduced() const {
    Mean it;
    double kept = 0, weighed = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Region r = region(i / classes, i % classes);
      if (!r.kept) continue;
      it.loss += r.loss() * r.weight;
      weighed += r.weight;
      ++kept;
    }
    it.some = kept > 0, it.nothing = !it.some;
    if (reduction != kMean) return it;
    const bool given = denominator || divisor;
    it.by = denominator ? read_scalar(View(*denominator)) : divisor ? *divisor : weight ? weighed : kept;
    if (given) it.nothing = it.by == 0;
    if (it.nothing || !it.some) it.by = std::numeric_limits<double>::infinity();
    return it;
  }
};

Tensor region_loss(const Tensor& sums, const OptionalTensor& weight, const OptionalTensor& denominator,
                   const OptionalNumber& divisor, int64_t reduction, bool empty_nan, bool batch, ScalarType dtype,
                   double smooth_nr, double smooth_dr, const OptionalNumber& alpha, const OptionalNumber& beta) {
  Regions all{View(sums), weight, denominator, divisor, reduction, empty_nan, batch, smooth_nr, smooth_dr, alpha, beta};
  all.check("_region_loss");
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const int64_t sizes[] = {all.images, all.classes};
  if (reduction == kNone) {
    const Tensor out = empty(batch ? Shape(1, sizes + 1) : Shape(2, sizes), floating(dtype), sums);
    const auto losses = std::make_unique<double[]>(all.count);
    for (int64_t i = 0; i < all.count; ++i) {
      const Region r = all.region(i / all.classes, i % all.classes);
      losses[i] = r.kept ? r.loss() * r.weight : empty_nan ? nan : 0;
    }
    write(losses.get(), out, all.count);
    return out;
  }
  const Regions::Mean mean = all.reduced();
  const double value = empty_nan && mean.nothing ? nan : mean.some ? mean.loss / mean.by : 0;
  const Tensor out = empty(Shape(0, sizes), floating(dtype), sums);
  write(&value, out, 1);
  return out;
}

std::tuple<Tensor, Tensor> region_loss_backward(const Tensor& grad, const Tensor& sums, const OptionalTensor& weight,
                                                const OptionalTensor& denominator, const OptionalNumber& divisor,
                                                int64_t reduction, bool empty_nan, bool batch, double smooth_nr,
                                                double smooth_dr, const OptionalNumber& alpha,
                                                const OptionalNumber& beta, bool need_sums, bool need_weight) {
  Regions all{View(sums), weight, denominator, divisor, reduction, empty_nan, batch, smooth_nr, smooth_dr, alpha, beta};
  all.check("_region_loss_backward");
  const View g(grad);
  const int64_t dims = reduction != kNone ? 0 : batch ? 1 : 2, C = all.classes;
  STD_TORCH_CHECK(g.ndim == dims && (dims < 1 || g.sizes[dims - 1] == C) && (dims < 2 || g.sizes[0] == all.images) &&
                      g.is_floating(),
                  "_region_loss_backward: grad must be floating, of the loss's shape");
  const Tensor& like = weight ? *weight : sums;
  const DType type = View(like).dtype;
  const int64_t sizes[] = {kSums, all.images, C};
  const Tensor of_sums = need_sums ? empty(Shape(3, sizes), DType::kDouble, sums) : empty_vector(DType::kDouble, sums);
  const bool weighted = need_weight && weight;
  const Tensor of_weight = weighted ? empty(Shape(1, sizes + 2), type, like) : empty_vector(type, like);
  double* out = need_sums ? reinterpret_cast<double*>(View(of_sums).data) : nullptr;
  const auto weight_slopes = std::make_unique<double[]>(C);

  double upstream = dims ? 0 : read_scalar(g), of_divisor = 0;  // of_divisor: a weight's gradient by way of the divisor
  if (reduction == kMean) {
    const Regions::Mean mean = all.reduced();
    upstream /= mean.by;
    if (!denominator && !divisor && weight) of_divisor = -upstream * (mean.loss / mean.by);
  }
  for (int64_t i = 0; i < all.count; ++i) {
    const int64_t n = i / C, c = i % C, each = all.images * C;
    const Region r = all.region(n, c);
    if (dims) upstream = element(g, c * g.strides[dims - 1] + (dims == 2 ? n * g.strides[0] : 0));
    if (r.kept) weight_slopes[c] += upstream * r.loss() + of_divisor;
    if (!out) continue;
    const bool live = r.kept && r.sloped;  // if false, the gradient is 0 for any upstream gradient
    // (1) d loss/d numerator = -w / total,  (2) d loss/d total = w numerator / total^2
    const double of_numerator = live ? -(r.weight * upstream) / r.total : 0;
    const double of_total = live ? -of_numerator * (r.numerator / r.total) : 0;
    // (3) Gradient of p: alpha (2); of t: beta (2); of both: (1) + (1 - alpha - beta) (2). Dice: p, t: (2); both: 2 (1)
    const double a = alpha.value_or(1), b = alpha ? *beta : 1;
    const double slopes[kSums] = {
        alpha ? of_numerator + (of_total - a * of_total - b * of_total) : 2 * of_numerator, a * of_total, b * of_total,
        0};  // the count has no gradient
    for (int64_t image = n; image < (batch ? all.images : n + 1); ++image)
      for (int k = 0; k < kSums; ++k) out[k * each + image * C + c] = slopes[k];
  }
  if (weighted) write(weight_slopes.get(), of_weight, C);
  return {of_sums, of_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_region_loss", TORCH_BOX(&region_loss));
  m.impl("_region_loss_backward", TORCH_BOX(&region_loss_backward));
}

}  // namespace safeops::cpu
