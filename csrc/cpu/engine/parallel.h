// Runs loops on torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace safeops::cpu {

constexpr int64_t kGrain = 32768;  // elements; for fewer, a second thread costs more than it saves

// Calls body(begin, end) for ranges that cover the tasks [0, count), on several threads. elements: elements per task,
// roughly. If all tasks together have at most about `little` elements, this thread runs them alone.
template <class Body>
void parallel(int64_t count, int64_t elements, const Body& body, int64_t little = kGrain) {
  const int64_t grain = std::max<int64_t>(1, little / std::max<int64_t>(1, elements));
  if (count <= grain)
    body(int64_t{0}, count);
  else
    torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace safeops::cpu
