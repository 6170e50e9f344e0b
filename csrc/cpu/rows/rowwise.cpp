#include "cpu/rows/rowwise.h"

#include <memory>
#include <vector>

#include "cpu/engine/parallel.h"
#include "cpu/engine/transpose.h"

namespace safeops::cpu {

namespace {

constexpr int64_t kTile = 32768;    // values of rows that are kept for a second look
constexpr int64_t kWidth = 256;     // rows side by side at most
constexpr int64_t kPiece = 4096;    // values in a piece of lanes, or of whole rows: more spread its fixed costs
constexpr int64_t kMostLines = 64;  // additions to a lane before it becomes double
constexpr int64_t kRows = std::max(kWidth, kChunk / kShortest);
constexpr int64_t kTurned = 32;     // rows shorter than this are turned
constexpr int64_t kSlices = 32;     // pieces of work that few long rows are cut into

// Boundaries of [begin, end) cut every `step`, the last part not shorter than kShortest.
struct Cut {
  int64_t begin, end, step;

  int64_t count() const { return (end - begin + step - 1) / step; }
  int64_t at(int64_t k) const {
    if (k == 0) return begin;
    if (begin + k * step >= end) return end;
    return std::max(begin, std::min(begin + k * step, end - kShortest));
  }
};

}  // namespace

Shape row_shape(const Shape& shape, int64_t dim, bool keepdim) {
  return ReducedDims(shape, &dim, 1).output(shape, keepdim);
}

template <class C>
Rowwise<C>::Rowwise(const Shape& shape, int64_t dim, const View& x)
    : shape_(shape), thin_(shape), dims_(shape, &dim, 1), dim_(resolve_dim(dim, shape.ndim)) {
  if (shape_.ndim > 0) {
    length_ = shape_.size[dim_];
    thin_.size[dim_] = 1;
  }
  int64_t strides[kMaxDims];
  expand_strides(x.ndim, x.sizes, x.strides, shape_, strides);
  const Order walk = Order::by_strides(shape_, strides);
  int place = 0;
  while (place < walk.ndim && walk.dim[place] != dim_) ++place;
  if (place == walk.ndim) place = 0;  // of size 1
  for (int i = 0; i < walk.ndim; ++i) {
    if (walk.dim[i] == dim_) continue;
    kept_.push(walk.dim[i], walk.size[i]);
    (i < place ? inner_ : outer_) *= walk.size[i];
  }
  turned_ = inner_ == 1 && length_ < kTurned;
  lanes_ = inner_ > 1 || turned_;
  if (lanes_ && !turned_ && (inner_ < kShortest || inner_ * length_ < kChunk)) {
    // Read as if all rows lay side by side.
    order_ = kept_;
    order_.push(dim_, length_);
    inner_ *= outer_;
    outer_ = 1;
  } else {
    order_ = walk;
  }
}

template <class C>
void Rowwise<C>::given(const View& view, bool keepdim) {
  given_[givens_++].bind(Unreduced(view, dims_, shape_.ndim, keepdim, "safeops").view, thin_, kept_);
}

template <class C>
void Rowwise<C>::result(const View& view, bool keepdim) {
  result_[results_++].bind(Unreduced(view, dims_, shape_.ndim, keepdim, "safeops").view, thin_, kept_);
}

namespace {

// Bytes, lines `step` apart -> words of all ones or zero, without gaps.
template <class Bits>
void spread_loop(const uint8_t* mask, int64_t lines, int64_t side, int64_t step, Bits* keep) {
  for (int64_t i = 0; i < lines; ++i, mask += step, keep += side) {
    SAFEOPS_SIMD
    for (int64_t k = 0; k < side; ++k) keep[k] = static_cast<Bits>(-static_cast<Bits>(mask[k] != 0));
  }
}

}  // namespace

// One thread's buffers.
template <class C>
struct Rowwise<C>::Scratch {
  alignas(64) C in[kRowInputs][kPiece + 64];
  alignas(64) C out[kRowOutputs][kPiece + 64];
  alignas(64) C stage[kPiece + 64];
  alignas(64) uint8_t mask[kPiece + 64], mask_stage[kPiece + 64];
  alignas(64) BitsOf<C> keep[kPiece + 64];
  alignas(64) double state[kRowNumbers][kRows], extra[kRowNumbers][kRows];
  alignas(64) double given[kRowNumbers][kChunk];  // (a constant fills that many)
  alignas(64) double result[kRowNumbers][kRows];
  alignas(64) C parameter[kRowParameters][kRows];
  alignas(64) C memo[kTile + kChunk];
  alignas(64) double key[kTile / kShortest + kTile / 16 + kRows];

