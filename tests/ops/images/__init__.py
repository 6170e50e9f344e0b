"""The functions of images: the SSIM family, and what is made of pixels and of features."""
