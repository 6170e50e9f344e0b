// A tape lists what a launcher computed from the sizes of a call, step by step (kernels/engine/trace.py). Running it on
// other sizes gives what the launcher would compute, as long as all comparisons have the same outcome.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "launch/key.h"

namespace safeops::launch {

// a and b are indices of values: first the call's sizes, then the results of the steps. For kConstant, a is the value.
struct Step {
  enum Code : int64_t { kConstant, kAdd, kSubtract, kMultiply, kDivide, kRemainder, kEqual, kUnequal, kLess, kAtMost };
  int64_t code, a, b;
};

struct Tape {
  size_t sizes;
  std::vector<Step> steps;
  Words results;  // indices of the values that the launch needs

  // Tapes come from Python: every index must stay inside the values.
  bool sound() const {
    const auto within = [](int64_t place, size_t end) { return place >= 0 && static_cast<size_t>(place) < end; };
    for (size_t i = 0; i < steps.size(); ++i) {
      const auto& [code, a, b] = steps[i];
      if (!within(code, Step::kAtMost + 1)) return false;
      if (code != Step::kConstant && !(within(a, sizes + i) && within(b, sizes + i))) return false;
    }
    return std::all_of(results.begin(), results.end(), [&](int64_t at) { return within(at, sizes + steps.size()); });
  }

  // Computes the values for these sizes. Returns false if a comparison has another outcome, or a number overflows.
  bool run(const Words& call_sizes, Words& values) const {
    if (call_sizes.size() != sizes) return false;
    values.resize(sizes + steps.size());
    std::copy(call_sizes.begin(), call_sizes.end(), values.begin());
    int64_t* out = values.data() + sizes;
    for (const auto& [code, x, y] : steps) {
      const int64_t a = code == Step::kConstant ? x : values[x], b = code == Step::kConstant ? 0 : values[y];
      bool fits = true;
      switch (code) {
        case Step::kConstant: *out = a; break;
        case Step::kAdd: fits = !__builtin_add_overflow(a, b, out); break;
        case Step::kSubtract: fits = !__builtin_sub_overflow(a, b, out); break;
        case Step::kMultiply: fits = !__builtin_mul_overflow(a, b, out); break;
        case Step::kDivide:  // rounded down, as Python does
          fits = b > 0;
          if (fits) *out = a / b - (a % b < 0);
          break;
        case Step::kRemainder:
          fits = b > 0;
          if (fits) *out = a % b + (a % b < 0 ? b : 0);
          break;
        case Step::kEqual: fits = a == b; break;
        case Step::kUnequal: fits = a != b; break;
        case Step::kLess: fits = a < b; break;
        case Step::kAtMost: fits = a <= b; break;
      }
      if (!fits) return false;
      ++out;
    }
    return true;
  }
};

}  // namespace safeops::launch
