import torch


def log_f0(f0, floor=1e-9):
    return torch.log(f0 + floor)


def voiced_pitch_loss(pred_f0, target_f0, voiced, lengths=None):
    weight = voiced.to(pred_f0.dtype)
    if lengths is not None:
        steps = torch.arange(pred_f0.size(1), device=pred_f0.device)
        weight = weight * (steps[None] < lengths[:, None]).to(weight.dtype)
    err = (log_f0(pred_f0) - log_f0(target_f0)).abs()
    return (err * weight).sum() / weight.sum().clamp(min=1)


class ProsodyLoss:
    def __init__(self, pitch_weight=1.0, energy_weight=0.1):
        self.pitch_weight = pitch_weight
        self.energy_weight = energy_weight

    def __call__(self, out, batch):
        f0 = torch.relu(out["f0"])
        pitch = voiced_pitch_loss(f0, batch["f0"], batch["f0"] > 0, batch["lengths"])
        energy = (out["energy"] - batch["energy"]).abs().mean()
        return self.pitch_weight * pitch + self.energy_weight * energy


if __name__ == "__main__":
    torch.manual_seed(0)
    f0 = 120 + 60 * torch.rand(2, 30)
    f0[:, ::5] = 0
    out = {"f0": (f0 + 5 * torch.randn(2, 30) - 8).half(), "energy": torch.rand(2, 30).half()}
    batch = {"f0": f0.half(), "energy": torch.rand(2, 30).half()}
    up = lambda d: {k: v.float() for k, v in d.items()}  # noqa: E731
    n = {"lengths": torch.tensor([30, 24])}
    lo, hi = ProsodyLoss()(out, {**batch, **n}), ProsodyLoss()(up(out), {**up(batch), **n})
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
