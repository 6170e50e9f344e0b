"""safeops beside what else computes the same: other libraries, torch.compile, and the patterns that users write.

    python -m benchmarks.rivals [--device cpu|cuda] [--only masked,ssim] [--json FILE]

A file per family has its contests: operands, the definition, our function, and its rivals. First each contender has to
agree with the definition in fp64, in value and gradient, on small operands. Then all are timed in turns: forward
without gradients, and forward and backward in a row ("total"). A library that is not installed is named as absent.

On CUDA every core compiles for a worker of its own, and a rival that crashes or hangs costs its worker alone. Optional
rivals, by their wheels: liger-kernel, flash-linear-attention, cut-cross-entropy, trl, flag-gems, torch-scatter, monai,
kornia, pytorch-msssim, torchmetrics, torchvision, segmentation-models-pytorch, and fused-ssim, which is built from
source.
"""
