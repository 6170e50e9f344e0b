import torch
from torch import nn


class NegSISNR(nn.Module):
    def __init__(self, zero_mean=True, eps=1e-8, reduction="mean"):
        super().__init__()
        self.zero_mean = zero_mean
        self.eps = eps
        self.reduction = reduction

    def forward(self, est, ref):
        if self.zero_mean:
            est = est - est.mean(-1, keepdim=True)
            ref = ref - ref.mean(-1, keepdim=True)
        dot = (est * ref).sum(-1, keepdim=True)
        energy = ref.pow(2).sum(-1, keepdim=True) + self.eps
        proj = dot * ref / energy
        noise = est - proj
        ratio = proj.pow(2).sum(-1) / (noise.pow(2).sum(-1) + self.eps)
        snr = 10 * torch.log10(ratio + self.eps)
        return -snr.mean() if self.reduction == "mean" else -snr


if __name__ == "__main__":
    torch.manual_seed(0)
    ref = torch.sin(torch.arange(800) * 0.07).repeat(3, 1) * torch.tensor([[0.5], [0.0], [0.3]])
    est = (ref + 0.05 * torch.randn_like(ref)).half()
    ref = ref.half()
    lo = NegSISNR()(est, ref)
    hi = NegSISNR()(est.float(), ref.float())
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
