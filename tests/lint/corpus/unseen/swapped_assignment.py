import torch
import torch.nn as nn
import torch.nn.functional as F


class SwappedPredictionLoss(nn.Module):
    def __init__(self, dim, n_prototypes, epsilon=0.05, temperature=0.1, n_iters=3):
        super().__init__()
        self.prototypes = nn.Linear(dim, n_prototypes, bias=False)
        self.epsilon = epsilon
        self.temperature = temperature
        self.n_iters = n_iters

    @torch.no_grad()
    def assign(self, scores):
        q = torch.exp(scores / self.epsilon).t()
        k, b = q.shape
        for _ in range(self.n_iters):
            q = q / q.sum(dim=1, keepdim=True) / k
            q = q / q.sum(dim=0, keepdim=True) / b
        return (q * b).t()

    def forward(self, z_a, z_b):
        s_a, s_b = self.prototypes(z_a), self.prototypes(z_b)
        q_a, q_b = self.assign(s_a), self.assign(s_b)
        log_a = F.log_softmax(s_a / self.temperature, dim=1)
        log_b = F.log_softmax(s_b / self.temperature, dim=1)
        return -0.5 * ((q_a * log_b).sum(1).mean() + (q_b * log_a).sum(1).mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    crit = SwappedPredictionLoss(32, 12)
    with torch.no_grad():
        crit.prototypes.weight.copy_(F.normalize(crit.prototypes.weight, dim=1))
    base = crit.prototypes.weight.detach()[torch.arange(24) % 12]
    za, zb = (F.normalize(base + 0.1 * torch.randn(24, 32), dim=1) for _ in range(2))
    hi = crit(za, zb)
    with torch.autocast("cpu", torch.float16):
        lo = crit(za, zb)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
