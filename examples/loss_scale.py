"""Trains with a loss scale that doubles until gradients overflow in fp16. `safeops trace --html` shows it coming.

    safeops trace --html trace.html examples/loss_scale.py [STEPS]

It has the demo's network and loss. GradScaler's scale begins at 256 and doubles every eight steps (by default every
2,000), so that within 60 steps the gradients reach 65504. The scaler then skips a step, and halves the scale.
"""

import sys

import torch

from safeops.demo import data, losses, network


def train(steps=60):
    """Returns the loss of each step."""
    torch.manual_seed(0)
    pair, model = data.load(), network.StereoNet()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=8)
    values = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = losses.with_safeops(model(pair.left, pair.right), pair.truth)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(loss.item())
    return values


if __name__ == "__main__":
    found = train(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
    print(f"loss {found[0]:.2f} -> {found[-1]:.2f}")
