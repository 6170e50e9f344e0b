import torch
import torch.nn as nn


def gaussian_focal_loss(pred, gaussian_target, alpha=2.0, gamma=4.0):
    eps = 1e-12
    pos_weights = gaussian_target.eq(1).to(pred.dtype)
    neg_weights = (1 - gaussian_target).pow(gamma)
    pos_loss = -(pred + eps).log() * (1 - pred).pow(alpha) * pos_weights
    neg_loss = -(1 - pred + eps).log() * pred.pow(alpha) * neg_weights
    return pos_loss + neg_loss


class HeatmapLoss(nn.Module):
    def __init__(self, alpha=2.0, gamma=4.0, loss_weight=1.0):
        super().__init__()
        self.alpha, self.gamma, self.loss_weight = alpha, gamma, loss_weight

    def forward(self, logits, heatmap, level_weight=1.0):
        pred = logits.sigmoid()
        loss = gaussian_focal_loss(pred, heatmap, self.alpha, self.gamma)
        return self.loss_weight * level_weight * loss.mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    yy, xx = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    hm = torch.exp(-((xx - 11) ** 2 + (yy - 20) ** 2) / 8).half()[None, None]
    logits = (torch.randn(1, 1, 32, 32) - 4).half()
    logits[0, 0, 20, 11] = 9.5
    crit = HeatmapLoss()
    lo = crit(logits, hm)
    hi = crit(logits.float(), hm.float())
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
