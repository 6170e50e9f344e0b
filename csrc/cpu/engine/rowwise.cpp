#include "cpu/engine/rowwise.h"

#include <vector>

#include "cpu/engine/rowwise_job.h"

namespace safeops::cpu {

Shape row_shape(const Shape& shape, int64_t dim, bool keepdim) {
  return ReducedDims(shape, &dim, 1).output(shape, keepdim);
}

template <class C>
Rowwise<C>::Rowwise(const Shape& shape, int64_t dim, const View& x)
    : shape_(shape), row_shape_(shape), dims_(shape, &dim, 1), dim_(resolve_dim(dim, shape.ndim)) {
  if (shape_.ndim > 0) {
    length_ = shape_.size[dim_];
    row_shape_.size[dim_] = 1;
  }
  int64_t strides[kMaxDims];
  expand_strides(x.ndim, x.sizes, x.strides, shape_, strides);
  const Order walk = Order::by_strides(shape_, strides);
  int place = 0;
  while (place < walk.ndim && walk.dim[place] != dim_) ++place;
  if (place == walk.ndim) place = 0;  // dim_ has size 1, so the walk leaves it out
  for (int i = 0; i < walk.ndim; ++i) {
    if (walk.dim[i] == dim_) continue;
    row_order_.push(walk.dim[i], walk.size[i]);
    (i < place ? inner_ : outer_) *= walk.size[i];
  }
  transposed_ = inner_ == 1 && length_ < kTransposed;
  interleaved_ = inner_ > 1 || transposed_;
  if (interleaved_ && !transposed_ && (inner_ < kShortestRun || inner_ * length_ < kChunk)) {
    // Few or short rows side by side: walks them as if all rows of the tensor lay side by side.
    order_ = row_order_;
    order_.push(dim_, length_);
    inner_ *= outer_;
    outer_ = 1;
  } else {
    order_ = walk;
  }
}

template <class C>
void Rowwise<C>::row_input(const View& view, bool keepdim) {
  row_input_[row_inputs_++].bind(Unreduced(view, dims_, shape_.ndim, keepdim, "safeops").view, row_shape_, row_order_);
}

template <class C>
void Rowwise<C>::result(const View& view, bool keepdim) {
  result_[results_++].bind(Unreduced(view, dims_, shape_.ndim, keepdim, "safeops").view, row_shape_, row_order_);
}

// ---- The three ways to run a job.

template <class C>
void Rowwise<C>::Job::run_unsliced() const {
  const bool accumulates = loops.accumulate_rows != nullptr;
  parallel(groups(), group_rows * r.length_, [&](int64_t begin, int64_t end) {
    Scratch& s = Scratch::mine();
    prime(s);
    for (int64_t u = begin; u < end; ++u) {
      const RowGroup now = group(u);
      C* memo = loops.memo && fits_tile() ? s.memo : nullptr;
      Piece<C> last;
      prepare(s, now, s.parameters);
      if (accumulates) {
        accumulate_whole(s, now, false, memo, s.parameters, last);
        if (loops.find_lost && loops.find_lost(now.rows, s.states, s.parameters[kRecompute]))
          accumulate_whole(s, now, true, memo, s.parameters, last);
      }
      finish(s, now, s.states, s.parameters);
      map_all(s, now, 0, r.length_, memo, s.parameters, accumulates ? &last : nullptr);
    }
  });
}

// For few, long rows: each row is cut into slices of kSegment values, which the threads share.
template <class C>
void Rowwise<C>::Job::run_sliced() const {
  const bool accumulates = loops.accumulate_rows != nullptr;
  const Cut cuts{0, r.length_, kSegment};
  const int64_t count = groups(), slices = cuts.count(), step = kSegment;
  std::vector<double> state_values(accumulates ? count * slices * loops.states * group_rows : 0);
  std::vector<C> parameter_values(count * kRowParameters * group_rows);
  const auto states = [&](int64_t group, int64_t slice, double** of) {
    for (int i = 0; i < loops.states; ++i)
      of[i] = state_values.data() + ((group * slices + slice) * loops.states + i) * group_rows;
  };
  const auto parameters = [&](int64_t group, C** of) {
    for (int i = 0; i < kRowParameters; ++i)
      of[i] = parameter_values.data() + (group * kRowParameters + i) * group_rows;
  };
  const auto slice = [&](int64_t k) { return at(cuts, k); };
  const auto accumulate_all = [&](bool careful) {
    parallel(count * slices, step * group_rows, [&](int64_t begin, int64_t end) {
      Scratch& s = Scratch::mine();
      prime(s);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t u = task / slices, k = task % slices;
        double* task_states[kRowStats];
        C* row_parameters[kRowParameters];
        states(u, k, task_states);
        parameters(u, row_parameters);
        Piece<C> last;
        accumulate(s, group(u), slice(k), slice(k + 1), careful, nullptr, row_parameters, task_states, last);
      }
    });
    for (int64_t u = 0; u < count; ++u) {  // slices are merged in this order on one thread, so the bits are repeatable
      double *into[kRowStats], *from[kRowStats];
      states(u, 0, into);
      for (int64_t k = 1; k < slices; ++k) {
        states(u, k, from);
        loops.merge(group(u).rows, into, from);
      }
    }
  };
  // Marks the rows whose sums over- or underflowed. In all slices but slice 0, resets the states to those of a row
  // without values: the second pass skips rows that are not marked, and merging must then leave their state, in slice
  // 0, unchanged.
  const auto find_lost = [&] {
    bool any = false;
    for (int64_t u = 0; u < count; ++u) {
      double* of[kRowStats];
      C* row_parameters[kRowParameters];
      states(u, 0, of);
      parameters(u, row_parameters);
      any |= loops.find_lost(group(u).rows, of, row_parameters[kRecompute]);
      for (int64_t k = 1; k < slices; ++k) {
        states(u, k, of);
        for (int i = 0; i < loops.states; ++i) std::fill_n(of[i], group_rows, loops.start[i]);
      }
    }
    return any;
  };

