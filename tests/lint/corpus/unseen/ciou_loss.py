import math

import torch
import torch.nn as nn


def bbox_ciou(pred, target, eps=1e-7):
    px1, py1, px2, py2 = pred.unbind(-1)
    tx1, ty1, tx2, ty2 = target.unbind(-1)
    w1, h1 = px2 - px1, py2 - py1
    w2, h2 = tx2 - tx1, ty2 - ty1

    inter = (torch.min(px2, tx2) - torch.max(px1, tx1)).clamp(min=0) * (
        torch.min(py2, ty2) - torch.max(py1, ty1)
    ).clamp(min=0)
    iou = inter / (w1 * h1 + w2 * h2 - inter)

    cw = torch.max(px2, tx2) - torch.min(px1, tx1)
    ch = torch.max(py2, ty2) - torch.min(py1, ty1)
    rho2 = ((tx1 + tx2 - px1 - px2) ** 2 + (ty1 + ty2 - py1 - py2) ** 2) / 4
    v = (4 / math.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)) ** 2
    with torch.no_grad():
        alpha = v / (v - iou + (1 + eps))
    return iou - (rho2 / (cw**2 + ch**2) + alpha * v)


class CIoULoss(nn.Module):
    def __init__(self, loss_weight=1.0):
        super().__init__()
        self.loss_weight = loss_weight

    def forward(self, pred, target):
        return self.loss_weight * (1 - bbox_ciou(pred, target)).mean()


if __name__ == "__main__":
    t = torch.tensor([[0.1, 0.2, 0.4, 0.7], [0.25, 0.25, 0.5, 0.75], [0.3, 0.1, 0.8, 0.6]]).half()
    p = (t + torch.tensor([[0.01], [0.0], [0.02]])).half()
    lo = CIoULoss()(p, t)
    hi = CIoULoss()(p.float(), t.float())
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
