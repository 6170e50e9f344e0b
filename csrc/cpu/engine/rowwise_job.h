// One call of Rowwise::run, for rowwise.cpp: cuts rows into pieces, loads the pieces, accumulates and maps them.
#pragma once

#include <memory>

#include "cpu/engine/parallel.h"
#include "cpu/engine/transpose.h"
#include "cpu/engine/rowwise.h"

namespace safeops::cpu {

constexpr int64_t kTile = 32768;        // values of a group of rows that stays in the cache until map() reads it
constexpr int64_t kWidth = 256;         // interleaved rows of a group, at most
constexpr int64_t kNarrow = 64;         // interleaved rows of a group, at least, if rows are long
constexpr int64_t kPieceValues = 4096;  // values of a piece of interleaved or several rows: keeps fixed costs low
constexpr int64_t kHeight = kPieceValues / kWidth;  // values per row in a piece of long interleaved rows
constexpr int64_t kSegment = 4096;      // values of a row that are reduced to one state, on one thread or several
constexpr int64_t kRows = std::max(kWidth, kChunk / kShortestRun);
constexpr int64_t kTransposed = 32;     // contiguous rows shorter than this are transposed
constexpr int64_t kFewGroups = 16;      // if groups are fewer than this and rows are long, rows are cut for the threads

// The boundaries that cut [begin, end) into parts of `step`. The last part takes values from the part before it if it
// would be shorter than kShortestRun.
struct Cut {
  int64_t begin, end, step;

  int64_t count() const { return (end - begin + step - 1) / step; }
  int64_t at(int64_t k) const {
    if (k == 0) return begin;
    if (begin + k * step >= end) return end;
    return std::max(begin, std::min(begin + k * step, end - kShortestRun));
  }
};

// Expands mask bytes (height, width), lines `step` apart, to dense words of all ones or 0.
template <class Bits>
void expand_mask_loop(const uint8_t* mask, int64_t height, int64_t width, int64_t step, Bits* keep) {
  for (int64_t i = 0; i < height; ++i, mask += step, keep += width) {
    SAFEOPS_SIMD
    for (int64_t k = 0; k < width; ++k) keep[k] = static_cast<Bits>(-static_cast<Bits>(mask[k] != 0));
  }
}

// The buffers of one thread.
template <class C>
struct Rowwise<C>::Scratch {
  alignas(64) C in[kRowInputs][kPieceValues + 64];
  alignas(64) C out[kRowOutputs][kPieceValues + 64];
  alignas(64) C stage[kPieceValues + 64], read[kPieceValues + 64];
  alignas(64) uint8_t mask[kPieceValues + 64], mask_stage[kPieceValues + 64];
  alignas(64) BitsOf<C> keep[kPieceValues + 64];
  alignas(64) double state[kRowStats][kRows], segment[kRowStats][kRows], extra[kRowStats][kRows];
  alignas(64) double row_input[kRowStats][kChunk];  // kChunk, since prime() fills as many for a constant
  alignas(64) double result[kRowStats][kRows];
  alignas(64) C parameter[kRowParameters][kRows];
  alignas(64) C memo[kTile + kChunk];
  alignas(64) double memo_state[kTile / kShortestRun + kTile / 16 + kRows];

  double *states[kRowStats], *segments[kRowStats], *extras[kRowStats], *results[kRowStats];
  const double* row_inputs[kRowStats];
  C* parameters[kRowParameters];

  Scratch() {
    for (int i = 0; i < kRowStats; ++i)
      states[i] = state[i], segments[i] = segment[i], extras[i] = extra[i], results[i] = result[i];
    for (int i = 0; i < kRowParameters; ++i) parameters[i] = parameter[i];
  }

  static Scratch& mine() {  // kept between calls, since fresh memory would cost page faults at every call
    static thread_local std::unique_ptr<Scratch> scratch;
    if (!scratch) scratch.reset(new Scratch);
    return *scratch;
  }
};

// Rows [first, first + rows) in the walk over rows. base: the index of their first value in the walk over values.
template <class C>
struct Rowwise<C>::RowGroup {
  int64_t first, rows, base;
};

// One call of Rowwise::run.
template <class C>
struct Rowwise<C>::Job {
  const Rowwise& r;
  const RowLoops<C>& loops;
  const void* op;
  decltype(pick<&expand_mask_loop<BitsOf<C>>>()) expand_mask = pick<&expand_mask_loop<BitsOf<C>>>();
  int64_t group_rows;    // rows of a group
  int64_t tiles;         // number of groups; if rows are interleaved in memory, per outer index
  int64_t piece_height;  // values per row in a piece of interleaved rows
  int64_t row_piece = kChunk;  // values in a piece of one row

