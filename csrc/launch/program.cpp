// Computes, by a tape, the launch for sizes that no earlier call had.
#include <algorithm>
#include <cstdint>

#include "launch/prepared.h"

namespace safeops::launch {

std::shared_ptr<const Prepared> Program::at(const Words& sizes) const {
  thread_local Words values;  // kept, so that the next call reuses its memory
  if (!tape.run(sizes, values)) return nullptr;
  auto prepared = std::make_shared<Prepared>(*first);
  auto next = tape.results.begin();
  for (unsigned& blocks : prepared->launch.grid) {
    const int64_t count = values[*next++];
    if (count < 1 || count > INT32_MAX) return nullptr;
    blocks = static_cast<unsigned>(count);
  }
  int64_t& workspace = prepared->launch.workspace;
  workspace = values[*next++];
  if (workspace < 0 || (workspace == 0) != (first->launch.workspace == 0)) return nullptr;
  size_t rest = tape.results.end() - next;
  for (const Output& out : prepared->outputs) rest -= out.sizes.size() + out.strides.size();
  for (auto word = prepared->launch.words.end() - rest; word != prepared->launch.words.end(); ++word)
    *word = values[*next++];
  for (size_t i = 0; i < prepared->outputs.size(); ++i) {
    Output& out = prepared->outputs[i];
    for (int64_t& size : out.sizes) size = values[*next++];
    for (int64_t& stride : out.strides) stride = values[*next++];
    if (!out.empty() && !prepared->has(Owner::kResult, i)) return nullptr;
  }
  return prepared;
}

bool Program::repeats(const Arguments& call) const {
  const auto& addresses = call.addresses;  // an empty tensor has address 0, which names no owner
  if (!tape.sound() || std::count(addresses.begin(), addresses.end(), 0)) return false;
  size_t least = 4, most = 4 + first->launch.words.size() - first->owners.size();
  for (const Output& out : first->outputs) {
    least += 2 * out.sizes.size();
    most += 2 * out.sizes.size();
  }
  if (tape.results.size() < least || tape.results.size() > most) return false;
  const auto again = at(call.sizes);
  if (!again || again->launch.words != first->launch.words) return false;
  if (again->launch.workspace != first->launch.workspace) return false;
  const auto same = [](const Output& a, const Output& b) { return a.sizes == b.sizes && a.strides == b.strides; };
  return std::equal(again->launch.grid, again->launch.grid + 3, first->launch.grid) &&
         std::equal(again->outputs.begin(), again->outputs.end(), first->outputs.begin(), same);
}

}  // namespace safeops::launch
