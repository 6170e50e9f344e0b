// Prepared calls of the Triton ops: a call like an earlier one is launched without Python.
//
// `safeops::_<op>` is a Front. A key that it has not seen goes on to `safeops::_<op>_launch`, the launcher in Python,
// which reports its launch; what that says is kept, with the addresses in it replaced by whose they are.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "launch/driver.h"
#include "launch/key.h"

namespace safeops::launch {

// A result, as it is to be allocated.
struct Output {
  Words sizes, strides;
  int32_t dtype, device_type, device;
};

enum class Owner { kNobody, kArgument, kResult, kPartial, kCounter };  // nobody: an absent operand, always 0

struct Prepared {
  Launch launch;
  std::vector<std::pair<Owner, size_t>> owners;  // of the addresses: who, and which of them
  std::vector<Output> outputs;
};

class Front {
 public:
  Front(std::string op, std::string kinds) : op_(std::move(op)), kinds_(std::move(kinds)) {}

  void call(StableIValue* stack, size_t results);
  void forget();

 private:
  std::shared_ptr<const Prepared> find(const Words& key);
  bool replay(const Prepared& prepared, const std::vector<uint64_t>& addresses, StableIValue* stack) const;

  static constexpr size_t kMost = 4096;  // keys; forgotten all together: a program that needs more has ever new shapes

  const std::string op_, kinds_;
  std::mutex mutex_;
  std::unordered_map<Words, std::shared_ptr<const Prepared>, Hash> prepared_;
};

void use_driver(const Driver& driver);
bool watched();                          // whether somebody, such as a profiler, is to be told of launches
void keep_buffers(int device, void* stream, uint64_t partial, uint64_t counter);
int start(Launch launch);                // on the current stream, and known to the Front that waits for it
void fail(const std::string& message);   // the launcher in Python has failed
Front& front(const std::string& op, const std::string& kinds, const char* dispatch_key);
void forget();                           // all prepared calls

}  // namespace safeops::launch