  Job(const Rowwise& r_, const RowLoops<C>& loops_, const void* op_) : r(r_), loops(loops_), op(op_) {
    const int64_t length = std::max<int64_t>(1, r.length_);
    if (r.transposed_) {
      group_rows = std::min(kWidth, kPieceValues / length);
      tiles = (r.outer_ + group_rows - 1) / group_rows;
      piece_height = length;
    } else if (r.interleaved_) {
      const int64_t fits = std::max(kNarrow, kTile / length / kShortestRun * kShortestRun);
      int64_t most = std::min({kWidth, fits, r.inner_});
      // Short rows: a piece holds as many complete rows as fit, so that no states have to be merged.
      const int64_t complete_rows = kPieceValues / length / kShortestRun * kShortestRun;
      if (complete_rows >= kWidth / 4) most = std::min(most, complete_rows);
      tiles = (r.inner_ + most - 1) / most;
      group_rows = std::min(r.inner_,
                            ((r.inner_ + tiles - 1) / tiles + kShortestRun - 1) / kShortestRun * kShortestRun);
      tiles = (r.inner_ + group_rows - 1) / group_rows;
      piece_height = complete_rows >= kWidth / 4 ? length : kHeight;
    } else {
      bool constant = r.masked_ && r.mask_.kind == Kind::kConstant;  // a constant's buffer holds kChunk values
      for (int i = 0; i < r.inputs_; ++i) constant = constant || r.source_[i].kind == Kind::kConstant;
      if (!constant && r.source_[0].kind == Kind::kConvert) row_piece = loops.converted_piece;
      group_rows = length > kChunk ? 1 : (constant ? kChunk : kPieceValues) / length;  // several if rows are uncut
      tiles = (r.outer_ + group_rows - 1) / group_rows;
      piece_height = 0;
    }
  }

  // True if a group's values stay in the cache, so that a memo (Piece::memo) is kept for map(). This depends on the
  // rows' length and layout, not on their number: a memo changes how rows are rounded.
  bool fits_tile() const { return r.length_ <= (r.interleaved_ && !r.transposed_ ? kTile / kNarrow : kTile); }

  int64_t groups() const { return r.interleaved_ && !r.transposed_ ? r.outer_ * tiles : tiles; }

  RowGroup group(int64_t u) const {
    if (!r.interleaved_ || r.transposed_) {
      const int64_t first = u * group_rows;
      return {first, std::min(group_rows, r.outer_ - first), first * r.length_};
    }
    const int64_t outer = tiles == 1 ? u : u / tiles, column = tiles == 1 ? 0 : u % tiles * group_rows;
    return {outer * r.inner_ + column, std::min(group_rows, r.inner_ - column), outer * r.length_ * r.inner_ + column};
  }

  Cut cut(int64_t begin, int64_t end) const { return {begin, end, r.interleaved_ ? piece_height : row_piece}; }

  // Boundary k of a cut. A piece of interleaved rows may have any height, so its cut needs no minimum.
  int64_t at(const Cut& cut, int64_t k) const {
    return r.interleaved_ ? std::min(cut.end, cut.begin + k * cut.step) : cut.at(k);
  }

