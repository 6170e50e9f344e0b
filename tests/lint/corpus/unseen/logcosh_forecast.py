import torch
import torch.nn as nn


class LogCoshLoss(nn.Module):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, y_hat, y, sample_weight=None):
        residual = y_hat - y
        loss = torch.log(torch.cosh(residual))
        if sample_weight is not None:
            loss = loss * sample_weight
        return getattr(loss, self.reduction)()


class ForecastObjective(LogCoshLoss):
    def __init__(self, horizon, discount=0.97, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("decay", discount ** torch.arange(float(horizon)))

    def forward(self, y_hat, y, sample_weight=None):
        return super().forward(y_hat, y, self.decay.to(y_hat.dtype))


if __name__ == "__main__":
    torch.manual_seed(0)
    y = (60 + 20 * torch.randn(4, 24)).half()
    y_hat = (y + 6 * torch.randn(4, 24)).half()
    crit = ForecastObjective(24)
    lo = crit(y_hat, y)
    hi = crit(y_hat.float(), y.float())
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
