#include "launch/prepared.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "common/allocation.h"

namespace safeops::launch {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;

struct Buffers {
  uint64_t partial, counter;
};

Driver driver;
std::mutex buffers_mutex;
std::map<std::pair<int, void*>, Buffers> buffers;  // by device and stream

std::optional<Buffers> buffers_of(int device, void* stream) {
  const std::lock_guard<std::mutex> guard(buffers_mutex);
  const auto found = buffers.find({device, stream});
  return found == buffers.end() ? std::nullopt : std::make_optional(found->second);
}

// What the launcher in Python reports, in the thread that called it.
struct Report {
  bool wants_trace = false;
  std::vector<Launch> launches;
  std::optional<Tape> tape;
  std::optional<std::string> failure;
};
thread_local Report* report = nullptr;

struct Reporting {
  Report* before = report;
  explicit Reporting(Report* own) { report = own; }
  ~Reporting() { report = before; }
};

Output output_of(AtenTensorHandle t, uint64_t* address) {
  Output made;
  int64_t dims, *sizes, *strides;
  const void* data;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t, &dims));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t, &made.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t, &made.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t, &made.device));
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(t, &data));
  made.sizes.assign(sizes, sizes + dims);
  made.strides.assign(strides, strides + dims);
  *address = reinterpret_cast<uint64_t>(data);
  return made;
}

// The launch for any call of this key; none where an address in it has no owner, or could have two, or where a result
// is not among them: something else has made that.
std::shared_ptr<const Prepared> prepare(Launch launch, const std::vector<uint64_t>& arguments,
                                        const StableIValue* stack, size_t results) {
  auto made = std::make_shared<Prepared>();
  std::vector<uint64_t> outputs(results);
  for (size_t i = 0; i < results; ++i)
    made->outputs.push_back(output_of(to<AtenTensorHandle>(stack[i]), &outputs[i]));
  std::vector<std::tuple<uint64_t, Owner, size_t>> known;
  for (size_t i = 0; i < arguments.size(); ++i) known.emplace_back(arguments[i], Owner::kArgument, i);
  for (size_t i = 0; i < results; ++i) known.emplace_back(outputs[i], Owner::kResult, i);
  void* stream;
  if (launch.split && driver.current(launch.device, &stream)) {
    if (const auto shared = buffers_of(launch.device, stream)) {
      known.emplace_back(shared->partial, Owner::kPartial, 0);
      known.emplace_back(shared->counter, Owner::kCounter, 0);
    }
  }
  for (int i = 0; i < launch.addresses; ++i) {
    int owners = 0;
    made->owners.emplace_back(Owner::kNobody, 0);
    for (const auto& [address, owner, which] : known)
      if (launch.words[i] != 0 && launch.words[i] == address) {
        made->owners.back() = {owner, which};
        ++owners;
      }
    if (owners != (launch.words[i] != 0)) return nullptr;
  }
  for (size_t i = 0; i < results; ++i)
    if (outputs[i] != 0 && !made->writes(i)) return nullptr;
  made->launch = std::move(launch);
  return made;
}

// Functions that know which Front they are: the dispatcher hands over arguments alone.
constexpr size_t kFronts = 128;
std::deque<Front> fronts;

template <size_t I>
void enter(StableIValue* stack, uint64_t, uint64_t results) {
  fronts[I].call(stack, results);
}

template <size_t... I>
constexpr auto entrances(std::index_sequence<I...>) {
  return std::array<void (*)(StableIValue*, uint64_t, uint64_t), sizeof...(I)>{&enter<I>...};
}

}  // namespace

// What the launch of these sizes is, or, where that has to be asked for, whether with a trace.
std::shared_ptr<const Prepared> Front::find(const Arguments& call, bool* trace) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = calls_.find(call.kind);
  if (found == calls_.end()) return nullptr;
  Calls& calls = found->second;
  const auto known = calls.prepared.find(call.sizes);
  if (known != calls.prepared.end()) return known->second;
  for (Program& program : calls.programs)
    if (auto made = program.at(call.sizes)) {
      std::swap(program, calls.programs.front());
      return made;
    }
  *trace = calls.traced < kTraces;
  return nullptr;
}

void Front::keep(Arguments call, std::shared_ptr<const Prepared> prepared, std::optional<Tape> tape) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (prepared && ++count_ > kMost) {
    calls_.clear();
    count_ = 1;
  }
  Calls& calls = calls_[std::move(call.kind)];
  if (tape) {
    ++calls.traced;
    Program program{prepared, std::move(*tape)};
    if (prepared && program.repeats(call)) calls.programs.push_back(std::move(program));
  }
  if (prepared) calls.prepared.emplace(std::move(call.sizes), std::move(prepared));
}