  // Returns the values of a piece, in place or in the buffer. Sets `step` to the distance between the piece's lines.
  template <class T>
  const T* fetch(const Source<T>& source, int64_t start, const Piece<C>& piece, T* buffer, T* stage,
                 int64_t& step) const {
    const int64_t count = piece.height * piece.width;
    step = piece.width;
    if (!piece.interleaved) return source.fetch(start, count, kNever, buffer);
    if (source.kind == Kind::kConstant) {
      step = 0;
      return buffer;
    }
    if (r.transposed_) {
      pick<&transpose<T>>()(source.fetch(start, count, start + count, stage), piece.width, piece.height, buffer);
      return buffer;
    }
    if (source.kind == Kind::kDirect) {
      step = r.inner_;
      return reinterpret_cast<const T*>(source.data) + start;
    }
    if (piece.width == r.inner_) return source.fetch(start, count, start + count, buffer);
    // The next piece holds the next rows if these rows are complete in this piece, else the next values of these rows.
    const int64_t prefetch_distance = piece.height == r.length_ ? piece.width : piece.height * r.inner_;
    for (int64_t i = 0; i < piece.height; ++i) {
      const int64_t from = start + i * r.inner_;
      T* to = buffer + i * piece.width;
      const T* values = source.fetch(from, piece.width, from + prefetch_distance, to);
      if (values != to) std::memcpy(to, values, piece.width * sizeof(T));
    }
    return buffer;
  }

  void load(Scratch& s, int64_t start, bool inputs, Piece<C>& piece) const {
    for (int i = 0; i < r.inputs_ && inputs; ++i)
      piece.in[i] = fetch(r.source_[i], start, piece, s.in[i], s.stage, piece.step[i]);
    if (loops.read && inputs) {
      loops.read(op, piece.in[0], piece.height, piece.width, piece.step[0], s.read);
      piece.in[0] = s.read, piece.step[0] = piece.width;
    }
    const Source<C>& first = r.source_[0];
    const bool converted = first.kind == Kind::kConvert;
    piece.ahead = converted ? first.data + (start + piece.height * piece.width) * first.element : first.data;
    piece.ahead_step = converted ? first.element : 0;
    if (!r.masked_) return;
    int64_t step;
    const uint8_t* mask = fetch(r.mask_, start, piece, s.mask, s.mask_stage, step);
    piece.keep = s.keep;
    piece.keep_step = step == 0 ? 0 : piece.width;
    const bool dense = step == piece.width;
    const int64_t height = step == 0 || dense ? 1 : piece.height;
    expand_mask(mask, height, dense ? piece.height * piece.width : piece.width, step, s.keep);
  }

  void map(Scratch& s, int64_t start, Piece<C>& piece, const C* const* parameters) const {
    for (int i = 0; i < r.outputs_; ++i) {
      const bool direct = r.wanted_[i] && r.sink_[i].kind == Kind::kDirect && !r.transposed_;
      piece.out[i] = !r.wanted_[i] ? nullptr : direct ? r.sink_[i].target(start, s.out[i]) : s.out[i];
      piece.out_step[i] = piece.interleaved && direct ? r.inner_ : piece.width;
    }
    (piece.interleaved ? loops.map_columns : loops.map_rows)(op, piece, parameters);
    for (int i = 0; i < r.outputs_; ++i) {
      if (!r.wanted_[i]) continue;
      if (r.transposed_) {
        pick<&transpose<C>>()(s.out[i], piece.height, piece.width, r.sink_[i].target(start, s.stage));
        r.sink_[i].commit(start, piece.height * piece.width, s.stage);
      } else if (!piece.interleaved || piece.width == r.inner_) {
        r.sink_[i].commit(start, piece.height * piece.width, s.out[i], kNever);
      } else if (r.sink_[i].kind != Kind::kDirect) {
        for (int64_t k = 0; k < piece.height; ++k)
          r.sink_[i].commit(start + k * r.inner_, piece.width, s.out[i] + k * piece.width);
      }
    }
  }

  // Returns an unloaded piece: values [from, to) of a group's rows.
  Piece<C> piece(const RowGroup& group, int64_t from, int64_t to) const {
    Piece<C> piece{};
    piece.interleaved = r.interleaved_;
    piece.height = r.interleaved_ ? to - from : group.rows;
    piece.width = r.interleaved_ ? group.rows : to - from;
    piece.first = from;
    return piece;
  }

  int64_t start(const RowGroup& group, int64_t from) const {
    return group.base + from * (r.interleaved_ ? r.inner_ : 1);
  }

  void prepare(Scratch& s, const RowGroup& group, C* const* parameters) const {
    for (int i = 0; i < r.row_inputs_; ++i)
      s.row_inputs[i] = r.row_input_[i].fetch(group.first, group.rows, group.first + kAhead, s.row_input[i]);
    if (loops.prepare) loops.prepare(op, group.rows, s.row_inputs, parameters);
  }

