// Enough of CUDA to run csrc/cuda/*.cu on the host, thread by thread: the kernels' logic (indices, tails, mask
// shuffles, broadcasting, saturation) is tested where there is no GPU. Found on the include path
// before the toolkit's header.
//
// Each lane of a warp is a fiber; a shuffle deposits its value and yields until every lane has, a barrier until every
// thread of the block has come. Shared memory begins as NaN, with a guard zone behind it. Not emulated: rounding
// of the GPU's own instructions (fp32 division is IEEE on both), writes seen out of order, speed.
#pragma once

#include <dlfcn.h>
#include <math.h>  // the overloads for float too, unqualified as on the device
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#ifndef SAFEOPS_PLANS
#define SAFEOPS_INDEX_LIMIT 3000  // elements of a launch of the general kernel: larger ones are cut, as by 2^31
#define SAFEOPS_PARTS 20  // that masked_select counts: of several tiles each, where there are more
#endif

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
To emulated_cast(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t x) { return emulated_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulated_cast<uint32_t>(x); }
inline double __longlong_as_double(int64_t x) { return emulated_cast<double>(x); }
inline int64_t __double_as_longlong(double x) { return emulated_cast<int64_t>(x); }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint32_t __vminu4(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 8) {
    const uint32_t x = a >> shift & 0xff, y = b >> shift & 0xff;
    result |= (x < y ? x : y) << shift;
  }
  return result;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) result |= uint32_t(bytes >> 8 * (selector >> 4 * k & 7) & 0xff) << 8 * k;
  return result;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 0xff) * (b >> shift & 0xff);
  return sum;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// A record of the last calls: the tests ask which variant ran.
inline int64_t emulated_wide_loads = 0, emulated_shuffles = 0;
extern "C" __attribute__((visibility("default"), used)) inline void emulated_counts(int64_t* wide, int64_t* shuffles) {
  *wide = emulated_wide_loads;
  *shuffles = emulated_shuffles;
  emulated_wide_loads = emulated_shuffles = 0;
}
inline const void* emulated_host = nullptr;
extern "C" __attribute__((visibility("default"), used)) inline void emulated_in_host(const void* data) {
  emulated_host = data;
}

template <class T>
T __ldg(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) {
    std::fprintf(stderr, "emulated CUDA: misaligned %zu-byte load\n", sizeof(T));
    std::abort();
  }
  emulated_wide_loads += sizeof(T) == 16;
  return *p;
}

template <class T>
T __ldcs(const T* p) {
  return __ldg(p);
}

template <class T>
void __stwb(T* p, T value) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) {
    std::fprintf(stderr, "emulated CUDA: misaligned %zu-byte store\n", sizeof(T));
    std::abort();
  }
  *p = value;
}

struct EmulatedIndex { unsigned x = 0; };
inline EmulatedIndex threadIdx, blockIdx, gridDim;

struct EmulatedBlock {
  int threads, waiting = 0, round = 0;  // round: how many barriers all threads have passed
  std::vector<uint4> memory;                       // shared; the last four are the guard
  EmulatedBlock(int threads_, int shared) : threads(threads_), memory((shared + 15) / 16 + 4) {
    std::memset(memory.data(), 0xFF, memory.size() * 16);
  }
  bool intact(int shared) const {
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(memory.data());
    for (size_t i = shared; i < memory.size() * 16; ++i)
      if (bytes[i] != 0xFF) return false;
    return true;
  }
};

// Several warps are under way at once and take turns by chance, and blocks start last first: what one warp writes while
// another waits for it is tested in many orders. A warp's turn is one step of each of its lanes, up to their next
// shuffle or strong load.
struct EmulatedWarp {
  ucontext_t lane[32];
  bool done[32];
  int running, round[32];
  unsigned slot[2][32], first_thread, block;
  std::shared_ptr<EmulatedBlock> shared;  // with the other warps of its block
  std::vector<char> stacks = std::vector<char>(32 << 16);
  void (*body)(void*);
  void* argument;
  std::vector<std::pair<uint4*, const uint4*>> requests[32];
};
constexpr int kEmulatedWarps = 24;  // under way: whole blocks, of which one may wait for what another has not begun
inline EmulatedWarp emulated_warps[kEmulatedWarps];
inline EmulatedWarp* emulated_warp;
inline int emulated_lane;
inline ucontext_t emulated_scheduler;
inline uint32_t emulated_random = 1;

