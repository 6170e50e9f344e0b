"""Losses and metrics of images, (N, C, H, W) or (N, C, D, H, W): `_ssim.py` is what the SSIM family shares, `_image.py`
what is made of other ops."""
