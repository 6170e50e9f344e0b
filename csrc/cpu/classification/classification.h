// Reads the class of each row of an input, whether the row is kept, and its weight.
#pragma once

#include <memory>
#include <vector>

#include "cpu/engine/rowwise.h"

namespace safeops::cpu {

// Contiguous memory with one value for each row, and a view of it.
template <class T>
struct RowValues {
  Shape shape;
  int64_t strides[kMaxDims];
  T* data;
  DType dtype;

  RowValues(const Shape& shape_, T* data_, DType dtype_) : shape(shape_), data(data_), dtype(dtype_) {
    contiguous_strides(shape, strides);
  }
  RowValues(const RowValues&) = delete;  // views point into this object

  View view() const {
    View view(const_cast<std::remove_const_t<T>*>(data), dtype);
    view.ndim = shape.ndim;
    view.sizes = shape.size;
    view.strides = strides;
    return view;
  }
};

// The rows of an input: all its dims but the dim of the classes, which by default is dim 1 of (N, C, d1, ...) or dim 0
// of (C).
struct ClassRows {
  int dim;
  int64_t classes, count;
  Shape shape;
  std::unique_ptr<double[]> class_index;   // each row's class, -1 if it is not kept; 0 if rows have probabilities
  std::unique_ptr<double[]> weight;  // weight of each row's class; null without class weights or for probabilities
  bool weighted = false;
  bool partial = false;              // input holds part of the classes: a class of another part gets index `classes`
  std::vector<double> weights;       // the weight of each class

  ClassRows(const char* op, const View& x) : ClassRows(op, x, x.ndim > 1 ? 1 : 0) {}
  ClassRows(const char* op, const View& x, int dim);

  // Returns the shape (many, *rows).
  Shape with(int64_t many) const;

  // Returns the rows' weights, by whose sum a mean divides, in the compute dtype; without weights an empty vector of
  // `dtype`.
  Tensor weight_tensor(DType compute, DType dtype, const Tensor& like) const;

  void read_weights(const char* op, const Tensor& weight);

  // Sets class_index, weight, and keep (bytes of 0 and 1) unless keep is null. `target` is null if each row has
  // probabilities instead of a class. A class out of range is an error; with `refuse` = false its row is not kept.
  void read(const char* op, const Tensor* target, const std::optional<Tensor>& mask, int64_t ignore_index, bool refuse,
            uint8_t* keep);
};

void set_zero(const Tensor& t);  // t must be contiguous

// Copies a view, broadcast to `shape`, to `to` in contiguous order.
void read_all(const View& view, const Shape& shape, double* to);

// ---- A row's class is held as two parameters, because a float holds integers only up to 2^24.

constexpr int64_t kClassPart = int64_t{1} << 20;

enum ClassParameter { kClassHigh, kClassLow, kFirstFree };

template <class C>
inline void split_class_index(double class_index, int64_t row, C* const* parameters) {
  // Rounds down without std::floor, which is a library call on the baseline instruction set.
  const double high = static_cast<double>(static_cast<int32_t>((class_index + kClassPart) * (1.0 / kClassPart))) - 1;
  parameters[kClassHigh][row] = static_cast<C>(high);
  parameters[kClassLow][row] = static_cast<C>(class_index - high * kClassPart);
}

// Returns the class of a row; negative if the row is not kept.
template <class C>
inline int64_t class_index_of(const C* const* parameters, int64_t row) {
  return static_cast<int64_t>(parameters[kClassHigh][row]) * kClassPart +
         static_cast<int64_t>(parameters[kClassLow][row]);
}

template <class C>
inline bool is_kept(const C* const* parameters, int64_t row) {
  return parameters[kClassHigh][row] >= 0;
}

// For rows side by side: sets lines[k] to the line of the piece that holds the class of row k, or -1 if no line does.
// It has no branches, since they would be mispredicted.
template <class C>
inline void target_lines(const Piece<C>& p, const C* const* parameters, int32_t* lines) {
  const C *high = parameters[kClassHigh], *low = parameters[kClassLow];
  const double first = static_cast<double>(p.first), height = static_cast<double>(p.height);
  SAFEOPS_SIMD
  for (int64_t k = 0; k < p.width; ++k) {
    const double line = static_cast<double>(high[k]) * kClassPart + low[k] - first;
    const bool inside = (line >= 0) & (line < height);
    lines[k] = static_cast<int32_t>(select(inside, line, -1.0));
  }
}

}  // namespace safeops::cpu