  const auto for_groups = [&](bool accumulated) {
    Scratch& s = Scratch::mine();
    prime(s);
    for (int64_t u = 0; u < count; ++u) {
      double* task_states[kRowStats];
      C* row_parameters[kRowParameters];
      states(u, 0, task_states);
      parameters(u, row_parameters);
      if (accumulated)
        finish(s, group(u), task_states, row_parameters);
      else
        prepare(s, group(u), row_parameters);
    }
  };
  for_groups(false);
  if (accumulates) accumulate_all(false);
  if (accumulates && loops.find_lost && find_lost()) accumulate_all(true);
  for_groups(true);
  parallel(count * slices, step * group_rows, [&](int64_t begin, int64_t end) {
    Scratch& s = Scratch::mine();
    prime(s);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t u = task / slices, k = task % slices;
      C* row_parameters[kRowParameters];
      parameters(u, row_parameters);
      map_all(s, group(u), slice(k), slice(k + 1), nullptr, row_parameters, nullptr);
    }
  });
}

template <class C>
void Rowwise<C>::Job::run_empty() const {
  Scratch& s = Scratch::mine();
  for (int i = 0; i < loops.states; ++i) std::fill_n(s.states[i], kRows, loops.start[i]);
  const int64_t rows = r.row_shape_.numel();
  for (int64_t first = 0; first < rows; first += kRows)
    finish(s, {first, std::min(kRows, rows - first), 0}, s.states, s.parameters);
}

template <class C>
void Rowwise<C>::run(const RowLoops<C>& loops, const void* op) const {
  if (row_shape_.numel() == 0) return;
  const Job job(*this, loops, op);
  if (length_ == 0) return job.run_empty();
  const bool few = job.groups() < kFewGroups && job.group_rows * length_ >= 2 * kGrain && length_ > kSegment;
  few ? job.run_sliced() : job.run_unsliced();
}

template struct Rowwise<float>;
template struct Rowwise<double>;

}  // namespace safeops::cpu
