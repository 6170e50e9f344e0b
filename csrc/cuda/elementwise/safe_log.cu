// safe_log: log(max(x, eps)); the slope is 0 for x < eps.
#include "unary.cuh"

namespace safeops::cuda {
namespace {

struct SafeLog : Plain {
  static double stand_in(double eps, double) { return std::log(eps); }

  template <class C>
  static __device__ C value(const Range<C>& range, C x) {
    return x < range.eps ? range.stand_in : log(x);
  }
  static __device__ float value(const Half& range, float x) {
    return x < range.eps ? range.stand_in : log2_of(x) * kLog2;
  }
  template <class C>
  static __device__ C slope(const Range<C>& range, C g, C x) {
    return x < range.eps ? C(0) : g / x;
  }
};

}  // namespace

SAFEOPS_UNARY(safe_log, SafeLog)

}  // namespace safeops::cuda
