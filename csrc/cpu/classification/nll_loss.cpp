// loss = -w_y x_y for a row with class y; dx_y = -w_y g, and 0 for the other classes.
// I/O: forward reads the class and one element of each row, backward writes dx.
#include "cpu/engine/parallel.h"
#include "cpu/classification/classification.h"

namespace safeops::cpu {

namespace {

// Calls each(row, offset) for the rows [begin, end) in contiguous order. The row's first element is x[offset].
template <class Each>
void for_rows(const ClassRows& rows, const int64_t* strides, int64_t begin, int64_t end, const Each& each) {
  if (begin == end) return;  // a dim of size 0 would be a division by 0
  const Shape& shape = rows.shape;
  int64_t index[kMaxDims], offset = 0, rest = begin;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    index[d] = rest % shape.size[d];
    rest /= shape.size[d];
    offset += index[d] * strides[d];
  }
  for (int64_t row = begin; row < end; ++row) {
    each(row, offset);
    for (int d = shape.ndim - 1; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < shape.size[d]) break;
      offset -= strides[d] * shape.size[d];
      index[d] = 0;
    }
  }
}

// The strides of an input, split into the strides of the rows and the stride of the classes.
struct RowStrides {
  int64_t of_row[kMaxDims] = {}, of_class;

  RowStrides(const ClassRows& rows, const int64_t* strides, int ndim) : of_class(strides[rows.dim]) {
    for (int d = 0, to = 0; d < ndim; ++d)
      if (d != rows.dim) of_row[to++] = strides[d];
  }
};

template <class S>
void gather(const ClassRows& rows, const View& x, void* out, bool in_double) {
  const RowStrides strides(rows, x.strides, x.ndim);
  const S* from = reinterpret_cast<const S*>(x.data);
  const double* weight = rows.weight.get();
  parallel(rows.count, 1, [&](int64_t begin, int64_t end) {
    for_rows(rows, strides.of_row, begin, end, [&](int64_t row, int64_t offset) {
      double loss = 0;
      if (rows.class_index[row] >= 0) {
        const int64_t index = static_cast<int64_t>(rows.class_index[row]);
        loss = -static_cast<double>(widen(from[offset + index * strides.of_class]));
        if (weight) loss *= weight[row];
      }
      if (in_double)
        static_cast<double*>(out)[row] = loss;
      else
        static_cast<float*>(out)[row] = static_cast<float>(loss);
    });
  });
}

// Writes the gradient at each row's class. dx must be contiguous and filled with 0.
template <class S>
void scatter(const ClassRows& rows, const Shape& shape, const double* g, void* dx) {
  int64_t all[kMaxDims] = {};
  contiguous_strides(shape, all);
  const RowStrides strides(rows, all, shape.ndim);
  const double* weight = rows.weight.get();
  parallel(rows.count, 1, [&](int64_t begin, int64_t end) {
    for_rows(rows, strides.of_row, begin, end, [&](int64_t row, int64_t offset) {
      if (rows.class_index[row] < 0) return;
      const double slope = weight ? -weight[row] * g[row] : -g[row];
      const int64_t index = static_cast<int64_t>(rows.class_index[row]);
      static_cast<S*>(dx)[offset + index * strides.of_class] = Narrow<S>::from(slope);
    });
  });
}

// Calls f(S{}), where S is the C++ type of a floating dtype.
template <class F>
void by_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kHalf: return f(Half{});
    case DType::kBFloat16: return f(BFloat16{});
    case DType::kFloat: return f(float{});
    default: return f(double{});
  }
}

std::tuple<Tensor, Tensor, Tensor> nll_loss(const Tensor& input, const Tensor& target,
                                            const std::optional<Tensor>& weight, const std::optional<Tensor>& mask,
                                            int64_t ignore_index) {
  constexpr char kName[] = "_nll_loss";
  const View x(input);
  ClassRows rows(kName, x);
  if (weight) rows.read_weights(kName, *weight);
  const DType dtype = wide(x.dtype, x.dtype);
  const Tensor keep = empty(rows.shape, DType::kBool, input);
  rows.read(kName, &target, mask, ignore_index, true, reinterpret_cast<uint8_t*>(View(keep).data));
  const Tensor weights = rows.weight_tensor(weight ? wide(dtype, View(*weight).dtype) : dtype, dtype, input);
  const Tensor loss = empty(rows.shape, dtype, input);
  by_dtype(x.dtype, [&](auto type) { gather<decltype(type)>(rows, x, View(loss).data, dtype == DType::kDouble); });
  return {loss, keep, weights};
}

Tensor nll_loss_backward(const Tensor& grad, const std::vector<int64_t>& size, ScalarType dtype,
                         const Tensor& target, const std::optional<Tensor>& weight, const std::optional<Tensor>& mask,
                         int64_t ignore_index) {
  constexpr char kName[] = "_nll_loss_backward";
  const View g(grad);
  const Shape shape(static_cast<int>(size.size()), size.data());
  const Tensor dx = new_output(shape, floating(dtype), grad);
  const View to(dx);
  ClassRows rows(kName, to);
  STD_TORCH_CHECK(g.is_floating() && rows.shape.is(g.ndim, g.sizes), kName,
                  ": grad must be floating, one for each row");
  if (weight) rows.read_weights(kName, *weight);
  rows.read(kName, &target, mask, ignore_index, false, nullptr);
  const int64_t bytes = shape.numel() * size_of(to.dtype);
  constexpr int64_t kPiece = 1 << 16;
  parallel((bytes + kPiece - 1) / kPiece, kPiece / 4, [&](int64_t begin, int64_t end) {
    std::fill_n(to.data + begin * kPiece, std::min(end * kPiece, bytes) - begin * kPiece, char{0});
  });
  std::unique_ptr<double[]> upstream(new double[std::max<int64_t>(1, rows.count)]);
  read_all(g, rows.shape, upstream.get());
  by_dtype(to.dtype, [&](auto type) { scatter<decltype(type)>(rows, shape, upstream.get(), to.data); });
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) {
  m.impl("_nll_loss", TORCH_BOX(&nll_loss));
  m.impl("_nll_loss_backward", TORCH_BOX(&nll_loss_backward));
}

}  // namespace safeops::cpu
