// The number of kept elements: mask is True and weight is not 0. The input's values are not read, with one exception: a
// bool input without a mask is the mask. I/O: read mask, weight.
#include "cpu/reductions/statistic_worker.h"
#include "cpu/reductions/statistic.h"

namespace safeops::cpu {

namespace {

template <class C>
struct Count {
  static constexpr int64_t kColumns = 4096, kBlock = 252;
  static constexpr bool has_weight = false, has_second = false, has_count = true, scaled = false;
  bool weighted;

  void merge(const States& into, const States& from, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) into.count[i] += from.count[i];
  }

  class Worker : public StatisticWorker<C, Count> {
    using Base = StatisticWorker<C, Count>;
    friend Base;

   public:
    using Base::Base;

   private:
    void reset_row() {}
    void accumulate_row(const Elements<C>&, int64_t, int64_t) {}
    void row_state(const States&) const {}
    void reset_columns() { std::fill_n(value_, this->width_, 0.0); }
    void accumulate_columns(const Elements<C>&, int64_t, int64_t, int64_t) {}
    States column_states() { return {value_, nullptr, nullptr, this->column_counts_}; }

    double value_[kColumns + kPad];
  };
};

// Writes counts (int64) as bit patterns, since there is no Sink for integers.
struct CountOutput {
  Sink<uint64_t> sink;

  template <class C>
  CountOutput(const Reduction<C>& r, const Tensor& to) {
    sink.bind(r.seen(to).view, r.dims.output(r.shape, true), r.output_order);
  }

  void write(int64_t start, int64_t n, const States& states) const {
    uint64_t buffer[kChunk];
    for (int64_t done = 0; done < n; done += kChunk) {
      const int64_t m = std::min(kChunk, n - done);
      uint64_t* to = sink.target(start + done, buffer);
      for (int64_t i = 0; i < m; ++i) to[i] = static_cast<uint64_t>(states.count[done + i]);
      sink.commit(start + done, m, buffer);
    }
  }
};

template <class C>
void count(const Shape& shape, const ReducedDims& dims, const OptionalTensor& mask, const OptionalTensor& weight,
           const Tensor& to) {
  Reduction<C> r(shape, dims, View(mask ? *mask : *weight));
  if (weight) r.input(View(*weight));
  if (mask) r.mask(View(*mask));
  ReductionDriver<C, Count<C>, CountOutput>{r, Count<C>{weight.has_value()}, CountOutput(r, to)}.run();
}

Tensor masked_count(const Tensor& input, const OptionalTensor& mask_argument, const OptionalTensor& weight,
                    const Dims& dim, bool keepdim) {
  const OptionalTensor mask = mask_argument || dtype_of(input) != DType::kBool ? mask_argument : OptionalTensor(input);
  const Shape shape = View(input).shape();
  const ReducedDims dims = reduced_dims(shape, dim);
  const Tensor to = empty(dims.output(shape, keepdim), DType::kLong, input);
  if (!mask && !weight) {
    int64_t all = 1;
    for (int d = 0; d < shape.ndim; ++d) all *= dims.reduced[d] ? shape.size[d] : 1;
    std::fill_n(reinterpret_cast<int64_t*>(View(to).data), dims.output(shape, keepdim).numel(), all);
  } else if (in_double(weight)) {
    count<double>(shape, dims, mask, weight, to);
  } else {
    count<float>(shape, dims, mask, weight, to);
  }
  return to;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(safeops, CPU, m) { m.impl("_masked_count", TORCH_BOX(&masked_count)); }

}  // namespace safeops::cpu
