#include "cpu/lists/multi_tensor.h"

namespace safeops::cpu {

Member::Member(const Tensor& t, int64_t first_piece)
    : view(t), shape(view.shape()), order(Order::by_strides(shape, view.strides)), numel(shape.numel()),
      first(first_piece) {
  int64_t steps[kMaxDims];
  contiguous_strides(shape, steps);
  for (int d = 0; d < order.ndim; ++d) elements.push(order.size[d], steps[order.dim[d]]);
}

TensorList::TensorList(const std::vector<Tensor>& tensors, const char* op) {
  members_.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    const Member& member = members_.emplace_back(t, pieces_);
    STD_TORCH_CHECK(member.view.is_floating(), op, ": tensors must be float16, bfloat16, float32 or float64");
    pieces_ += pieces_of(member);
    elements_ += member.numel;
  }
}

size_t TensorList::member_of(int64_t piece) const {
  // Finds the last member whose first piece is not after `piece`. An empty member has the first piece of the next
  // member.
  const auto after = std::upper_bound(members_.begin(), members_.end(), piece,
                                      [](int64_t p, const Member& member) { return p < member.first; });
  return static_cast<size_t>(after - members_.begin()) - 1;
}

}  // namespace safeops::cpu
