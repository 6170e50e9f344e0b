// A loss that is no function of x - y, for test_two_slopes.py: Poisson's, e^(scale x) - y x, whose derivatives are
// scale e^(scale x) - y and -x. The driver is the library's own, and brings the engine with it: one source, one library.
#include <cmath>

#include "cpu/engine/convert.cpp"
#include "cpu/engine/elementwise.cpp"
#include "cpu/engine/isa.cpp"
#include "cpu/engine/operand.cpp"
#include "cpu/engine/reduction.cpp"
#include "cpu/engine/weighted_sum.cpp"
#include "cpu/losses/pointwise_loss.h"

namespace safeops::cpu {

template <class C>
struct Poisson {
  C scale;
  explicit Poisson(double scale_) : scale(static_cast<C>(scale_)) {}

  C value(C x, C y) const { return std::exp(scale * x) - y * x; }
  Slopes<C> slopes(C x, C y) const { return {scale * std::exp(scale * x) - y, 0 - x}; }
};

using Op = PointwiseLoss<Poisson, double>;

STABLE_TORCH_LIBRARY(safeops_two_slopes, m) {
  m.def("poisson(Tensor x, Tensor y, Tensor? mask, Tensor? weight, Tensor? denominator, int reduction, float scale, "
        "bool empty_nan, float? divisor) -> (Tensor, Tensor)");
  m.def("poisson_backward(Tensor grad, Tensor? denominator, Tensor x, Tensor y, Tensor? mask, Tensor? weight, "
        "float scale, bool need_x, bool need_y, ScalarType? x_dtype, ScalarType? y_dtype) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(safeops_two_slopes, CPU, m) {
  m.impl("poisson", TORCH_BOX(&Op::forward));
  m.impl("poisson_backward", TORCH_BOX(&Op::backward));
}

}  // namespace safeops::cpu