  // Accumulates values [from, to) of a group's rows in `states`, piece by piece. Sets `last` to the last piece, which
  // stays loaded. memo: the memo of the whole rows. before: the number of earlier pieces of these rows. Returns the
  // number of pieces in [from, to).
  int64_t accumulate(Scratch& s, const RowGroup& group, int64_t from, int64_t to, bool careful, C* memo,
                     const C* const* parameters, double* const* states, Piece<C>& last, int64_t before = 0) const {
    const auto fast = r.interleaved_ ? loops.accumulate_columns : loops.accumulate_rows;
    const auto loop = careful ? loops.accumulate_carefully : fast;
    const Cut pieces = cut(from, to);
    for (int64_t k = 0, n = pieces.count(); k < n; ++k) {
      const int64_t begin = at(pieces, k), end = at(pieces, k + 1);
      last = piece(group, begin, end);
      load(s, start(group, begin), true, last);
      last.memo = memo ? memo + begin * (r.interleaved_ ? group.rows : 1) : nullptr;
      double* const* piece_states = k == 0 ? states : s.extras;
      for (int i = 0; i < loops.states && careful && k > 0; ++i)
        std::fill_n(piece_states[i], group.rows, loops.start[i]);
      loop(op, last, parameters, piece_states);
      if (memo) std::copy_n(piece_states[0], group.rows, s.memo_state + (before + k) * group.rows);
      if (k > 0) loops.merge(group.rows, states, piece_states);
    }
    return pieces.count();
  }

  // Accumulates whole rows, segment by segment, in the order of run_sliced(), so that both give equal bits.
  void accumulate_whole(Scratch& s, const RowGroup& group, bool careful, C* memo, const C* const* parameters,
                        Piece<C>& last) const {
    const Cut segments{0, r.length_, kSegment};
    int64_t pieces = 0;
    for (int64_t k = 0, n = segments.count(); k < n; ++k) {
      double* const* states = k == 0 ? s.states : s.segments;
      for (int i = 0; i < loops.states && careful && k > 0; ++i)
        std::fill_n(states[i], group.rows, loops.start[i]);
      pieces += accumulate(s, group, at(segments, k), at(segments, k + 1), careful, memo, parameters, states, last,
                           pieces);
      if (k > 0) loops.merge(group.rows, s.states, states);
    }
  }

  void finish(Scratch& s, const RowGroup& group, double* const* states, C* const* parameters) const {
    double* results[kRowStats];
    for (int i = 0; i < r.results_; ++i) results[i] = r.result_[i].target(group.first, s.result[i]);
    if (loops.finish) loops.finish(op, group.rows, states, results, parameters);
    for (int i = 0; i < r.results_; ++i) r.result_[i].commit(group.first, group.rows, s.result[i]);
  }

  // Computes outputs [from, to) of a group's rows. last: null, or the piece that accumulate() left loaded; if [from,
  // to) is one piece, it is mapped without loading it again.
  void map_all(Scratch& s, const RowGroup& group, int64_t from, int64_t to, C* memo, const C* const* parameters,
               Piece<C>* last) const {
    if (r.outputs_ == 0) return;
    const Cut pieces = cut(from, to);
    for (int64_t k = 0, n = pieces.count(); k < n; ++k) {
      const int64_t begin = at(pieces, k), end = at(pieces, k + 1);
      Piece<C> now = last && n == 1 ? *last : piece(group, begin, end);
      if (!last || n > 1) load(s, start(group, begin), loops.map_reads || !memo, now);
      now.memo = memo ? memo + (begin - from) * (r.interleaved_ ? group.rows : 1) : nullptr;
      now.memo_state = s.memo_state + k * group.rows;
      map(s, start(group, begin), now, parameters);
    }
  }

  void prime(Scratch& s) const {
    for (int i = 0; i < r.inputs_; ++i) r.source_[i].prime(s.in[i]);
    if (r.masked_) r.mask_.prime(s.mask);
    for (int i = 0; i < r.row_inputs_; ++i) r.row_input_[i].prime(s.row_input[i]);
  }

  void run_unsliced() const;
  void run_sliced() const;
  void run_empty() const;
};

}  // namespace safeops::cpu
