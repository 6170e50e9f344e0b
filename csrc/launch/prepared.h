// Prepared calls of the Triton ops: a call like an earlier one is launched without Python.
//
// `safeops::_<op>` is a Front. A key that it has not seen goes on to `safeops::_<op>_launch`, the launcher in Python,
// which reports its launch; what that says is kept, with the addresses in it replaced by whose they are. Where a second
// size has come, so is how the launch follows from sizes: others need no Python.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "launch/driver.h"
#include "launch/key.h"
#include "launch/tape.h"

namespace safeops::launch {

// A result, as it is to be allocated.
struct Output {
  Words sizes, strides;
  int32_t dtype, device_type, device;

  bool empty() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }
};

enum class Owner { kNobody, kArgument, kResult, kPartial, kCounter };  // nobody: an absent operand, always 0

struct Prepared {
  Launch launch;
  std::vector<std::pair<Owner, size_t>> owners;  // of the addresses: who, and which of them
  std::vector<Output> outputs;

  bool writes(size_t result) const {
    return std::find(owners.begin(), owners.end(), std::pair(Owner::kResult, result)) != owners.end();
  }
};

// What is launched for all sizes that the tape is for. Its results: the grid, the last words of the launch, the sizes
// and strides of each output.
struct Program {
  std::shared_ptr<const Prepared> first;
  Tape tape;

  std::shared_ptr<const Prepared> at(const Words& sizes) const;  // null: not for these
  bool repeats(const Arguments& call) const;                      // which was traced
};

class Front {
 public:
  Front(std::string op, std::string kinds) : op_(std::move(op)), kinds_(std::move(kinds)) {}

  void call(StableIValue* stack, size_t results);
  void forget();

 private:
  struct Calls {  // that differ in sizes and strides alone
    std::unordered_map<Words, std::shared_ptr<const Prepared>, Hash> prepared;  // by these
    std::vector<Program> programs;  // the one that was used last is the first
    int traced = 0;
  };

  std::shared_ptr<const Prepared> find(const Arguments& call, bool* trace);
  void keep(Arguments call, std::shared_ptr<const Prepared> prepared, std::optional<Tape> tape);
  bool replay(const Prepared& prepared, const std::vector<uint64_t>& addresses, StableIValue* stack) const;

  static constexpr size_t kMost = 4096;  // prepared calls; forgotten all together
  static constexpr int kTraces = 32;     // of calls that differ in sizes alone

  const std::string op_, kinds_;
  std::mutex mutex_;
  size_t count_ = 0;
  std::unordered_map<Words, Calls, Hash> calls_;  // by their kind
};

void use_driver(const Driver& driver);
bool watched();                          // whether somebody, such as a profiler, is to be told of launches
void keep_buffers(int device, void* stream, uint64_t partial, uint64_t counter);
int start(Launch launch);                // on the current stream, and known to the Front that waits for it
bool wants_trace();                      // whether the Front that waits would know how its launch follows from sizes
void trace(Tape tape);
void fail(const std::string& message);   // the launcher in Python has failed
Front& front(const std::string& op, const std::string& kinds, const char* dispatch_key);
void forget();                           // all prepared calls

}  // namespace safeops::launch
