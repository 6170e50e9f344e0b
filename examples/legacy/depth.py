"""Predicts depth from a picture, where some pixels were not measured. The loss multiplies by a mask, as is usual.

python examples/legacy/depth.py [STEPS]        # NaN: inf times 0, and more pixels than fp16 can count
safeops run examples/legacy/depth.py [STEPS]   # trains
"""

import sys

import torch
from torch import nn

SIZE = 320


def data():
    """Returns (picture (1, 3, H, W), depth (1, 1, H, W), inf where the sensor saw nothing)."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    disparity = (0.6 - x.square() - y.square()).clamp(min=0)
    picture = torch.stack([x, y, disparity])[None] + 0.05 * torch.randn(1, 3, SIZE, SIZE)
    return picture, 1 / (4 * disparity[None, None])


def main(steps=20):
    torch.manual_seed(0)
    picture, target = data()
    model = nn.Sequential(nn.Conv2d(3, 16, 5, 2, 2), nn.GELU(), nn.Conv2d(16, 1, 3, 1, 1), nn.Upsample(scale_factor=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    target = target.half()
    valid = target < 10
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            e = (model(picture) - target).abs()
            m = valid.to(e.dtype)
            loss = (e * m).sum() / m.sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
