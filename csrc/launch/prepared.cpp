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
  const auto entry = buffers.find({device, stream});
  return entry == buffers.end() ? std::nullopt : std::make_optional(entry->second);
}

// A report of the launcher in Python to the LaunchCache that called it, in the same thread.
struct Report {
  bool wants_trace = false;
  std::vector<Launch> launches;
  std::optional<Tape> tape;
  std::optional<std::string> failure;
};
thread_local Report* report = nullptr;

struct Reporting {
  Report* previous = report;
  explicit Reporting(Report* current) { report = current; }
  ~Reporting() { report = previous; }
};

Output output_of(AtenTensorHandle t, uint64_t* address) {
  Output output;
  int64_t dims, *sizes, *strides;
  const void* data;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t, &dims));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t, &output.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t, &output.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t, &output.device));
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(t, &data));
  output.sizes.assign(sizes, sizes + dims);
  output.strides.assign(strides, strides + dims);
  *address = reinterpret_cast<uint64_t>(data);
  return output;
}

// Makes the launch for all calls of this key. Returns null if an address in the launch has no owner or could have two,
// or if a result is none of its addresses: then something else has computed that result.
std::shared_ptr<const Prepared> prepare(Launch launch, const std::vector<uint64_t>& arguments,
                                        const StableIValue* stack, size_t results) {
  auto prepared = std::make_shared<Prepared>();
  std::vector<uint64_t> outputs(results);
  for (size_t i = 0; i < results; ++i)
    prepared->outputs.push_back(output_of(to<AtenTensorHandle>(stack[i]), &outputs[i]));
  std::vector<std::tuple<uint64_t, Owner, size_t>> candidates;
  for (size_t i = 0; i < arguments.size(); ++i) candidates.emplace_back(arguments[i], Owner::kArgument, i);
  for (size_t i = 0; i < results; ++i) candidates.emplace_back(outputs[i], Owner::kResult, i);
  void* stream;
  if (launch.split && driver.current(launch.device, &stream)) {
    if (const auto shared = buffers_of(launch.device, stream)) {
      candidates.emplace_back(shared->partial, Owner::kPartial, 0);
      candidates.emplace_back(shared->counter, Owner::kCounter, 0);
    }
  }
  for (int i = 0; i < launch.addresses; ++i) {
    int owners = 0;
    prepared->owners.emplace_back(Owner::kNobody, 0);
    for (const auto& [address, owner, which] : candidates)
      if (launch.words[i] != 0 && launch.words[i] == address) {
        prepared->owners.back() = {owner, which};
        ++owners;
      }
    if (owners == 0 && launch.words[i] != 0 && launch.workspace != 0 && !prepared->has(Owner::kWorkspace, 0)) {
      prepared->owners.back() = {Owner::kWorkspace, 0};
      continue;
    }
    if (owners != (launch.words[i] != 0)) return nullptr;
  }
  for (size_t i = 0; i < results; ++i)
    if (outputs[i] != 0 && !prepared->has(Owner::kResult, i)) return nullptr;
  prepared->launch = std::move(launch);
  return prepared;
}

// The dispatcher passes nothing but the arguments, so each LaunchCache needs a function of its own: enter<I>.
constexpr size_t kFronts = 256;
std::deque<LaunchCache> launch_caches;

template <size_t I>
void enter(StableIValue* stack, uint64_t, uint64_t results) {
  launch_caches[I].call(stack, results);
}

template <size_t... I>
constexpr auto entrances(std::index_sequence<I...>) {
  return std::array<void (*)(StableIValue*, uint64_t, uint64_t), sizeof...(I)>{&enter<I>...};
}

}  // namespace

// Looks up the launch for these sizes. If there is none, returns null and sets *trace: whether to trace the launcher.
std::shared_ptr<const Prepared> LaunchCache::find(const Arguments& call, bool* trace) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto entry = calls_.find(call.kind);
  if (entry == calls_.end()) return nullptr;
  Calls& calls = entry->second;
  const auto exact = calls.prepared.find(call.sizes);
  if (exact != calls.prepared.end()) return exact->second;
  for (Program& program : calls.programs)
    if (auto prepared = program.at(call.sizes)) {
      std::swap(program, calls.programs.front());
      return prepared;
    }
  *trace = calls.traced < kTraces;
  return nullptr;
}

