"""Segments disks in noise by cross entropy and a dice loss, which sums over all pixels of the batch in fp16.

python examples/legacy/segmentation.py [STEPS]        # NaN: each sum exceeds 65504, and inf / inf is NaN
safeops run examples/legacy/segmentation.py [STEPS]   # trains
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

SIZE, BATCH = 192, 6


def data():
    """Returns (pictures (N, 1, H, W), masks (N, 1, H, W) bool)."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    centers = torch.rand(BATCH, 2, 1, 1) - 0.5
    masks = ((x - centers[:, 0]).square() + (y - centers[:, 1]).square() < 0.8)[:, None]
    return masks.float() + 0.5 * torch.randn(masks.shape), masks


def dice_loss(logits, mask):
    p, y = torch.sigmoid(logits), mask.to(logits.dtype)
    intersection = (p * y).sum()
    return 1 - (2 * intersection + 1) / (p.sum() + y.sum() + 1)


def main(steps=20):
    torch.manual_seed(0)
    pictures, masks = data()
    model = nn.Sequential(nn.Conv2d(1, 8, 5, 1, 2), nn.GELU(), nn.Conv2d(8, 1, 3, 1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(pictures)
            loss = dice_loss(logits, masks) + F.binary_cross_entropy_with_logits(logits, masks.to(logits.dtype))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
