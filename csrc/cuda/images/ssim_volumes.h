// The SSIM of volumes (N, C, D, H, W). Host only.
#pragma once

#include <optional>

#include "images.h"

namespace safeops::cuda {

// out: the map, or the sums (3, N, C).
void ssim_of_volumes(const Tensor& out, const Tensor& input, const Tensor& target, const std::optional<Tensor>& mask,
                     const Options& options, const Checked& is, bool by_window);
void ssim_of_volumes_backward(const Gradients& to, const Tensor& input, const Tensor& target,
                              const std::optional<Tensor>& mask, const Options& options, const Checked& is);

}  // namespace safeops::cuda
