import torch
import torch.nn as nn


class CoxPHLoss(nn.Module):
    def __init__(self, l2=0.0):
        super().__init__()
        self.l2 = l2

    @staticmethod
    def _risk_set(log_h):
        return torch.log(torch.cumsum(torch.exp(log_h), dim=0))

    def forward(self, log_h, durations, events, params=()):
        order = torch.argsort(durations, descending=True)
        log_h = log_h.view(-1)[order]
        observed = events[order].bool()
        if not observed.any():
            return log_h.sum() * 0
        loss = -(log_h - self._risk_set(log_h))[observed].mean()
        return loss + self.l2 * sum(p.pow(2).sum() for p in params)


if __name__ == "__main__":
    torch.manual_seed(0)
    risk = (4.0 + 1.2 * torch.randn(1200, 1)).half()
    days = torch.rand(1200) * 3000
    seen = torch.rand(1200) < 0.4
    lo = CoxPHLoss()(risk, days, seen)
    hi = CoxPHLoss()(risk.float(), days, seen)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