inline void emulated_yield() {
  EmulatedWarp* warp = emulated_warp;
  const int lane = emulated_lane;
  swapcontext(&warp->lane[lane], &emulated_scheduler);
  emulated_warp = warp;
  emulated_lane = lane;
}

inline unsigned __shfl_sync(unsigned, unsigned value, int source) {
  EmulatedWarp& warp = *emulated_warp;
  const int lane = emulated_lane, round = warp.round[lane]++;  // two slots: a fast lane may be one round ahead
  warp.slot[round % 2][lane] = value;
  ++emulated_shuffles;
  for (bool all = false; !all;) {
    emulated_yield();
    all = true;
    for (int l = 0; l < 32; ++l) all = all && (warp.done[l] || warp.round[l] > round);
  }
  return warp.slot[round % 2][source];
}

inline void __syncthreads() {
  EmulatedBlock& block = *emulated_warp->shared;
  const int round = block.round;
  if (++block.waiting == block.threads) {
    block.waiting = 0;
    ++block.round;
  }
  while (block.round == round) emulated_yield();
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  EmulatedWarp& warp = *emulated_warp;
  const int round = warp.round[emulated_lane] % 2;
  __shfl_sync(0xffffffffu, vote, 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (warp.slot[round][lane] != 0) << lane;
  return bits;
}

inline void __threadfence() { emulated_yield(); }
template <class T>
T atomicAdd(T* p, T value) {
  *p += value;
  return *p - value;
}
template <class T>
T atomicMax(T* p, T value) {
  const T old = *p;
  *p = old > value ? old : value;
  return old;
}

inline void emulated_entry() {
  EmulatedWarp* warp = emulated_warp;
  const int lane = emulated_lane;
  warp->body(warp->argument);
  warp->done[lane] = true;
  --warp->running;
  setcontext(&emulated_scheduler);
}

inline void begin_warp(EmulatedWarp& warp, unsigned block, unsigned first_thread, void (*body)(void*), void* argument) {
  warp.block = block;
  warp.first_thread = first_thread;
  warp.body = body;
  warp.argument = argument;
  warp.running = 32;
  for (int i = 0; i < 32; ++i) {
    warp.done[i] = false;
    warp.requests[i].clear();
    warp.round[i] = 0;
    getcontext(&warp.lane[i]);
    warp.lane[i].uc_stack.ss_sp = warp.stacks.data() + (size_t(i) << 16);
    warp.lane[i].uc_stack.ss_size = 1 << 16;
    warp.lane[i].uc_link = nullptr;
    makecontext(&warp.lane[i], emulated_entry, 0);
  }
}

template <class Body>
void run_blocks(unsigned blocks, unsigned threads, Body body, int shared = 0) {
  void (*call)(void*) = [](void* p) { (*static_cast<Body*>(p))(); };
  std::shared_ptr<EmulatedBlock> latest;
  gridDim.x = blocks;
  const uint64_t warps = uint64_t(blocks) * (threads / 32);
  uint64_t begun = 0;
  int under_way = 0, asleep = 0;
  for (int64_t idle = 0;;) {
    for (; under_way < kEmulatedWarps && begun < warps; ++begun, ++under_way)
      for (EmulatedWarp& warp : emulated_warps)
        if (warp.running == 0) {
          if (begun % (threads / 32) == 0) latest = std::make_shared<EmulatedBlock>(threads, shared);
          warp.shared = latest;
          begin_warp(warp, blocks - 1 - unsigned(begun / (threads / 32)), begun % (threads / 32) * 32, call, &body);
          break;
        }
    if (under_way == 0) return;
    emulated_random = emulated_random * 1664525 + 1013904223;
    const uint32_t chance = emulated_random >> 8;
    if (chance % 64 == 0) asleep = chance / 64 % kEmulatedWarps;  // one falls behind for a while
    EmulatedWarp& warp = emulated_warps[chance / 4096 % kEmulatedWarps];
    if (warp.running == 0 || (&warp == &emulated_warps[asleep] && under_way > 1)) continue;
    for (int i = 0; i < 32; ++i) {
      if (warp.done[i]) continue;
      emulated_warp = &warp;
      emulated_lane = i;
      threadIdx.x = warp.first_thread + i;
      blockIdx.x = warp.block;
      swapcontext(&emulated_scheduler, &warp.lane[i]);
    }
    under_way -= warp.running == 0;
    if (warp.running == 0 && !warp.shared->intact(shared))
      throw std::runtime_error("emulated CUDA: a write past the end of shared memory");
    idle = warp.running == 0 ? 0 : idle + 1;
    if (idle < 300'000) continue;
    for (EmulatedWarp& other : emulated_warps) other.running = 0;
    throw std::runtime_error("emulated CUDA: warps wait for each other");
  }
}

// With SAFEOPS_PLANS, launches are noted and not run: (kernel, blocks, threads, bytes of shared memory); of memory that
// is set (0, bytes, 0, 0), of keys that are sorted (0, bytes, 0, bits). No tensor is touched: they may be of any size.
struct EmulatedLaunch { int64_t kernel, blocks, threads, shared; };
inline std::vector<EmulatedLaunch> emulated_launches;
inline int64_t emulated_kept = 0;  // what a count on the device is taken to be
inline uintptr_t emulated_base() {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&emulated_base), &here);
  return reinterpret_cast<uintptr_t>(here.dli_fbase);
}
extern "C" __attribute__((visibility("default"), used)) inline int64_t emulated_plan(EmulatedLaunch* to, int64_t kept) {
  const int64_t count = int64_t(emulated_launches.size());
  std::memcpy(to, emulated_launches.data(), count * sizeof(EmulatedLaunch));
  emulated_launches.clear();
  emulated_kept = kept;
  return count;
}

