"""Losses and metrics of images, (N, C, H, W) or (N, C, D, H, W). `_ssim.py` is shared by the SSIM family, `_image.py`
by functions that have a number for each image."""
