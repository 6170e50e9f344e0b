// Launches of SSIM's kernels, which ms_ssim also calls, once for each scale. Host only.
#pragma once

#include <optional>

#include "images.h"

namespace safeops::cuda {

struct Outputs;  // defined in sums.cuh

// The forward launch. halves: half-size images that it also writes, if halves.x exists; not for volumes.
void sum_similarities(const Outputs& outputs, const Tensor& input, const Tensor& target,
                      const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info,
                      const Halves& halves);
void write_gradients(const Gradients& to, const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                     const Options& options, const ImageInfo& info);

}  // namespace safeops::cuda
