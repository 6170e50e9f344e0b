"""Segments coins on a table with a focal loss of the logits and a dice loss of their softmax; `mask=` leaves out pixels
of unknown class.

    python examples/segmentation.py [STEPS]

The photograph is scikit-image's. A pixel belongs to a coin if it is clearly brighter than Otsu's threshold, to the
table if it is clearly darker; between the two its class is unknown.
"""

import argparse

import torch

import safeops


def load():
    """Returns (image (1, 1, H, W), class of each pixel (1, H, W), known (1, H, W) bool)."""
    import skimage.data
    import skimage.filters

    image = torch.from_numpy(skimage.data.coins()).float()[None, None] / 255
    threshold = skimage.filters.threshold_otsu(image.numpy())
    target = (image[:, 0] > threshold).long()
    return image, target, (image[:, 0] - threshold).abs() > 0.06


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, 1, 1),
        torch.nn.GELU(),
        torch.nn.Conv2d(16, 16, 3, 1, 1),
        torch.nn.GELU(),
        torch.nn.Conv2d(16, 2, 1),
    )


def train(steps=60):
    """Returns the loss of each step."""
    torch.manual_seed(0)
    (image, target, known), model = load(), network()
    noisy = image + 0.1 * torch.randn(image.shape)
    coins = torch.nn.functional.one_hot(target, 2).movedim(-1, 1).float()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(noisy)
            dice = safeops.dice_loss(safeops.masked_softmax(logits, dim=1), target, mask=known)
            focal = safeops.sigmoid_focal_loss(logits, coins, mask=known[:, None])
        total, *_ = safeops.combine_losses({"dice": dice, "focal": (focal, 2.0)})
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=60)
    found = train(parser.parse_args().steps)
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
