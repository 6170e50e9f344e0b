// The strided, broadcasting elementwise loop of all ops. It hands chunks of contiguous inputs to an op's inner loop,
// which writes chunks of outputs.
#pragma once

#include "cpu/engine/operand.h"

namespace safeops::cpu {

constexpr int kMaxInputs = 5;
constexpr int kMaxOutputs = 3;

// The operands of one call of an inner loop: n <= kChunk contiguous values of each. keep: kChunk bytes that the inner
// loop may write.
template <class C>
struct Chunk {
  int64_t n;
  const C* in[kMaxInputs];
  const uint8_t* mask;
  C* out[kMaxOutputs];
  uint8_t* keep;
};

// The derivatives of a function with respect to its two or three operands.
template <class C>
struct Slopes { C first, second, third = 0; };

// An inner loop. `op` points to the functor's data (thresholds, fill values), whose type the loop knows.
template <class C>
using Loop = void (*)(const void* op, const Chunk<C>& chunk);

// A run of n contiguous elements in their stored dtypes; n may exceed kChunk. A loop that computes little reads it in
// place of a Chunk: copying the elements to a Chunk's buffers would take longer than the memory traffic.
struct Stored {
  int64_t n;
  const void* in[kMaxInputs];
  const uint8_t* mask;

  template <class S>
  const S* input(int i) const {
    return static_cast<const S*>(in[i]);
  }
};

template <class C>
using StoredLoop = void (*)(const void* op, const Stored& run, C* const* out);

// The inputs and the mask of a loop, for elementwise loops and reductions.
template <class C>
struct Inputs {
  int count = 0;
  bool masked = false;
  Source<C> source[kMaxInputs];
  Source<uint8_t> mask;

  void add(const View& view, const Shape& shape, const Order& order) { source[count++].bind(view, shape, order); }
  void add_mask(const View& view, const Shape& shape, const Order& order) {
    mask.bind(view, shape, order);
    masked = true;
  }

  // Elements per chunk of a reduction: as many as fit the L1 cache together with all operands' buffers, so that fixed
  // costs count little. Several operands that are read in place are prefetched, which needs short chunks (2 kFine).
  // One operand alone is faster in long chunks.
  int64_t step() const {
    if (count >= 2) return direct() ? 2 * kFine : kChunk / 2;
    return sizeof(C) <= 4 ? kChunk : kChunk / 2;
  }

  // Elements of a row that are added up before their sum is added to a double. Unlike step(), unit() does not depend on
  // the operands' dtypes and layouts, so the bits of the result do not either.
  int64_t unit() const { return count >= 2 || sizeof(C) > 4 ? 2 * kFine : kChunk; }

  // True if all operands are read in place, none through a buffer.
  bool direct() const {
    bool all = !masked || mask.direct();
    for (int i = 0; i < count; ++i) all &= source[i].direct();
    return all;
  }

  // Sets `run` to elements [start, start + n) of inputs first, first + 1, ... in their stored dtypes. Returns false if
  // an input or the mask is not contiguous.
  bool stored(int64_t start, int64_t n, Stored& run, int first = 0) const {
    run.n = n;
    if (masked && mask.kind != Kind::kDirect) return false;
    run.mask = masked ? reinterpret_cast<const uint8_t*>(mask.data) + start : nullptr;
    for (int i = first; i < count; ++i) {
      if (source[i].kind > Kind::kConvert) return false;
      run.in[i - first] = source[i].data + start * source[i].element;
    }
    for (int i = count - first; i < kMaxInputs; ++i) run.in[i] = run.in[0];  // a loop may name an input it never reads
    return true;
  }

  // The buffers of one thread.
  struct Buffers {
    alignas(64) C values[kMaxInputs][kBuffer];
    alignas(64) uint8_t mask[kBuffer];
  };

  void prime(Buffers& buffers) const {
    for (int i = 0; i < count; ++i) source[i].prime(buffers.values[i]);
    if (masked) mask.prime(buffers.mask);
  }

  void fetch(int64_t start, int64_t n, int64_t ahead, Buffers& buffers, Chunk<C>& chunk) const {
    chunk.n = n;
    for (int i = 0; i < count; ++i) chunk.in[i] = source[i].fetch(start, n, ahead, buffers.values[i]);
    for (int i = count; i < kMaxInputs; ++i) chunk.in[i] = chunk.in[0];  // a loop may name an input it never reads
    chunk.mask = masked ? mask.fetch(start, n, ahead, buffers.mask) : nullptr;
  }
};

template <class C>
struct Elementwise {
  Shape shape;
  Order order;
  Inputs<C> inputs;
  int outputs = 0;
  bool wanted[kMaxOutputs] = {};
  Sink<C> sink[kMaxOutputs];

  // Elements are visited in the order of the first output's memory.
  Elementwise(const Shape& shape_, const View& out)
      : shape(shape_),
        order(out.contiguous() ? Order::contiguous(shape) : Order::by_strides(shape, out.strides)) {}

  void input(const View& view) { inputs.add(view, shape, order); }
  void mask(const View& view) { inputs.add_mask(view, shape, order); }

  // wanted_ = false: the loop gets a null pointer for this output.
  void output(const View& view, bool wanted_ = true) {
    if (wanted_) sink[outputs].bind(view, shape, order);
    wanted[outputs++] = wanted_;
  }

  // stored, or null: a loop that computes the same outputs from contiguous inputs in their stored dtypes. Its `Stored`
  // starts at input 1: pass it only if input 0 is a single number, which `op` holds too.
  void run(Loop<C> loop, const void* op, StoredLoop<C> stored = nullptr) const;

 private:
  bool direct() const {
    bool all = inputs.direct();
    for (int i = 0; i < outputs; ++i) all &= !wanted[i] || sink[i].direct();
    return all;
  }
};

// New outputs. output_like has the strides of torch.empty_like(t); new_output is contiguous, on the device of `like`.
// Both ask the system for huge pages if the output is large: page faults of fresh memory would cost more than the loop.
Tensor output_like(const Shape& shape, DType dtype, const Tensor& t, const View& view);
Tensor new_output(const Shape& shape, DType dtype, const Tensor& like);
Tensor on_huge_pages(Tensor out, int64_t bytes);

}  // namespace safeops::cpu
