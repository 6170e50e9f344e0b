// Python hands over the addresses of these functions of CUDA's driver and of torch at the first launch.
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
  AOTITorchError (*stream)(int32_t device, void** stream);                          // torch's current one

  // Gives torch's current stream if `index` is the current device, else false.
  bool current(int index, void** out) const {
    int current;
    return device(&current) == 0 && current == index && stream(index, out) == AOTI_TORCH_SUCCESS;
  }

  bool captures(void* stream) const {
    int status;
    return capturing(stream, &status) != 0 || status != 0;
  }
};

// One launch. A word is one of the kernel's parameters: addresses, then other numbers, of 32 bits the lower half.
struct Launch {
  static constexpr int most = 256;  // of parameters

  void* function;
  unsigned grid[3], threads, shared;
  int device;
  std::vector<uint64_t> words;
  std::vector<uint8_t> places;  // among the words, of each parameter in the kernel's order
  int addresses;
  bool split;         // the kernel uses the stream's buffers for blocks that share a result
  int64_t workspace;  // numbers in fp64 that it leaves for the last of them, if they are more than the buffer holds

  int start(const Driver& driver, uint64_t* values, void* stream) const {
    void* parameters[most];
    for (size_t i = 0; i < places.size(); ++i) parameters[i] = values + places[i];
    const Config config = {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, stream, nullptr, 0};
    return driver.launch(&config, function, parameters, nullptr);
  }
};

}  // namespace safeops::launch