  double *states[kRowNumbers], *extras[kRowNumbers], *results[kRowNumbers];
  const double* givens[kRowNumbers];
  C* parameters[kRowParameters];

  Scratch() {
    for (int i = 0; i < kRowNumbers; ++i) states[i] = state[i], extras[i] = extra[i], results[i] = result[i];
    for (int i = 0; i < kRowParameters; ++i) parameters[i] = parameter[i];
  }

  static Scratch& mine() {  // kept: fresh memory would cost its page faults at every call
    static thread_local std::unique_ptr<Scratch> scratch;
    if (!scratch) scratch.reset(new Scratch);
    return *scratch;
  }
};

// Some rows of the kept walk, and where their first values are.
template <class C>
struct Rowwise<C>::Unit {
  int64_t first, rows, base;
};

// One run of an op.
template <class C>
struct Rowwise<C>::Job {
  const Rowwise& r;
  const RowLoops<C>& loops;
  const void* op;
  decltype(pick<&spread_loop<BitsOf<C>>>()) spread = pick<&spread_loop<BitsOf<C>>>();
  int64_t width, tiles, lines;  // rows of a unit, units of an outer index (lanes), lines of a piece (lanes)

  Job(const Rowwise& r_, const RowLoops<C>& loops_, const void* op_) : r(r_), loops(loops_), op(op_) {
    const int64_t length = std::max<int64_t>(1, r.length_);
    if (r.turned_) {
      width = std::min(kWidth, kPiece / length);
      tiles = (r.outer_ + width - 1) / width;
      lines = length;
    } else if (r.lanes_) {
      const int64_t fits = std::max<int64_t>(64, kTile / length / kShortest * kShortest);
      const int64_t most = std::min({kWidth, fits, r.inner_});
      tiles = (r.inner_ + most - 1) / most;
      width = std::min(r.inner_, ((r.inner_ + tiles - 1) / tiles + kShortest - 1) / kShortest * kShortest);
      tiles = (r.inner_ + width - 1) / width;
      lines = std::min(kPiece / width, kMostLines);
    } else {
      bool constant = r.masked_ && r.mask_.kind == Kind::kConstant;  // of which a buffer holds kChunk
      for (int i = 0; i < r.inputs_; ++i) constant = constant || r.source_[i].kind == Kind::kConstant;
      width = length > kChunk ? 1 : (constant ? kChunk : kPiece) / length;  // several only of whole rows
      tiles = (r.outer_ + width - 1) / width;
      lines = 0;
    }
  }

  int64_t units() const { return r.lanes_ && !r.turned_ ? r.outer_ * tiles : tiles; }

  Unit unit(int64_t u) const {
    if (!r.lanes_ || r.turned_) return {u * width, std::min(width, r.outer_ - u * width), u * width * r.length_};
    const int64_t outer = tiles == 1 ? u : u / tiles, column = tiles == 1 ? 0 : u % tiles * width;
    return {outer * r.inner_ + column, std::min(width, r.inner_ - column), outer * r.length_ * r.inner_ + column};
  }

  Cut cut(int64_t begin, int64_t end) const { return {begin, end, r.lanes_ ? lines : kChunk}; }

  // In lanes the last piece may have few lines.
  int64_t at(const Cut& cut, int64_t k) const {
    return r.lanes_ ? std::min(cut.end, cut.begin + k * cut.step) : cut.at(k);
  }

