// The functions of CUDA's driver and of torch that a launch needs. Python passes their addresses at the first launch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <vector>

namespace safeops::launch {

// CUlaunchConfig of cuda.h, which is absent from a build without CUDA.
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned count;
};

struct Driver {
  int (*launch)(const Config*, void* function, void** parameters, void** extra);  // cuLaunchKernelEx
  int (*capturing)(void* stream, int* status);                                      // cuStreamIsCapturing
  int (*device)(int* index);                                                        // cuCtxGetDevice
  AOTITorchError (*stream)(int32_t device, void** stream);                          // torch's current stream

  // Sets *out to torch's current stream. Returns false if device `index` is not the current one.
  bool current(int index, void** out) const {
    int current;
    return device(&current) == 0 && current == index && stream(index, out) == AOTI_TORCH_SUCCESS;
  }

  bool captures(void* stream) const {
    int status;
    return capturing(stream, &status) != 0 || status != 0;
  }
};

// One launch. words: the kernel's parameters, addresses first, then numbers; a 32-bit number is the lower half of a
// word.
struct Launch {
  static constexpr int most = 256;  // most parameters

  void* function;
  unsigned grid[3], threads, shared;
  int device;
  std::vector<uint64_t> words;
  std::vector<uint8_t> places;  // for each parameter, in the kernel's order, its index in words
  int addresses;
  bool split;         // blocks share a result, and exchange partial results in the stream's buffers
  int64_t workspace;  // its size in fp64 numbers: partial results, if the stream's buffer is too small; else 0

  int start(const Driver& driver, uint64_t* values, void* stream) const {
    void* parameters[most];
    for (size_t i = 0; i < places.size(); ++i) parameters[i] = values + places[i];
    const Config config = {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, stream, nullptr, 0};
    return driver.launch(&config, function, parameters, nullptr);
  }
};

}  // namespace safeops::launch
