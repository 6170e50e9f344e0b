"""Times safeops beside other libraries, torch.compile, and the patterns that users write.

    python -m benchmarks.rivals [--device cpu|cuda] [--only masked,ssim] [--json FILE]

A file per family has its contests: operands, the definition, our function, and its rivals. First each contender must
agree with the definition in fp64, in value and gradient, on small operands. Then all are timed in turns: forward
without gradients, and forward and backward in a row ("total"). A library that is not installed is named as absent.

On CUDA the contests are compiled in parallel, in worker processes; a rival that crashes or hangs ends only its worker.
Optional rivals: liger-kernel, flash-linear-attention, cut-cross-entropy, trl, flag-gems, torch-scatter, monai, kornia,
pytorch-msssim, torchmetrics, torchvision, segmentation-models-pytorch (as wheels), and fused-ssim (built from source).
"""