void Front::forget() {
  const std::lock_guard<std::mutex> guard(mutex_);
  calls_.clear();
  count_ = 0;
}

void Front::call(StableIValue* stack, size_t results) {
  thread_local Arguments last;  // whose memory serves the next call
  last.read(kinds_, stack);
  Report made;
  const auto known = find(last, &made.wants_trace);
  if (known && replay(*known, last.addresses, stack)) return;

  Arguments own = std::move(last);  // the launcher may come here again
  const Reporting reporting(&made);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher((op_ + "_launch").c_str(), "", stack, TORCH_ABI_VERSION));
  if (made.failure) {
    for (size_t i = 0; i < results; ++i) to<torch::stable::Tensor>(stack[i]);
    throw std::runtime_error(*made.failure);
  }
  if (known || made.launches.size() != 1) return;
  auto fresh = prepare(std::move(made.launches[0]), own.addresses, stack, results);
  if (fresh || made.tape) keep(std::move(own), std::move(fresh), std::move(made.tape));
}

// False, and nothing is done, where Python must look at it: another device, a capture, new buffers, whatever fails.
bool Front::replay(const Prepared& prepared, const std::vector<uint64_t>& addresses, StableIValue* stack) const {
  const Launch& launch = prepared.launch;
  void* stream;
  if (watched() || !driver.current(launch.device, &stream)) return false;
  std::optional<Buffers> shared;
  if (launch.split) {
    if (driver.captures(stream)) return false;
    shared = buffers_of(launch.device, stream);
    if (!shared) return false;
  }
  std::vector<torch::stable::Tensor> made;
  std::vector<uint64_t> results;
  for (const Output& out : prepared.outputs) {
    AtenTensorHandle handle;
    const Quiet quiet;
    if (aoti_torch_empty_strided(static_cast<int64_t>(out.sizes.size()), out.sizes.data(), out.strides.data(),
                                 out.dtype, out.device_type, out.device, &handle) != AOTI_TORCH_SUCCESS)
      return false;
    const void* data;
    made.emplace_back(handle);
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &data));
    results.push_back(reinterpret_cast<uint64_t>(data));
  }
  uint64_t words[Launch::most];
  std::copy(launch.words.begin(), launch.words.end(), words);
  for (size_t i = 0; i < prepared.owners.size(); ++i) {
    const auto [owner, which] = prepared.owners[i];
    switch (owner) {
      case Owner::kNobody: break;
      case Owner::kArgument: words[i] = addresses[which]; break;
      case Owner::kResult: words[i] = results[which]; break;
      case Owner::kPartial: words[i] = shared->partial; break;
      case Owner::kCounter: words[i] = shared->counter; break;
    }
  }
  if (launch.start(driver, words, stream) != 0) return false;
  release(kinds_, stack);
  for (size_t i = 0; i < made.size(); ++i) stack[i] = from(made[i]);
  return true;
}

void use_driver(const Driver& given) { driver = given; }

void keep_buffers(int device, void* stream, uint64_t partial, uint64_t counter) {
  const std::lock_guard<std::mutex> guard(buffers_mutex);
  buffers[{device, stream}] = {partial, counter};
}

int start(Launch launch) {
  void* stream;
  if (!driver.current(launch.device, &stream)) return -1;
  const int error = launch.start(driver, launch.words.data(), stream);
  if (report && error == 0) report->launches.push_back(std::move(launch));
  return error;
}

bool wants_trace() { return report && report->wants_trace && report->launches.size() == 1; }

void trace(Tape tape) {
  if (report) report->tape = std::move(tape);
}

void fail(const std::string& message) {
  if (report) report->failure = message;
}

Front& front(const std::string& op, const std::string& kinds, const char* dispatch_key) {
  static constexpr auto table = entrances(std::make_index_sequence<kFronts>());
  if (fronts.size() == kFronts) throw std::length_error("safeops: more Triton ops than entrances (csrc/launch)");
  fronts.emplace_back(op, kinds);
  auto* library = new StableLibrary(StableLibrary::Kind::IMPL, "safeops", dispatch_key, __FILE__, __LINE__);
  library->impl(op.substr(op.find("::") + 2).c_str(), table[fronts.size() - 1]);  // kept for good, as what is loaded is
  return fronts.back();
}

void forget() {
  for (Front& each : fronts) each.forget();
}

}  // namespace safeops::launch
