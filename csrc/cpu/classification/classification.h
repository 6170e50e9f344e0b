// Rows that have a class each: which rows are kept, and with which weight.
#pragma once

#include <memory>
#include <vector>

#include "cpu/engine/rowwise.h"

namespace safeops::cpu {

// Contiguous values, one for each row, as a tensor.
template <class T>
struct RowValues {
  Shape shape;
  int64_t strides[kMaxDims];
  T* data;
  DType dtype;

  RowValues(const Shape& shape_, T* data_, DType dtype_) : shape(shape_), data(data_), dtype(dtype_) {
    contiguous_strides(shape, strides);
  }
  RowValues(const RowValues&) = delete;  // views point into it

  View view() const {
    View view(const_cast<std::remove_const_t<T>*>(data), dtype);
    view.ndim = shape.ndim;
    view.sizes = shape.size;
    view.strides = strides;
    return view;
  }
};

// The rows of an input (N, C, d1, ...) or (C): all dims but the one of the classes, which may be another.
struct ClassRows {
  int dim;
  int64_t classes, count;
  Shape shape;
  std::unique_ptr<double[]> place;   // the class of each row, -1 where it is not kept; 0 for probabilities
  std::unique_ptr<double[]> weight;  // the class's weight; null without class weights, and for probabilities
  bool weighted = false;
  bool partial = false;              // the input holds only part of the classes: any other class gets place `classes`
  std::vector<double> weights;       // of the classes

  ClassRows(const char* op, const View& x) : ClassRows(op, x, x.ndim > 1 ? 1 : 0) {}
  ClassRows(const char* op, const View& x, int dim);

  // (many, *rows)
  Shape with(int64_t many) const;

  // The weights that a mean divides by, in the compute dtype; empty in `dtype` where there are none.
  Tensor weight_tensor(DType compute, DType dtype, const Tensor& like) const;

  void read_weights(const char* op, const Tensor& weight);

  // Sets place and weight. `target` is null where each row has probabilities. keep: bytes of 0 and 1, or null. A class
  // out of range is an error, or with `refuse` = false its row is not kept.
  void read(const char* op, const Tensor* target, const std::optional<Tensor>& mask, int64_t ignore_index, bool refuse,
            uint8_t* keep);
};

void set_zero(const Tensor& t);  // of a contiguous tensor

// Reads a view, broadcast to a shape, in that shape's contiguous order.
void read_all(const View& view, const Shape& shape, double* to);

// ---- a row's class among its parameters: in two parts, because a float is exact only up to 2^24

constexpr int64_t kPlacePart = int64_t{1} << 20;

enum ClassParameter { kPlaceHigh, kPlaceLow, kFirstFree };

template <class C>
inline void split_place(double place, int64_t row, C* const* parameters) {
  // (rounded down without std::floor, which is a call on the baseline)
  const double high = static_cast<double>(static_cast<int32_t>((place + kPlacePart) * (1.0 / kPlacePart))) - 1;
  parameters[kPlaceHigh][row] = static_cast<C>(high);
  parameters[kPlaceLow][row] = static_cast<C>(place - high * kPlacePart);
}

// The class of a row, negative where it is not kept.
template <class C>
inline int64_t place_of(const C* const* parameters, int64_t row) {
  return static_cast<int64_t>(parameters[kPlaceHigh][row]) * kPlacePart +
         static_cast<int64_t>(parameters[kPlaceLow][row]);
}

template <class C>
inline bool is_kept(const C* const* parameters, int64_t row) {
  return parameters[kPlaceHigh][row] >= 0;
}

// For rows side by side: the line of the piece that holds each row's class, -1 for none. (A branch for each row would
// be mispredicted as often as there are pieces.)
template <class C>
inline void target_lines(const Piece<C>& p, const C* const* parameters, int32_t* lines) {
  const C *high = parameters[kPlaceHigh], *low = parameters[kPlaceLow];
  const double first = static_cast<double>(p.first), height = static_cast<double>(p.height);
  SAFEOPS_SIMD
  for (int64_t k = 0; k < p.width; ++k) {
    const double line = static_cast<double>(high[k]) * kPlacePart + low[k] - first;
    const bool inside = (line >= 0) & (line < height);
    lines[k] = static_cast<int32_t>(select(inside, line, -1.0));
  }
}

}  // namespace safeops::cpu