inline int emulated_memory = 0;
extern "C" __attribute__((visibility("default"), used)) inline int emulated_memory_operations() {
  return std::exchange(emulated_memory, 0);
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  ++emulated_memory;
#ifdef SAFEOPS_PLANS
  emulated_launches.push_back({0, int64_t(bytes), 0, 0});
  return cudaSuccess;
#endif
  std::memset(p, value, bytes);
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++emulated_memory;
#ifdef SAFEOPS_PLANS
  std::memset(to, 0, bytes);
  from = &emulated_kept;
  bytes = sizeof(emulated_kept);
#endif
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
#define CUDART_VERSION 13000
inline int emulated_driver = CUDART_VERSION, emulated_started = 0;  // kernels
extern "C" __attribute__((visibility("default"), used)) inline int emulated_kernels(int driver) {
  emulated_driver = driver;
  return std::exchange(emulated_started, 0);
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = emulated_driver;
  return cudaSuccess;
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }

// Outputs come with a guard zone behind them, which every launch of the op checks: a write past the end is not silent.
struct EmulatedOutput {
  AtenTensorHandle storage;
  unsigned char* guard;
};
inline std::vector<EmulatedOutput> emulated_outputs;
constexpr int kEmulatedGuard = 256;  // bytes
inline AOTITorchError emulated_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                             int32_t device, int32_t, AtenTensorHandle* result) {
  int64_t extent = 1;
  for (int64_t i = 0; i < ndim; ++i) extent += (sizes[i] - 1) * strides[i];
  for (int64_t i = 0; i < ndim; ++i) extent = sizes[i] == 0 ? 0 : extent;
  const int64_t item = int64_t(aoti_torch_dtype_element_size(dtype)), one = 1, padded = extent + kEmulatedGuard / item;
  EmulatedOutput output;
  void* data;
  if (aoti_torch_empty_strided(1, &padded, &one, dtype, device, 0, &output.storage)) return 1;
  if (aoti_torch_get_data_ptr(output.storage, &data)) return 1;
#ifndef SAFEOPS_PLANS
  std::memset(data, 0xA5, padded * item);
#endif
  output.guard = static_cast<unsigned char*>(data) + extent * item;
  emulated_outputs.push_back(output);
  return aoti_torch__reinterpret_tensor(output.storage, ndim, sizes, strides, 0, result);
}
inline void check_guards() {
  for (const EmulatedOutput& output : emulated_outputs)
    for (int i = 0; i < kEmulatedGuard; ++i)
      if (output.guard[i] != 0xA5) throw std::runtime_error("emulated CUDA: a write past the end of an output");
}
inline cudaError_t cudaGetLastError() {  // the end of an op: no launch of it is to come
  for (const EmulatedOutput& output : emulated_outputs) aoti_torch_delete_tensor_object(output.storage);
  emulated_outputs.clear();
  return cudaSuccess;
}

