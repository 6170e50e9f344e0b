// LibTorch's stable ABI. setup.py precompiles this header for the C++ sources: half of the time that a short one takes.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
