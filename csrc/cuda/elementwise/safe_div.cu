// safe_div: a / b. Where |b| < eps, the result is a fill value, or b is raised to the floor (FlooredDiv). Where a / b
// does not fit into the output dtype, it saturates.
#include "binary.cuh"
#include "quotient.cuh"

namespace safeops::cuda {
namespace {

struct SafeDiv : Plain {
  static constexpr bool kFixedRows = true;

  template <class C>
  static __device__ C value(const Range<C>& range, C a, C b) {
    const C q = a / b;  // may be inf or NaN if b is 0; then it is not selected below
    return divides(range, b) ? range.saturated(q, range.overflows(q) && finite(a)) : range.stand_in;
  }
  static __device__ float value(const Half& range, float a, float b) {  // lift: else 1 / b may be inf for a subnormal b
    const float lift = fabs(b) < std::numeric_limits<float>::min() ? 0x1p24f : 1, q = (a * lift) * (1 / (b * lift));
    return divides(range, b) ? range.saturated(q, range.overflows(q) && finite(a)) : range.stand_in;
  }
  template <class C>  // da = g / b, db = -g a / b^2; exactly 0 where value() gives the stand-in or saturates
  static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db) {
    const C q = a / b, slope = g / b;
    const bool live = divides(range, b) && !(range.overflows(q) && finite(a));
    da = live ? slope : C(0);
    db = live ? slope_of_divisor(g, b, q, slope) : C(0);
  }
};

// a / (sign(b) max(|b|, eps)), where 0 counts as positive; db is 0 below eps.
struct FlooredDiv : SafeDiv {
  template <class C>
  static __device__ C divisor(const Range<C>& range, C b) {
    return fabs(b) < range.eps ? (b < C(0) ? -range.eps : range.eps) : b;
  }
  template <class R, class C>
  static __device__ C value(const R& range, C a, C b) {
    return SafeDiv::value(range, a, divisor<C>(range, b));
  }
  template <class C>
  static __device__ void slopes(const Range<C>& range, C g, C a, C b, C& da, C& db) {
    SafeDiv::slopes(range, g, a, divisor(range, b), da, db);
    db = fabs(b) < range.eps ? C(0) : db;
  }
};

// Chooses by eps. eps < 0 means fill_value=None with the floor -eps: FlooredDiv, which has kernels of its own, so that
// SafeDiv's stay short.
struct ByEps {};

double least(double eps, bool wide) {
  return std::fmax(-eps, wide ? std::numeric_limits<double>::denorm_min() : std::numeric_limits<float>::denorm_min());
}

}  // namespace

template <>
void launch_binary<ByEps>(Plan<3>& plan, bool wide, double eps, double fill, Type out, cudaStream_t stream) {
  if (eps < 0) launch_binary<FlooredDiv>(plan, wide, least(eps, wide), fill, out, stream);
  else launch_binary<SafeDiv>(plan, wide, eps, fill, out, stream);
}

template <>
void launch_binary_backward<ByEps>(Plan<5>& plan, bool wide, double eps, Type out, bool need_input, bool need_other,
                                   cudaStream_t stream) {
  if (eps < 0) launch_binary_backward<FlooredDiv>(plan, wide, least(eps, wide), out, need_input, need_other, stream);
  else launch_binary_backward<SafeDiv>(plan, wide, eps, out, need_input, need_other, stream);
}

template <>
void launch_number<ByEps>(Plan<2>& plan, bool wide, double number, double eps, double fill, Type out,
                          cudaStream_t stream) {
  if (eps < 0) launch_number<FlooredDiv>(plan, wide, number, least(eps, wide), fill, out, stream);
  else launch_number<SafeDiv>(plan, wide, number, eps, fill, out, stream);
}

template <>
void launch_number_backward<ByEps>(Plan<3>& plan, bool wide, double number, double eps, Type out,
                                   cudaStream_t stream) {
  if (eps < 0) launch_number_backward<FlooredDiv>(plan, wide, number, least(eps, wide), out, stream);
  else launch_number_backward<SafeDiv>(plan, wide, number, eps, out, stream);
}

SAFEOPS_BINARY(safe_div, ByEps)

}  // namespace safeops::cuda
