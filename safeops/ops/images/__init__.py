"""Losses and metrics of images (N, C, H, W) or (N, C, D, H, W). `_ssim.py` is shared by ssim, ssim_loss and ms_ssim,
`_image.py` by the functions that return a number per image."""
