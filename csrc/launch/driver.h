// What a prepared launch asks of CUDA's driver and of torch, by address: Python hands them over at the first launch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <vector>

namespace safeops::launch {

// CUlaunchConfig of cuda.h, which a build without CUDA has not.
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

  // The current stream of the current device, if that is the one asked for.
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
  static constexpr int most = 256;  // parameters

  void* function;
  unsigned grid[3], threads, shared;
  int device;
  std::vector<uint64_t> words;
  std::vector<uint8_t> places;  // among the words, of each parameter in the kernel's order
  int addresses;
  bool split;  // whether it uses the stream's buffers

  int start(const Driver& driver, uint64_t* given, void* stream) const {
    void* parameters[most];
    for (size_t i = 0; i < places.size(); ++i) parameters[i] = given + places[i];
    const Config config = {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, stream, nullptr, 0};
    return driver.launch(&config, function, parameters, nullptr);
  }
};

}  // namespace safeops::launch
