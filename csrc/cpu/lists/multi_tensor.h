// The loop over a list of floating tensors of any dtypes, sizes and layouts. Tensors are cut into pieces of at most
// kPiece elements, which all threads share. A piece is walked in the order of its tensor's memory.
//
// The pieces' results are stored by the number of the piece and merged in that order, so that their bits do not depend
// on the number of threads.
#pragma once

#include <vector>

#include "cpu/engine/operand.h"
#include "cpu/engine/parallel.h"

namespace safeops::cpu {

constexpr int64_t kPiece = 32768;  // elements

struct Member {
  View view;
  Shape shape;
  Order order;
  Walk elements;         // element i in memory order has index offset(i) in contiguous order
  int64_t numel, first;  // first: the number of the tensor's first piece

  Member(const Tensor& t, int64_t first_piece);

  bool row_by_row() const { return elements.ndim <= 1; }
};

class TensorList {
 public:
  TensorList(const std::vector<Tensor>& tensors, const char* op);

  int64_t pieces() const { return pieces_; }
  const std::vector<Member>& members() const { return members_; }

  // Calls body(member, number of the piece, start, stop) for each piece, which is elements [start, stop) of the
  // member's walk. Lists of about `little` elements or fewer take one thread.
  template <class Body>
  void each_piece(const Body& body, int64_t little = kGrain) const {
    if (pieces_ == 0) return;
    const auto run_pieces = [&](int64_t begin, int64_t end) {
      size_t m = member_of(begin);
      for (int64_t piece = begin; piece < end; ++piece) {
        while (piece >= members_[m].first + pieces_of(members_[m])) ++m;
        const int64_t start = (piece - members_[m].first) * kPiece;
        body(members_[m], piece, start, std::min(start + kPiece, members_[m].numel));
      }
    };
    parallel(pieces_, std::max<int64_t>(1, elements_ / pieces_), run_pieces, little);
  }

 private:
  static int64_t pieces_of(const Member& member) { return (member.numel + kPiece - 1) / kPiece; }
  size_t member_of(int64_t piece) const;

  std::vector<Member> members_;
  int64_t pieces_ = 0, elements_ = 0;
};

// Calls body(values, start, n) for each chunk [start, start + n) of a piece, read as values of type C.
template <class C, class Body>
void each_chunk(const Member& member, int64_t start, int64_t stop, const Body& body) {
  Source<C> source;
  source.bind(member.view, member.shape, member.order);
  alignas(64) C buffer[kBuffer];
  source.prime(buffer);
  for (int64_t at = start; at < stop; at += kChunk) {
    const int64_t n = std::min(kChunk, stop - at);
    body(source.fetch(at, n, at + kAhead, buffer), at, n);
  }
}

}  // namespace safeops::cpu
