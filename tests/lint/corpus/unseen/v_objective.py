import torch
import torch.nn as nn


def cosine_alphas_cumprod(n, s=0.008):
    t = torch.linspace(0, n, n + 1, dtype=torch.float64) / n
    acp = torch.cos((t + s) / (1 + s) * torch.pi * 0.5) ** 2
    betas = (1 - acp[1:] / acp[:-1]).clamp(0, 0.999)
    return torch.cumprod(1.0 - betas, dim=0).float()


class DiffusionObjective(nn.Module):
    def __init__(self, n_steps=1000, objective="pred_v", min_snr_gamma=None):
        super().__init__()
        self.objective = objective
        self.gamma = min_snr_gamma
        self.register_buffer("alphas_cumprod", cosine_alphas_cumprod(n_steps))

    def loss_weight(self, t):
        acp = self.alphas_cumprod[t]
        snr = acp / (1 - acp)
        clipped = snr if self.gamma is None else snr.clamp(max=self.gamma)
        if self.objective == "pred_noise":
            return clipped / snr
        return clipped / (snr + 1) if self.objective == "pred_v" else clipped

    def forward(self, model_out, target, t):
        per_sample = (model_out - target).pow(2).flatten(1).mean(1)
        return (per_sample * self.loss_weight(t)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    v = torch.randn(6, 4, 8, 8).half()
    out = (v + 0.5 * torch.randn(6, 4, 8, 8)).half()
    t = torch.tensor([2, 140, 333, 610, 800, 950])
    lo = DiffusionObjective().half()(out, v, t)
    hi = DiffusionObjective()(out.float(), v.float(), t)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
