// The key of a call holds all that its launch depends on: shapes, strides, dtypes, devices and alignment of the
// tensors, and every number. Reading it leaves the dispatcher's arguments as they are.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace safeops::launch {

using Words = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Words& words) const {
    uint64_t hash = words.size();
    for (int64_t word : words) {  // the product mixes bits upwards, the shift brings them down again
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// Reads a call's arguments. `kinds` has a letter for each argument's type: t tensor, n number, l list of integers; T, N
// and L may also be None.
struct Arguments {
  Words kind;   // counts of arguments, dimensions and list items, dtypes, devices, alignment, numbers
  Words sizes;  // sizes and strides of tensors, integers in lists
  std::vector<uint64_t> addresses;  // of the tensors, in order

  void read(const std::string& kinds, const StableIValue* stack) {
    kind.clear();
    sizes.clear();
    addresses.clear();
    for (size_t i = 0; i < kinds.size(); ++i) {
      StableIValue value = stack[i];
      if (optional(kinds[i])) {
        const auto* pointer = torch::stable::detail::to<StableIValue*>(value);
        kind.push_back(pointer != nullptr);
        if (pointer == nullptr) continue;
        value = *pointer;
      }
      const char type = kinds[i] | 32;  // in lower case
      if (type == 't')
        tensor(torch::stable::detail::to<AtenTensorHandle>(value));
      else if (type == 'l')
        list(torch::stable::detail::to<StableListHandle>(value));
      else
        kind.push_back(static_cast<int64_t>(value));
    }
  }

  static bool optional(char kind) { return kind < 'a'; }

 private:
  void tensor(AtenTensorHandle t) {
    int64_t dims, *shape, *strides;
    int32_t dtype, device;
    const void* data;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t, &dims));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t, &shape));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t, &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t, &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t, &device));
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(t, &data));
    const auto address = reinterpret_cast<uint64_t>(data);
    kind.insert(kind.end(), {dims, dtype, device, static_cast<int64_t>(address % 16)});
    sizes.insert(sizes.end(), shape, shape + dims);
    sizes.insert(sizes.end(), strides, strides + dims);
    addresses.push_back(address);
  }

  void list(StableListHandle items) {
    size_t size;
    TORCH_ERROR_CODE_CHECK(torch_list_size(items, &size));
    kind.push_back(static_cast<int64_t>(size));
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      TORCH_ERROR_CODE_CHECK(torch_list_get_item(items, i, &item));
      sizes.push_back(static_cast<int64_t>(item));
    }
  }
};

// The callee owns its arguments, so it frees them.
inline void release(const std::string& kinds, StableIValue* stack) {
  using torch::stable::detail::to;
  for (size_t i = 0; i < kinds.size(); ++i) switch (kinds[i]) {
      case 't': to<torch::stable::Tensor>(stack[i]); break;
      case 'T': to<std::optional<torch::stable::Tensor>>(stack[i]); break;
      case 'N': to<std::optional<int64_t>>(stack[i]); break;
      case 'l': to<std::vector<int64_t>>(stack[i]); break;
      case 'L': to<std::optional<std::vector<int64_t>>>(stack[i]); break;
      default: break;  // a number owns no memory
    }
}

}  // namespace safeops::launch
