import torch
import torch.nn as nn


class AutoencoderCriterion(nn.Module):
    def __init__(self, logvar_init=0.0, kl_weight=1e-6):
        super().__init__()
        self.logvar = nn.Parameter(torch.tensor(logvar_init))
        self.kl_weight = kl_weight

    @staticmethod
    def kl(mean, logvar):
        return 0.5 * (mean.pow(2) + logvar.exp() - 1.0 - logvar).mean(dim=(1, 2, 3))

    def forward(self, inputs, recon, posterior, weights=None):
        rec = (inputs - recon).abs()
        logvar = self.logvar.to(rec.dtype)
        nll = rec / logvar.exp() + logvar
        if weights is not None:
            nll = nll * weights
        nll = torch.sum(nll) / nll.shape[0]
        kl = self.kl(*posterior).mean()
        return nll + self.kl_weight * kl, {"nll": nll.detach(), "kl": kl.detach()}


if __name__ == "__main__":
    torch.manual_seed(0)
    x = (torch.rand(8, 3, 128, 128) * 2 - 1).half()
    y = (x + 0.4 * torch.randn_like(x)).half()
    post = (torch.randn(8, 4, 16, 16).half(), 0.1 * torch.randn(8, 4, 16, 16).half())
    crit = AutoencoderCriterion()
    lo, _ = crit(x, y, post)
    hi, _ = crit(x.float(), y.float(), tuple(p.float() for p in post))
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
