"""The Middlebury 2014 "Motorcycle" stereo pair, as scikit-image ships it: two images and a measured disparity map.

Disparity d is in pixels of the 741-pixel-wide images. Depth follows from the calibration of the pair,

    depth = focal * baseline / (d + doffs)        doffs: the principal points' offset, right minus left

so the demo trains on D = d + doffs, the disparity that is 0 at infinity, and depth = FOCAL_BASELINE / D. Pixels that
were not measured are stored as 0, as in KITTI.
"""

import dataclasses
import pathlib

import torch

FOCAL = 994.978  # pixels
BASELINE = 0.193001  # metres
DOFFS = 31.086  # pixels
FOCAL_BASELINE = FOCAL * BASELINE  # 192.03 pixel-metres: 60 px of d are 2.1 m away, 7 px are 5.0 m


@dataclasses.dataclass
class Pair:
    left: torch.Tensor  # (1, 3, 500, 740) fp32 in [0, 1]
    right: torch.Tensor  # (1, 3, 500, 740)
    truth: torch.Tensor  # (1, 1, 500, 740) fp32, D in pixels; 0 where it was not measured (7 % of the pixels)

    @property
    def known(self):
        return self.truth > 0


def load(device="cpu"):
    """The pair on `device`, cropped by one column so that the width divides by 4."""
    import skimage.data

    folder = pathlib.Path(skimage.data.__file__).parent
    if not (folder / "motorcycle_disp.npz").exists():
        raise FileNotFoundError(f"this scikit-image came without its Motorcycle stereo pair (looked in {folder})")
    left, right, disparity = skimage.data.stereo_motorcycle()
    # Its docstring says that NaN marks the unmeasured pixels; the file holds +inf, as Middlebury's do.
    truth = torch.from_numpy(disparity[:, :740].copy())[None, None].float() + DOFFS
    truth[truth.isinf()] = 0
    return Pair(_image(left, device), _image(right, device), truth.to(device))


def _image(pixels, device):
    return torch.from_numpy(pixels[:, :740].copy()).permute(2, 0, 1)[None].to(device).float() / 255
