// The driver of functions of whole rows along one dim (softmax, cross entropy, normalize). It takes any layout; results
// are bitwise repeatable.
//
// An op consists of loops over pieces of rows. (1) accumulate() reduces a piece to one state per row. (2) merge()
// combines the states of two pieces. (3) finish() turns states into results and parameters. (4) map() computes the
// outputs of a piece from its inputs and the parameters. The input is read from memory once if a row (or a group of
// rows) fits the cache, else twice.
//
// Rows that are contiguous in memory are reduced one by one. All other rows are interleaved: they lie side by side as
// columns, and are reduced together in the order of memory. Short contiguous rows are first transposed to columns.
#pragma once

#include "cpu/engine/elementwise.h"
#include "cpu/engine/row_vectors.h"

namespace safeops::cpu {

constexpr int kRowInputs = 3;
constexpr int kRowOutputs = 3;
constexpr int kRowStats = 9;      // states, inputs and results per row: at most as many of each
constexpr int kRowParameters = 10;
constexpr int kRecompute = kRowParameters - 1;

// A piece of several rows, as a matrix (height, width): (rows, values), or (values, rows) if interleaved.
template <class C>
struct Piece {
  bool interleaved;
  int64_t height, width;
  int64_t first;             // index, within a row, of the piece's first value
  const C* in[kRowInputs];
  int64_t step[kRowInputs];  // elements from one line of the matrix to the next
  const BitsOf<C>* keep;     // words of all ones or 0 (for bytes gcc would use half of a register); null: all are kept
  int64_t keep_step;
  C* out[kRowOutputs];       // null: not wanted
  int64_t out_step[kRowOutputs];
  C* memo;                   // (height, width), dense: written by accumulate(), read by map(); null: there is no memo
  const double* memo_state;  // if there is a memo: the first state of this piece alone, before merging

  // The address at which the first input continues after this piece, and the bytes of one element.
  const char* ahead;
  int64_t ahead_step;

  // A loop prefetches the next piece while it computes; the loads of the next piece's conversion would otherwise
  // overlap no computation. (An input that is read in place is left to the hardware: ahead_step is then 0.)
  void prefetch(int64_t i) const { __builtin_prefetch(ahead + i * ahead_step); }

  int64_t rows() const { return interleaved ? width : height; }
  int64_t length() const { return interleaved ? height : width; }
  // Returns the i-th value of row r; slow.
  C at(int input, int64_t r, int64_t i) const {
    return in[input][interleaved ? i * step[input] + r : r * step[input] + i];
  }
  bool kept(int64_t r, int64_t i) const { return !keep || keep[interleaved ? i * keep_step + r : r * keep_step + i]; }
};

// Like select() and select_or_zero(), but `keep` is a word of Piece::keep.
template <class C>
inline C select_bits(BitsOf<C> keep, C x, C other) {
  return bit_cast<C>(static_cast<BitsOf<C>>((bit_cast<BitsOf<C>>(x) & keep) | (bit_cast<BitsOf<C>>(other) & ~keep)));
}

template <class C>
inline C select_bits_or_zero(BitsOf<C> keep, C x) {
  return bit_cast<C>(static_cast<BitsOf<C>>(bit_cast<BitsOf<C>>(x) & keep));
}

// Computes the values that the other loops read as their first input. x: (height, width), its lines `step` elements
// apart; to: (height, width), dense.
template <class C>
using Read = void (*)(const void* op, const C* x, int64_t height, int64_t width, int64_t step, C* to);

// The loops of an op; a loop that the op does not need is null. `op` is the op's data. States, inputs and results per
// row are arrays with one entry for each row.
template <class C>
struct RowLoops {
  using Prepare = void (*)(const void* op, int64_t rows, const double* const* row_inputs, C* const* parameters);
  using Accumulate = void (*)(const void* op, const Piece<C>& piece, const C* const* parameters, double* const* states);
  using Merge = void (*)(int64_t rows, double* const* into, const double* const* from);
  using FindLost = bool (*)(int64_t rows, const double* const* states, C* recompute);
  using Finish = void (*)(const void* op, int64_t rows, const double* const* states, double* const* results,
                          C* const* parameters);
  using Map = void (*)(const void* op, const Piece<C>& piece, const C* const* parameters);

  Read<C> read = nullptr;
  Prepare prepare = nullptr;                  // turns the caller's inputs per row into parameters
  Accumulate accumulate_rows = nullptr, accumulate_columns = nullptr;
  FindLost find_lost = nullptr;               // marks rows whose sums over- or underflowed in parameters[kRecompute]
  Accumulate accumulate_carefully = nullptr;  // accumulates the marked rows again, without losses; skips the others
  Merge merge = nullptr;
  Finish finish = nullptr;
  Map map_rows = nullptr, map_columns = nullptr;
  int states = 0;
  double start[kRowStats] = {};               // the states of a row without values
  int64_t converted_piece = kChunk;           // values of a piece of one row, if the first input is converted
  bool memo = false;                          // accumulate() writes a memo
  bool map_reads = true;                      // map() needs the inputs even with a memo (it always gets the mask)
};

template <class C>
struct Rowwise {
  // The walk follows the memory of x, which is broadcast to `shape`.
  Rowwise(const Shape& shape, int64_t dim, const View& x);

  void input(const View& view) { source_[inputs_++].bind(view, shape_, order_); }
  void mask(const View& view) { mask_.bind(view, shape_, order_), masked_ = true; }
  void output(const View& view, bool wanted = true) {
    if (wanted) sink_[outputs_].bind(view, shape_, order_);
    wanted_[outputs_++] = wanted;
  }
  // Operands of one floating value per row. Their shape has the dim with size 1, or lacks the dim (keepdim = false).
  void row_input(const View& view, bool keepdim);
  void result(const View& view, bool keepdim);

  void run(const RowLoops<C>& loops, const void* op) const;

 private:
  struct Scratch;
  struct RowGroup;
  struct Job;

  Shape shape_, row_shape_;  // row_shape_: shape_ with the dim of size 1
  ReducedDims dims_;
  int dim_;
  Order order_, row_order_;  // order_: the walk over values; row_order_: the walk over rows
  bool interleaved_, transposed_ = false;  // transposed_: contiguous rows that are interleaved in the cache
  int64_t outer_ = 1, length_ = 1, inner_ = 1;
  int inputs_ = 0, outputs_ = 0, row_inputs_ = 0, results_ = 0;
  bool masked_ = false, wanted_[kRowOutputs] = {};
  Source<C> source_[kRowInputs];
  Source<uint8_t> mask_;
  Sink<C> sink_[kRowOutputs];
  Source<double> row_input_[kRowStats];
  Sink<double> result_[kRowStats];
};

// The shape of a result with one value per row.
Shape row_shape(const Shape& shape, int64_t dim, bool keepdim);

}  // namespace safeops::cpu
