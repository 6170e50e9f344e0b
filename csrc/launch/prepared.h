// Prepared calls of the Triton ops: a call like an earlier one is launched without Python.
//
// `safeops::_<op>` is a LaunchCache. A call whose key (key.h) it has not seen goes on to `safeops::_<op>_launch`, the
// launcher in Python, which reports its launch. The LaunchCache keeps that launch, and for each address in it which
// argument or result owns the address. After a call of a second size it also keeps a tape, which computes the launch
// from the sizes, so that further sizes need no Python.
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

// Metadata of a result, from which LaunchCache::replay allocates it.
struct Output {
  Words sizes, strides;
  int32_t dtype, device_type, device;

  bool empty() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }
};

// Who owns an address in a launch. kNobody: an absent operand, address 0. kPartial, kCounter: the stream's buffers for
// blocks that share a result. kWorkspace: memory for this launch alone.
enum class Owner { kNobody, kArgument, kResult, kPartial, kCounter, kWorkspace };

struct Prepared {
  Launch launch;
  // For each address of the launch: the kind of its owner, and for an argument or a result its index, else 0.
  std::vector<std::pair<Owner, size_t>> owners;
  std::vector<Output> outputs;

  bool has(Owner owner, size_t which) const {
    return std::find(owners.begin(), owners.end(), std::pair(owner, which)) != owners.end();
  }
};

// One compiled kernel for all sizes that the tape accepts. The tape's results are the grid, the workspace, the last
// words of the launch, and the sizes and strides of each output.
struct Program {
  std::shared_ptr<const Prepared> first;
  Tape tape;

  std::shared_ptr<const Prepared> at(const Words& sizes) const;  // null: the tape does not accept these sizes
  bool repeats(const Arguments& call) const;                      // replays the traced call itself, as a check
};

class LaunchCache {
 public:
  LaunchCache(std::string op, std::string kinds) : op_(std::move(op)), kinds_(std::move(kinds)) {}

  void call(StableIValue* stack, size_t results);
  void forget();

 private:
  struct Calls {  // calls that differ in sizes and strides alone
    std::unordered_map<Words, std::shared_ptr<const Prepared>, Hash> prepared;  // by sizes and strides
    std::vector<Program> programs;  // the most recently used one first
    int traced = 0;
  };

  std::shared_ptr<const Prepared> find(const Arguments& call, bool* trace);
  void keep(Arguments call, std::shared_ptr<const Prepared> prepared, std::optional<Tape> tape);
  bool replay(const Prepared& prepared, const std::vector<uint64_t>& addresses, StableIValue* stack) const;

  static constexpr size_t kMost = 4096;  // most prepared calls; one more forgets all of them
  static constexpr int kTraces = 32;     // most traces of calls that differ in sizes and strides alone

  const std::string op_, kinds_;
  std::mutex mutex_;
  size_t count_ = 0;
  std::unordered_map<Words, Calls, Hash> calls_;  // by Arguments::kind
};

void use_driver(const Driver& driver);
bool watched();                          // a hook, such as a profiler's, must see each launch
void keep_buffers(int device, void* stream, uint64_t partial, uint64_t counter);
int start(Launch launch);                // on the current stream; reported to the LaunchCache that called the launcher
bool wants_trace();                      // that LaunchCache wants a tape of the launch
void trace(Tape tape);
void fail(const std::string& message);   // the launcher in Python has failed
LaunchCache& cache_launches(const std::string& op, const std::string& kinds, const char* dispatch_key);
void forget();                           // drops all prepared calls

}  // namespace safeops::launch