  // Lines of a piece, in place or in the buffer.
  template <class T>
  const T* fetch(const Source<T>& source, int64_t start, const Piece<C>& piece, T* buffer, T* stage,
                 int64_t& step) const {
    const int64_t all = piece.lines * piece.side;
    step = piece.side;
    if (!piece.lanes) return source.fetch(start, all, start + kAhead, buffer);
    if (source.kind == Kind::kConstant) {
      step = 0;
      return buffer;
    }
    if (r.turned_) {
      pick<&turn<T>>()(source.fetch(start, all, start + all, stage), piece.side, piece.lines, buffer);
      return buffer;
    }
    if (source.kind == Kind::kDirect) {
      step = r.inner_;
      return reinterpret_cast<const T*>(source.data) + start;
    }
    if (piece.side == r.inner_) return source.fetch(start, all, start + all, buffer);
    for (int64_t i = 0; i < piece.lines; ++i) {
      const int64_t from = start + i * r.inner_;
      T* to = buffer + i * piece.side;
      const T* found = source.fetch(from, piece.side, from + piece.lines * r.inner_, to);
      if (found != to) std::memcpy(to, found, piece.side * sizeof(T));
    }
    return buffer;
  }

  void load(Scratch& s, int64_t start, bool inputs, Piece<C>& piece) const {
    for (int i = 0; i < r.inputs_ && inputs; ++i)
      piece.in[i] = fetch(r.source_[i], start, piece, s.in[i], s.stage, piece.step[i]);
    if (!r.masked_) return;
    int64_t step;
    const uint8_t* mask = fetch(r.mask_, start, piece, s.mask, s.mask_stage, step);
    piece.keep = s.keep;
    piece.keep_step = step == 0 ? 0 : piece.side;
    const bool dense = step == piece.side;
    spread(mask, step == 0 || dense ? 1 : piece.lines, dense ? piece.lines * piece.side : piece.side, step, s.keep);
  }

  void map(Scratch& s, int64_t start, Piece<C>& piece, const C* const* parameters) const {
    for (int i = 0; i < r.outputs_; ++i) {
      const bool direct = r.wanted_[i] && r.sink_[i].kind == Kind::kDirect && !r.turned_;
      piece.out[i] = !r.wanted_[i] ? nullptr : direct ? r.sink_[i].target(start, s.out[i]) : s.out[i];
      piece.out_step[i] = piece.lanes && direct ? r.inner_ : piece.side;
    }
    (piece.lanes ? loops.map_lanes : loops.map_rows)(op, piece, parameters);
    for (int i = 0; i < r.outputs_; ++i) {
      if (!r.wanted_[i]) continue;
      if (r.turned_) {
        pick<&turn<C>>()(s.out[i], piece.lines, piece.side, r.sink_[i].target(start, s.stage));
        r.sink_[i].commit(start, piece.lines * piece.side, s.stage);
      } else if (!piece.lanes || piece.side == r.inner_) {
        r.sink_[i].commit(start, piece.lines * piece.side, s.out[i]);
      } else if (r.sink_[i].kind != Kind::kDirect) {
        for (int64_t k = 0; k < piece.lines; ++k)
          r.sink_[i].commit(start + k * r.inner_, piece.side, s.out[i] + k * piece.side);
      }
    }
  }

  // A piece of values [from, to) of a unit's rows.
  Piece<C> piece(const Unit& unit, int64_t from, int64_t to) const {
    Piece<C> piece{};
    piece.lanes = r.lanes_;
    piece.lines = r.lanes_ ? to - from : unit.rows;
    piece.side = r.lanes_ ? unit.rows : to - from;
    return piece;
  }

  int64_t start(const Unit& unit, int64_t from) const { return unit.base + from * (r.lanes_ ? r.inner_ : 1); }

  void prepare(Scratch& s, const Unit& unit, C* const* parameters) const {
    for (int i = 0; i < r.givens_; ++i)
      s.givens[i] = r.given_[i].fetch(unit.first, unit.rows, unit.first + kAhead, s.given[i]);
    if (loops.prepare) loops.prepare(op, unit.rows, s.givens, parameters);
  }

