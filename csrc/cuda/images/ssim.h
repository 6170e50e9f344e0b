// The kernels of SSIM, which ms_ssim launches scale by scale. Host only.
#pragma once

#include <optional>

#include "images.h"

namespace safeops::cuda {

struct Outputs;  // sums.cuh

// halves: half-size images to write as well, if any; not for volumes.
void sum_similarities(const Outputs& outputs, const Tensor& input, const Tensor& target,
                      const std::optional<Tensor>& mask, const Options& options, const ImageInfo& info,
                      const Halves& halves);
void write_gradients(const Gradients& to, const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                     const Options& options, const ImageInfo& info);

}  // namespace safeops::cuda
