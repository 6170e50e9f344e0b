import torch
from torch import nn


def pearson(x, y):
    n = x.shape[-1]
    sum_x, sum_y = x.sum(-1), y.sum(-1)
    sum_xy = (x * y).sum(-1)
    sum_x2 = x.pow(2).sum(-1)
    sum_y2 = y.pow(2).sum(-1)
    num = n * sum_xy - sum_x * sum_y
    den = torch.sqrt((n * sum_x2 - sum_x.pow(2)) * (n * sum_y2 - sum_y.pow(2)))
    return num / den


class NegPearsonLoss(nn.Module):
    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = weight

    def forward(self, pulse_pred, pulse_gt):
        return self.weight * (1 - pearson(pulse_pred, pulse_gt)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    t = torch.arange(160) / 30.0
    gt = (80 + 15 * torch.sin(2 * torch.pi * 1.2 * t)).repeat(3, 1).half()
    pred = (gt + 8 * torch.randn(3, 160)).half()
    lo = NegPearsonLoss()(pred, gt)
    hi = NegPearsonLoss()(pred.double(), gt.double())
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
