// The driver of functions of whole rows along one dim (softmax, cross entropy, normalize), of any layout, bitwise
// repeatable.
//
// An op is a few loops over pieces of rows: accumulate() reduces a piece to a state for each row, merge() adds the
// states of two pieces, finish() makes results and parameters of them, map() makes the outputs of a piece from its
// inputs and the parameters. The input is read from memory once as long as a row (or a tile of rows) fits the cache,
// else twice.
//
// Rows that are contiguous in memory are reduced one by one. All others are interleaved: as columns side by side they
// are reduced together, in the order of memory. Contiguous rows that are short are transposed first, to be columns too.
#pragma once

#include "cpu/engine/elementwise.h"
#include "cpu/rows/row_vectors.h"

namespace safeops::cpu {

constexpr int kRowInputs = 3;
constexpr int kRowOutputs = 3;
constexpr int kRowNumbers = 9;      // states, given numbers or results of a row
constexpr int kRowParameters = 10;
constexpr int kAgain = kRowParameters - 1;

// A matrix of values, `height` by `width`: so many rows of so many values each; interleaved, so many values of each of
// so many rows.
template <class C>
struct Piece {
  bool interleaved;
  int64_t height, width;
  int64_t first;             // the place in their rows of the first values
  const C* in[kRowInputs];
  int64_t step[kRowInputs];  // elements from one line of the matrix to the next
  const BitsOf<C>* keep;     // all ones or zero: beside bytes, gcc would halve the registers of the values; null: all
  int64_t keep_step;
  C* out[kRowOutputs];       // null: not wanted
  int64_t out_step[kRowOutputs];
  C* memo;                   // as large, without gaps: what accumulate() leaves to map(); null: map() reads the inputs
  const double* memo_state;  // where there is a memo: the first of the states that this piece alone had

  // Where in memory the first input goes on behind this piece, and the bytes of its elements.
  const char* ahead;
  int64_t ahead_step;

  // Converting a piece is a burst of loads that no computing overlaps, unless the loop before asks for them. (What is
  // read in place the hardware asks for by itself: then this stays where it is.)
  void prefetch(int64_t i) const { __builtin_prefetch(ahead + i * ahead_step); }

  int64_t rows() const { return interleaved ? width : height; }
  int64_t length() const { return interleaved ? height : width; }
  // The i-th value of row r: slow.
  C at(int input, int64_t r, int64_t i) const {
    return in[input][interleaved ? i * step[input] + r : r * step[input] + i];
  }
  bool kept(int64_t r, int64_t i) const { return !keep || keep[interleaved ? i * keep_step + r : r * keep_step + i]; }
};

// select() and select_or_zero() by a word of a piece's mask.
template <class C>
inline C select_bits(BitsOf<C> keep, C x, C other) {
  return bit_cast<C>(static_cast<BitsOf<C>>((bit_cast<BitsOf<C>>(x) & keep) | (bit_cast<BitsOf<C>>(other) & ~keep)));
}

template <class C>
inline C select_bits_or_zero(BitsOf<C> keep, C x) {
  return bit_cast<C>(static_cast<BitsOf<C>>(bit_cast<BitsOf<C>>(x) & keep));
}

// The loops of an op; those it does not have are null. `op` is its data. Numbers are arrays with one entry for each
// row.
template <class C>
struct RowLoops {
  using Prepare = void (*)(const void* op, int64_t rows, const double* const* given, C* const* parameters);
  using Accumulate = void (*)(const void* op, const Piece<C>& piece, const C* const* parameters, double* const* states);
  using Merge = void (*)(int64_t rows, double* const* into, const double* const* from);
  using FindLost = bool (*)(int64_t rows, const double* const* states, C* again);
  using Finish = void (*)(const void* op, int64_t rows, const double* const* states, double* const* results,
                          C* const* parameters);
  using Map = void (*)(const void* op, const Piece<C>& piece, const C* const* parameters);

  Prepare prepare = nullptr;                  // numbers that the caller gives -> parameters
  Accumulate accumulate_rows = nullptr, accumulate_columns = nullptr;
  FindLost find_lost = nullptr;               // marks in parameters[kAgain] the rows whose sums over- or underflowed
  Accumulate accumulate_carefully = nullptr;  // accumulates the marked rows again, without losses; leaves the others
  Merge merge = nullptr;
  Finish finish = nullptr;
  Map map_rows = nullptr, map_columns = nullptr;
  int states = 0;
  double start[kRowNumbers] = {};             // states of a row without values
  int64_t converted_piece = kChunk;           // values of a piece of one row that are converted: at most kPieceValues
  bool memo = false;                          // accumulate() leaves a memo
  bool map_reads = true;                      // map() needs the inputs beside the memo (the mask it always gets)
};

template <class C>
struct Rowwise {
  // The walk follows the memory of x, seen in the full shape.
  Rowwise(const Shape& shape, int64_t dim, const View& x);

  void input(const View& view) { source_[inputs_++].bind(view, shape_, order_); }
  void mask(const View& view) { mask_.bind(view, shape_, order_), masked_ = true; }
  void output(const View& view, bool wanted = true) {
    if (wanted) sink_[outputs_].bind(view, shape_, order_);
    wanted_[outputs_++] = wanted;
  }
  // A number for each row: floating, of the shape with the dim of size 1, or without it (keepdim = false).
  void given(const View& view, bool keepdim);
  void result(const View& view, bool keepdim);

  void run(const RowLoops<C>& loops, const void* op) const;

 private:
  struct Scratch;
  struct Unit;
  struct Job;

  Shape shape_, numbers_shape_;  // the latter with the dim of size 1
  ReducedDims dims_;
  int dim_;
  Order order_, row_order_;  // of the values; of the rows
  bool interleaved_, transposed_ = false;  // transposed: contiguous rows, interleaved in the cache
  int64_t outer_ = 1, length_ = 1, inner_ = 1;
  int inputs_ = 0, outputs_ = 0, givens_ = 0, results_ = 0;
  bool masked_ = false, wanted_[kRowOutputs] = {};
  Source<C> source_[kRowInputs];
  Source<uint8_t> mask_;
  Sink<C> sink_[kRowOutputs];
  Source<double> given_[kRowNumbers];
  Sink<double> result_[kRowNumbers];
};

// The shape of the rows' numbers.
Shape row_shape(const Shape& shape, int64_t dim, bool keepdim);

}  // namespace safeops::cpu
