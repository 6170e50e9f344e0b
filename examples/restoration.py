"""Restores a noisy photograph with a small network and the losses L1 and SSIM; `mask=` leaves out dead pixels.

    python examples/restoration.py [STEPS]

The photograph is scikit-image's astronaut. Dead pixels are NaN in the target.
"""

import argparse

import torch

import safeops


def load():
    """Returns (photograph (1, 3, H, W) in [0, 1], NaN at dead pixels; alive (1, 1, H, W) bool)."""
    import skimage.data

    image = torch.from_numpy(skimage.data.astronaut()).permute(2, 0, 1)[None, :, :192, 96:352].float() / 255
    alive = torch.rand(1, 1, *image.shape[2:], generator=torch.Generator().manual_seed(1)) > 0.05
    return image.masked_fill(~alive, float("nan")), alive


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, 1, 1),
        torch.nn.GELU(),
        torch.nn.Conv2d(16, 16, 3, 1, 1),
        torch.nn.GELU(),
        torch.nn.Conv2d(16, 3, 3, 1, 1),
    )


def train(steps=100):
    """Returns the loss of each step."""
    torch.manual_seed(0)
    (image, alive), model = load(), network()
    noisy = image.nan_to_num(0.5) + 0.1 * torch.randn(image.shape)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            restored = model(noisy)
            total, *_ = safeops.combine_losses(
                {
                    "l1": safeops.l1_loss(restored, image, mask=alive),
                    "ssim": (safeops.ssim_loss(restored, image, mask=alive), 0.5),
                }
            )
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    print(f"PSNR {safeops.psnr(restored, image, mask=alive).item():.1f} dB")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=100)
    found = train(parser.parse_args().steps)
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
