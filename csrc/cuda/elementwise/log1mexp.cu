// log1mexp: log(1 - e^x), x < 0.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct Log1mexp : Plain {
  static double stand_in(double eps, double) { return std::log(eps); }

  // Near 0, 1 - e^x is small and log sees its digits; far below, e^x is small and log_of_1_plus sees them.
  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    if (x > -range.eps) return range.stand_in;
    return x > C(-0.6931471805599453) ? log(-expm1(x)) : log_of_1_plus(-exp(x));
  }
  template <class C>
  static __device__ C slope(const Range<C>& range, C g, C x) {
    if (x > -range.eps) return C(0);
    // Far below, e^x itself may be too small for its digits where g times it is not; near 0 the slope is one factor.
    const C root = exp(x * C(0.5)), rest = root / expm1(x);
    return x > C(-1) ? g * (root * rest) : g * root * rest;
  }
};

}  // namespace

SAFEOPS_UNARY(log1mexp, Log1mexp)

}  // namespace safeops::cuda
