"""Predicts depth from a stereo pair, where 7 % of the pixels were not measured, with masked losses under autocast.

    python examples/masked_depth.py [STEPS]

The pair is scikit-image's Motorcycle. The targets keep the unmeasured disparities, which are 0, and their depths, which
are inf: `mask=` is all that the losses need. `combine_losses` adds the two losses, and leaves out one that is not
finite.
"""

import argparse

import torch

import safeops
from safeops.demo.data import FOCAL_BASELINE, load


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(6, 16, 5, 2, 2),
        torch.nn.GELU(),
        torch.nn.Conv2d(16, 32, 5, 2, 2),
        torch.nn.GELU(),
        torch.nn.Conv2d(32, 1, 3, 1, 1),
        torch.nn.Upsample(scale_factor=4, mode="bilinear"),
        torch.nn.Softplus(),
    )


def train(steps=100):
    """Returns the loss of each step."""
    torch.manual_seed(0)
    pair, model = load(), network()
    images = torch.cat([pair.left, pair.right], 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            disparity = model(images) * 50
            depth = FOCAL_BASELINE * safeops.safe_reciprocal(disparity)
            total, *_ = safeops.combine_losses(
                {
                    "disparity": safeops.charbonnier_loss(disparity, pair.truth, mask=pair.known),
                    "depth": (safeops.l1_loss(depth, FOCAL_BASELINE / pair.truth, mask=pair.known), 5.0),
                },
                nonfinite="skip",
            )
        optimizer.zero_grad()
        total.backward()
        safeops.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=100)
    found = train(parser.parse_args().steps)
    print(f"loss {found[0]:.2f} -> {found[-1]:.2f}")
