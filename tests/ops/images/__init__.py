"""The functions of images: the SSIM family, functions of pixels, of features."""