  // Values [from, to) of a unit's rows -> states. Leaves the last piece loaded.
  void fold(Scratch& s, const Unit& unit, int64_t from, int64_t to, bool careful, C* memo, const C* const* parameters,
            double* const* states, Piece<C>& last) const {
    const auto loop = careful ? loops.careful : r.lanes_ ? loops.fold_lanes : loops.fold_rows;
    const Cut pieces = cut(from, to);
    for (int64_t k = 0, n = pieces.count(); k < n; ++k) {
      const int64_t begin = at(pieces, k), end = at(pieces, k + 1);
      last = piece(unit, begin, end);
      load(s, start(unit, begin), true, last);
      last.memo = memo ? memo + (begin - from) * (r.lanes_ ? unit.rows : 1) : nullptr;
      double* const* own = k == 0 ? states : s.extras;
      for (int i = 0; i < loops.states && careful && k > 0; ++i) std::fill_n(own[i], unit.rows, loops.start[i]);
      loop(op, last, parameters, own);
      if (memo) std::copy_n(own[0], unit.rows, s.key + k * unit.rows);
      if (k > 0) loops.merge(unit.rows, states, own);
    }
  }

  void finish(Scratch& s, const Unit& unit, double* const* states, C* const* parameters) const {
    double* results[kRowNumbers];
    for (int i = 0; i < r.results_; ++i) results[i] = r.result_[i].target(unit.first, s.result[i]);
    if (loops.finish) loops.finish(op, unit.rows, states, results, parameters);
    for (int i = 0; i < r.results_; ++i) r.result_[i].commit(unit.first, unit.rows, s.result[i]);
  }

  // Outputs [from, to) of a unit's rows; `last` is the one piece that is loaded already, or null.
  void map_all(Scratch& s, const Unit& unit, int64_t from, int64_t to, C* memo, const C* const* parameters,
               Piece<C>* last) const {
    if (r.outputs_ == 0) return;
    const Cut pieces = cut(from, to);
    for (int64_t k = 0, n = pieces.count(); k < n; ++k) {
      const int64_t begin = at(pieces, k), end = at(pieces, k + 1);
      Piece<C> now = last && n == 1 ? *last : piece(unit, begin, end);
      if (!last || n > 1) load(s, start(unit, begin), loops.map_reads || !memo, now);
      now.memo = memo ? memo + (begin - from) * (r.lanes_ ? unit.rows : 1) : nullptr;
      now.key = s.key + k * unit.rows;
      map(s, start(unit, begin), now, parameters);
    }
  }

  void prime(Scratch& s) const {
    for (int i = 0; i < r.inputs_; ++i) r.source_[i].prime(s.in[i]);
    if (r.masked_) r.mask_.prime(s.mask);
    for (int i = 0; i < r.givens_; ++i) r.given_[i].prime(s.given[i]);
  }

  void run_whole() const {
    const bool folds = loops.fold_rows != nullptr;
    parallel(units(), width * r.length_, [&](int64_t begin, int64_t end) {
      Scratch& s = Scratch::mine();
      prime(s);
      for (int64_t u = begin; u < end; ++u) {
        const Unit now = unit(u);
        C* memo = loops.memo && now.rows * r.length_ <= kTile ? s.memo : nullptr;
        Piece<C> last;
        prepare(s, now, s.parameters);
        if (folds) {
          fold(s, now, 0, r.length_, false, memo, s.parameters, s.states, last);
          if (loops.doubt && loops.doubt(now.rows, s.states, s.parameters[kAgain]))
            fold(s, now, 0, r.length_, true, memo, s.parameters, s.states, last);
        }
        finish(s, now, s.states, s.parameters);
        map_all(s, now, 0, r.length_, memo, s.parameters, folds ? &last : nullptr);
      }
    });
  }

