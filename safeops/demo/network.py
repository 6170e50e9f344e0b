"""A small stereo network: match features along the scanline, correct the matches with context, upsample.

It is meant to be ordinary: 11,000 parameters, autocast-friendly layers, a ReLU at the end.
"""

import torch
import torch.nn.functional as F
from torch import nn

CANDIDATES = 16  # shifts tried: 0..15 cells of 4 pixels, which covers the pair's 7..60 pixels
SCALE = 64.0  # pixels in one unit of the network's output


class StereoNet(nn.Module):
    """Left and right image (1, 3, H, W) to D = d + doffs in pixels (1, 1, H, W), at least 0."""

    def __init__(self, features=12, width=8):
        super().__init__()
        self.features = nn.Conv2d(12, features, 3, padding=1)
        self.sharpness = nn.Parameter(torch.tensor(20.0))
        self.mix = nn.Conv2d(CANDIDATES + features, width, 1)
        self.mix_norm = nn.GroupNorm(4, width)
        wide = 2 * width
        self.context = nn.ModuleList(
            [
                nn.Conv2d(width, wide, 3, stride=2, padding=1),
                nn.Conv2d(wide, wide, 3, padding=2, dilation=2),
                nn.Conv2d(wide, wide, 3, padding=4, dilation=4),
            ]
        )
        self.context_norm = nn.ModuleList([nn.GroupNorm(4, wide) for _ in self.context])
        self.expand = nn.Conv2d(wide, width, 1)
        self.vote = nn.Conv2d(width, CANDIDATES, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, left, right):
        # Both images to cells of 4x4 pixels: (2, 12, h, w).
        cells = F.pixel_unshuffle(F.avg_pool2d(torch.cat([left, right]) - 0.45, 2), 2)
        a, b = self._local(self.features(cells)).chunk(2)
        matches = self._correlate(a, b)  # (1, CANDIDATES, h, w)
        x = F.relu(self.mix_norm(self.mix(torch.cat([2 * matches, a], 1))))
        y = F.relu(self.context_norm[0](self.context[0](x)))
        for conv, norm in zip(self.context[1:], self.context_norm[1:]):
            y = y + F.relu(norm(conv(y)))
        y = F.interpolate(self.expand(y), size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = F.relu(x + y)
        # The expected shift under a softmax over the candidates, plus a correction.
        p = torch.softmax(self.sharpness * matches + self.vote(x), 1)
        shift = torch.arange(CANDIDATES, device=p.device, dtype=p.dtype).view(1, -1, 1, 1) * (4 / SCALE)
        correction = self.head(x)
        disparity = SCALE * ((p * shift).sum(1, keepdim=True) + correction)
        disparity = F.interpolate(disparity, scale_factor=4, mode="bilinear", align_corners=False)
        # Half under autocast, as convolutions are: on CUDA softmax and interpolation return fp32.
        return F.relu(disparity.to(correction.dtype))  # D = 0 is infinitely far, D < 0 impossible

    @staticmethod
    def _local(x):
        """Unit feature vectors, free of the local mean (the two exposures differ a little)."""
        x = x - _box(x, 9)
        return F.normalize(x, dim=1, eps=1e-3)

    @staticmethod
    def _correlate(a, b):
        """Cosine of a's cell with b's cell k to the left, for every k; averaged over 5x5 cells."""
        width = a.shape[-1]
        shifts = [F.pad((a[..., k:] * b[..., : width - k]).sum(1, keepdim=True), (k, 0)) for k in range(CANDIDATES)]
        return _box(torch.cat(shifts, 1), 5)


def _box(x, size):
    """Mean over the window of `size` x `size` cells, without cells outside the image. Each axis is pooled by itself,
    as 2D pooling is slow on a CPU."""
    for window in ((size, 1), (1, size)):
        x = F.avg_pool2d(x, window, 1, tuple(n // 2 for n in window), count_include_pad=False)
    return x
