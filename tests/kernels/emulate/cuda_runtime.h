// Enough of CUDA to run csrc/cuda/*.cu on the host, thread by thread: the kernels' logic (indices, tails, mask
// shuffles, broadcasting, saturation) is tested where there is no GPU. Found on the include path
// before the toolkit's header.
//
// Each lane of a warp is a fiber; a shuffle deposits its value and yields until every lane has. Not emulated: rounding
// of the GPU's own instructions (fp32 division is IEEE on both), memory ordering, speed.
#pragma once

#include <math.h>  // the overloads for float too, unqualified as on the device
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
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
#define SAFEOPS_INDEX_LIMIT 3000  // elements of a launch of the general kernel: larger ones are cut, as by 2^31

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
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// What the last calls did: the tests ask which variant ran.
inline int64_t emulated_wide_loads = 0, emulated_shuffles = 0;
extern "C" __attribute__((visibility("default"), used)) inline void emulated_counts(int64_t* wide, int64_t* shuffles) {
  *wide = emulated_wide_loads;
  *shuffles = emulated_shuffles;
  emulated_wide_loads = emulated_shuffles = 0;
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
void __stwb(T* p, T value) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) {
    std::fprintf(stderr, "emulated CUDA: misaligned %zu-byte store\n", sizeof(T));
    std::abort();
  }
  *p = value;
}

struct EmulatedIndex { unsigned x = 0; };
inline EmulatedIndex threadIdx, blockIdx;

struct EmulatedWarp {
  ucontext_t scheduler, lane[32];
  bool done[32];
  int current, round[32];
  unsigned slot[2][32];
  std::vector<char> stacks = std::vector<char>(32 << 16);
  void (*body)(void*);
  void* argument;
};
inline EmulatedWarp emulated_warp;

inline unsigned __shfl_sync(unsigned, unsigned value, int source) {
  EmulatedWarp& warp = emulated_warp;
  const int lane = warp.current, round = warp.round[lane]++ % 2;  // two slots: a fast lane may be one round ahead
  warp.slot[round][lane] = value;
  ++emulated_shuffles;
  const unsigned thread = threadIdx.x;
  swapcontext(&warp.lane[lane], &warp.scheduler);
  threadIdx.x = thread;
  return warp.slot[round][source];
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  EmulatedWarp& warp = emulated_warp;
  const int round = warp.round[warp.current] % 2;
  __shfl_sync(0xffffffffu, vote, 0);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (warp.slot[round][lane] != 0) << lane;
  return bits;
}

inline void emulated_entry() {
  EmulatedWarp& warp = emulated_warp;
  warp.body(warp.argument);
  warp.done[warp.current] = true;
}

template <class Body>
void run_warp(unsigned first_thread, Body body) {
  EmulatedWarp& warp = emulated_warp;
  warp.body = [](void* p) { (*static_cast<Body*>(p))(); };
  warp.argument = &body;
  for (int i = 0; i < 32; ++i) {
    warp.done[i] = false;
    warp.round[i] = 0;
    getcontext(&warp.lane[i]);
    warp.lane[i].uc_stack.ss_sp = warp.stacks.data() + (size_t(i) << 16);
    warp.lane[i].uc_stack.ss_size = 1 << 16;
    warp.lane[i].uc_link = &warp.scheduler;
    makecontext(&warp.lane[i], emulated_entry, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (int i = 0; i < 32; ++i) {
      if (warp.done[i]) continue;
      running = true;
      warp.current = i;
      threadIdx.x = first_thread + i;
      swapcontext(&warp.scheduler, &warp.lane[i]);
    }
  }
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
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
  std::memset(data, 0xA5, padded * item);
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

template <class Kernel, class Plan, class Op>
void start(Kernel kernel, unsigned blocks, cudaStream_t, const Plan& plan, const Op& op) {
  for (unsigned block = 0; block < blocks; ++block)
    for (unsigned thread = 0; thread < 128; thread += 32)
      run_warp(thread, [&] { blockIdx.x = block; kernel(plan, op); });
  check_guards();
}
}  // namespace safeops::cuda

// CPU tensors in the place of CUDA ones, and a namespace of their own.
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
#define is_cpu() get_device_index() == -2
#define aoti_torch_empty_strided emulated_empty_strided
#define aoti_torch_get_current_cuda_stream emulated_stream
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, key, m) _STABLE_TORCH_LIBRARY_IMPL(safeops_emulated, CPU, m, C10_UID)