  // Few long rows: each is cut into slices that threads share.
  void run_sliced(int64_t slices, int64_t step) const {
    const int64_t count = units();
    const bool folds = loops.fold_rows != nullptr;
    const Cut cuts{0, r.length_, step};
    std::vector<double> numbers(folds ? count * slices * loops.states * width : 0);
    std::vector<C> all(count * kRowParameters * width);
    const auto states = [&](int64_t unit, int64_t slice, double** of) {
      for (int i = 0; i < loops.states; ++i)
        of[i] = numbers.data() + ((unit * slices + slice) * loops.states + i) * width;
    };
    const auto parameters = [&](int64_t unit, C** of) {
      for (int i = 0; i < kRowParameters; ++i) of[i] = all.data() + (unit * kRowParameters + i) * width;
    };
    const auto slice = [&](int64_t k) { return at(cuts, k); };
    const auto fold_all = [&](bool careful) {
      parallel(count * slices, step * width, [&](int64_t begin, int64_t end) {
        Scratch& s = Scratch::mine();
        prime(s);
        for (int64_t task = begin; task < end; ++task) {
          const int64_t u = task / slices, k = task % slices;
          double* own[kRowNumbers];
          C* given[kRowParameters];
          states(u, k, own);
          parameters(u, given);
          Piece<C> last;
          fold(s, unit(u), slice(k), slice(k + 1), careful, nullptr, given, own, last);
        }
      });
      bool doubted = false;
      for (int64_t u = 0; u < count; ++u) {  // always in this order
        double *into[kRowNumbers], *from[kRowNumbers];
        states(u, 0, into);
        for (int64_t k = 1; k < slices; ++k) {
          states(u, k, from);
          loops.merge(unit(u).rows, into, from);
        }
        C* given[kRowParameters];
        parameters(u, given);
        doubted = doubted || (loops.doubt && loops.doubt(unit(u).rows, into, given[kAgain]));
      }
      return doubted;
    };

    const auto of_rows = [&](bool after) {
      Scratch& s = Scratch::mine();
      prime(s);
      for (int64_t u = 0; u < count; ++u) {
        double* own[kRowNumbers];
        C* given[kRowParameters];
        states(u, 0, own);
        parameters(u, given);
        if (after)
          finish(s, unit(u), own, given);
        else
          prepare(s, unit(u), given);
      }
    };
    of_rows(false);
    if (folds && fold_all(false)) {  // all of them: the sums are merged already
      for (int64_t u = 0; u < count; ++u) {
        C* given[kRowParameters];
        parameters(u, given);
        std::fill_n(given[kAgain], width, C(1));
      }
      fold_all(true);
    }
    of_rows(true);
    parallel(count * slices, step * width, [&](int64_t begin, int64_t end) {
      Scratch& s = Scratch::mine();
      prime(s);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t u = task / slices, k = task % slices;
        C* given[kRowParameters];
        parameters(u, given);
        map_all(s, unit(u), slice(k), slice(k + 1), nullptr, given, nullptr);
      }
    });
  }

  void run_empty() const {
    Scratch& s = Scratch::mine();
    for (int i = 0; i < loops.states; ++i) std::fill_n(s.states[i], kRows, loops.start[i]);
    const int64_t rows = r.thin_.numel();
    for (int64_t first = 0; first < rows; first += kRows)
      finish(s, {first, std::min(kRows, rows - first), 0}, s.states, s.parameters);
  }
};

template <class C>
void Rowwise<C>::run(const RowLoops<C>& loops, const void* op) const {
  if (thin_.numel() == 0) return;
  const Job job(*this, loops, op);
  if (length_ == 0) return job.run_empty();
  const int64_t units = job.units(), each = job.width * length_;
  const int64_t slices = std::min(each / kGrain, (kSlices + units - 1) / units);
  if (units >= kSlices / 2 || slices < 2) return job.run_whole();
  const int64_t unit = lanes_ ? job.lines : kChunk;
  const int64_t step = (length_ + slices * unit - 1) / (slices * unit) * unit;
  job.run_sliced((length_ + step - 1) / step, step);
}

template struct Rowwise<float>;
template struct Rowwise<double>;

}  // namespace safeops::cpu
