// log1mexp: log(1 - e^x), x < 0.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct Log1mexp : Plain {
  static double stand_in(double eps, double) { return std::log(eps); }

  // Near 0, expm1 keeps the digits of 1 - e^x, which is small; far below 0, log_of_1_plus keeps those of e^x.
  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    if (x > -range.eps) return range.stand_in;
    return x > C(-0.6931471805599453) ? log(-expm1(x)) : log_of_1_plus(-exp(x));
  }
  template <class C>
  static __device__ C slope(const Range<C>& range, C g, C x) {
    if (x > -range.eps) return C(0);
    // The derivative is e^x / expm1(x). Far below 0, e^x may underflow where g e^x does not, so g is multiplied by
    // e^(x/2) twice.
    const C root = exp(x * C(0.5)), rest = root / expm1(x);
    return x > C(-1) ? g * (root * rest) : g * root * rest;
  }
};

}  // namespace

SAFEOPS_UNARY(log1mexp, Log1mexp)

}  // namespace safeops::cuda