namespace safeops::cuda {
inline float f16_to_float(uint16_t bits) { return c10::Half(bits, c10::Half::from_bits()); }
inline uint16_t float_to_f16(float value) { return c10::Half(value).x; }
inline uint16_t float_to_bf16(float value) { return c10::BFloat16(value).x; }
// As wrong as the GPU's may be: the logarithm by 2^-22, a larger one by 2^-22 of itself. Subnormal numbers are 0.
inline float as_normal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float approx_log2(float x) {
  const float y = std::log2(as_normal(x)), error = std::fmax(std::fabs(y), 1.0f) * 0x1p-22f;
  return std::isfinite(y) ? y + (__float_as_uint(x) * 2654435761u >> 31 ? error : -error) : y;
}
inline float approx_exp2(float x) {
  return as_normal(std::exp2(x) * (1 + (__float_as_uint(x) * 2654435761u >> 31 ? 0x1p-22f : -0x1p-22f)));
}
inline float fminf(float a, float b) { return a < b || b != b ? a : b; }  // of a signalling NaN, too, the number
template <class Word>
Word load_relaxed(const Word* p) {
  emulated_yield();
  return *p;
}
template <class Word>
void store_relaxed(Word* p, Word value) {
  *p = value;
}
inline void request(uint4* to, const uint4* from) { emulated_warp->requests[emulated_lane].push_back({to, from}); }
inline void await_requests() {  // what was requested comes now, as late as it may
  auto& mine = emulated_warp->requests[emulated_lane];
  for (const auto& [to, from] : mine) *to = __ldg(from);
  mine.clear();
}

template <class Kernel, class... Arguments>
void start_blocks(Kernel kernel, unsigned blocks, int threads, int shared, cudaStream_t,
                  const Arguments&... arguments) {
#ifdef SAFEOPS_PLANS
  emulated_launches.push_back({int64_t(uintptr_t(kernel) - emulated_base()), blocks, threads, shared});
  return;
#endif
  ++emulated_started;
  run_blocks(blocks, threads, [&] { kernel(arguments...); }, shared);
  check_guards();
}
template <class Kernel, class... Arguments>
void start(Kernel kernel, unsigned blocks, cudaStream_t stream, const Arguments&... arguments) {
  start_blocks(kernel, blocks, 128, 0, stream, arguments...);
}
inline char* shared_memory() { return reinterpret_cast<char*>(emulated_warp->shared->memory.data()); }
}  // namespace safeops::cuda

// CPU tensors in the place of CUDA ones, but for one that the tests put in the host's memory; a namespace of their own.
namespace torch::stable::accelerator {
struct EmulatedGuard {
  explicit EmulatedGuard(DeviceIndex) {}
};
}  // namespace torch::stable::accelerator
inline AOTITorchError emulated_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
#define DeviceGuard EmulatedGuard
#define is_cuda() get_device_index() == -1
#define is_cpu() data_ptr() == emulated_host
#define aoti_torch_empty_strided emulated_empty_strided
#define aoti_torch_get_current_cuda_stream emulated_stream
#ifdef SAFEOPS_PLANS
#define SAFEOPS_EMULATED safeops_plans
#else
#define SAFEOPS_EMULATED safeops_emulated
#endif
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, key, m) _STABLE_TORCH_LIBRARY_IMPL(SAFEOPS_EMULATED, CPU, m, C10_UID)
