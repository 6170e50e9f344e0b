// Launches of SSIM's kernels for volumes (N, C, D, H, W): forward and backward. Host only.
#pragma once

#include <optional>

#include "images.h"

namespace safeops::cuda {

struct Outputs;  // defined in sums.cuh

void ssim_of_volumes(const Outputs& outputs, const Tensor& input, const Tensor& target,
                     const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info);
void ssim_of_volumes_backward(const Gradients& to, const Tensor& input, const Tensor& target,
                              const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info);

}  // namespace safeops::cuda
