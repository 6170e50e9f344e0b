// Functions of whole rows along one dim (softmax, normalize, cosine similarity), of any layout, bitwise repeatable.
//
// An op is a few loops: `fold` takes a piece of some rows to numbers of its own for each row, `merge` adds those of two
// pieces, `finish` makes results and parameters of them, `map` makes the outputs of a piece. The input is read from
// memory once as long as a row (or a tile of them) fits the cache; what lies beyond is read twice.
//
// Rows that are contiguous in memory are reduced one by one. All others lie side by side: they are reduced in lanes,
// walking memory as it lies. Short rows are brought side by side first.
#pragma once

#include "cpu/engine/elementwise.h"
#include "cpu/rows/row_lines.h"

namespace safeops::cpu {

constexpr int kRowInputs = 2;
constexpr int kRowOutputs = 2;
constexpr int kRowNumbers = 5;      // states, given numbers or results of a row
constexpr int kRowParameters = 10;
constexpr int kAgain = kRowParameters - 1;

// Values of rows: `lines` rows of `side` values each, or, in lanes, `lines` values of each of `side` rows.
template <class C>
struct Piece {
  bool lanes;
  int64_t lines, side;
  const C* in[kRowInputs];
  int64_t step[kRowInputs];  // from line to line
  const BitsOf<C>* keep;     // all ones or zero: beside bytes, gcc would halve the registers of the values; null: all
  int64_t keep_step;
  C* out[kRowOutputs];       // null: not wanted
  int64_t out_step[kRowOutputs];
  C* memo;                   // (lines, side) without gaps: what fold may leave to map; null: map starts from the inputs
  const double* key;         // the first of fold's numbers for this piece, where there is a memo

  int64_t rows() const { return lanes ? side : lines; }
  int64_t length() const { return lanes ? lines : side; }
  // The i-th value of row r, for loops in no hurry.
  C at(int input, int64_t r, int64_t i) const { return lanes ? in[input][i * step[input] + r]
                                                             : in[input][r * step[input] + i]; }
  bool kept(int64_t r, int64_t i) const { return !keep || (lanes ? keep[i * keep_step + r] : keep[r * keep_step + i]); }
};

// keep ? x : other, of a word of a piece's mask.
template <class C>
inline C choose(BitsOf<C> keep, C x, C other) {
  return bit_cast<C>(static_cast<BitsOf<C>>((bit_cast<BitsOf<C>>(x) & keep) | (bit_cast<BitsOf<C>>(other) & ~keep)));
}

template <class C>
inline C choose_or_zero(BitsOf<C> keep, C x) {
  return bit_cast<C>(static_cast<BitsOf<C>>(bit_cast<BitsOf<C>>(x) & keep));
}

// The loops of an op; those it does not have are null. `op` is its data. Numbers are arrays with one entry for each
// row.
template <class C>
struct RowLoops {
  using Prepare = void (*)(const void* op, int64_t rows, const double* const* given, C* const* parameters);
  using Fold = void (*)(const void* op, const Piece<C>& piece, const C* const* parameters, double* const* states);
  using Merge = void (*)(int64_t rows, double* const* into, const double* const* from);
  using Doubt = bool (*)(int64_t rows, const double* const* states, C* again);
  using Finish = void (*)(const void* op, int64_t rows, const double* const* states, double* const* results,
                          C* const* parameters);
  using Map = void (*)(const void* op, const Piece<C>& piece, const C* const* parameters);

  Prepare prepare = nullptr;                       // numbers the caller gives -> parameters
  Fold fold_rows = nullptr, fold_lanes = nullptr;
  Doubt doubt = nullptr;                           // marks rows that must be folded again, and says if there are any
  Fold careful = nullptr;  // folds the rows marked in parameters[kAgain], leaves the others alone
  Merge merge = nullptr;
  Finish finish = nullptr;
  Map map_rows = nullptr, map_lanes = nullptr;
  int states = 0;
  double start[kRowNumbers] = {};                  // states of a row without values
  bool memo = false;                               // fold leaves a memo
  bool map_reads = true;                           // map needs the inputs (the mask it always gets) beside the memo
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

  Shape shape_, thin_;  // thin: the dim of size 1
  ReducedDims dims_;
  int dim_;
  Order order_, kept_;
  bool lanes_, turned_ = false;  // turned: contiguous rows, brought side by side in the cache
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

// x = (x * scale) * ratio is x / divisor for every divisor, tiny and huge ones too: scale is a power of two that brings
// the divisor near 1, and ratio the inverse of what it becomes.
template <class C>
inline void split_divisor(double divisor, C& scale, C& ratio) {
  constexpr int64_t most = sizeof(C) == 4 ? 126 : 1022;
  const int64_t exponent = static_cast<int64_t>(bit_cast<uint64_t>(divisor) >> 52 & 0x7FF) - 1023;
  const int64_t power = std::min(most, std::max(-most, -exponent));
  const double two = bit_cast<double>(static_cast<uint64_t>(power + 1023) << 52);
  scale = static_cast<C>(two);
  ratio = static_cast<C>(1.0 / (divisor * two));
}

}  // namespace safeops::cpu