void LaunchCache::keep(Arguments call, std::shared_ptr<const Prepared> prepared, std::optional<Tape> tape) {
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

void LaunchCache::forget() {
  const std::lock_guard<std::mutex> guard(mutex_);
  calls_.clear();
  count_ = 0;
}

void LaunchCache::call(StableIValue* stack, size_t results) {
  thread_local Arguments last;  // kept, so that the next call reuses its memory
  last.read(kinds_, stack);
  Report python_report;
  const auto prepared = find(last, &python_report.wants_trace);
  if (prepared && replay(*prepared, last.addresses, stack)) return;

  Arguments arguments = std::move(last);  // the launcher may call an op again in this thread
  const Reporting reporting(&python_report);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher((op_ + "_launch").c_str(), "", stack, TORCH_ABI_VERSION));
  if (python_report.failure) {
    for (size_t i = 0; i < results; ++i) to<torch::stable::Tensor>(stack[i]);
    throw std::runtime_error(*python_report.failure);
  }
  if (prepared || python_report.launches.size() != 1) return;
  auto fresh = prepare(std::move(python_report.launches[0]), arguments.addresses, stack, results);
  if (fresh || python_report.tape) keep(std::move(arguments), std::move(fresh), std::move(python_report.tape));
}

// Launches a prepared call. Returns false, with `stack` unchanged, if the launcher in Python must take the call: a hook
// watches, another device is current, a capture or a stream without buffers needs buffers, or something fails.
bool LaunchCache::replay(const Prepared& prepared, const std::vector<uint64_t>& addresses, StableIValue* stack) const {
  const Launch& launch = prepared.launch;
  void* stream;
  if (watched() || !driver.current(launch.device, &stream)) return false;
  std::optional<Buffers> shared;
  if (launch.split) {
    if (driver.captures(stream)) return false;
    shared = buffers_of(launch.device, stream);
    if (!shared) return false;
  }
  std::vector<torch::stable::Tensor> tensors;
  std::vector<uint64_t> results;
  const auto allocate = [&](const Output& out) {
    AtenTensorHandle handle;
    const Quiet quiet;
    if (aoti_torch_empty_strided(static_cast<int64_t>(out.sizes.size()), out.sizes.data(), out.strides.data(),
                                 out.dtype, out.device_type, out.device, &handle) != AOTI_TORCH_SUCCESS)
      return false;
    const void* data;
    tensors.emplace_back(handle);
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &data));
    results.push_back(reinterpret_cast<uint64_t>(data));
    return true;
  };
  if (!std::all_of(prepared.outputs.begin(), prepared.outputs.end(), allocate)) return false;
  if (launch.workspace != 0) {  // freed on return, before the kernel ends: only later work on the stream can get it
    const Output& like = prepared.outputs[0];
    if (!allocate({{launch.workspace}, {1}, aoti_torch_dtype_float64(), like.device_type, like.device})) return false;
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
      case Owner::kWorkspace: words[i] = results.back(); break;
    }
  }
  if (launch.start(driver, words, stream) != 0) return false;
  release(kinds_, stack);
  for (size_t i = 0; i < prepared.outputs.size(); ++i) stack[i] = from(tensors[i]);
  return true;
}

void use_driver(const Driver& new_driver) { driver = new_driver; }

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

LaunchCache& cache_launches(const std::string& op, const std::string& kinds, const char* dispatch_key) {
  static constexpr auto table = entrances(std::make_index_sequence<kFronts>());
  if (launch_caches.size() == kFronts) throw std::length_error("safeops: more Triton ops than entrances (csrc/launch)");
  launch_caches.emplace_back(op, kinds);
  auto* library = new StableLibrary(StableLibrary::Kind::IMPL, "safeops", dispatch_key, __FILE__, __LINE__);
  library->impl(op.substr(op.find("::") + 2).c_str(), table[launch_caches.size() - 1]);  // `library` is never freed
  return launch_caches.back();
}

void forget() {
  for (LaunchCache& each : launch_caches) each.forget();
}

}  // namespace safeops::launch
