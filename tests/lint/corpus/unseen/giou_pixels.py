import torch
from torch import nn


def _area(boxes):
    wh = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0)
    return wh[..., 0] * wh[..., 1]


def generalized_iou(a, b):
    overlap = torch.cat([torch.max(a[..., :2], b[..., :2]), torch.min(a[..., 2:], b[..., 2:])], -1)
    hull = torch.cat([torch.min(a[..., :2], b[..., :2]), torch.max(a[..., 2:], b[..., 2:])], -1)
    inter = _area(overlap)
    union = (_area(a) + _area(b) - inter).clamp(min=1.0)
    enclosing = _area(hull).clamp(min=1.0)
    return inter / union - (enclosing - union) / enclosing


class GIoUCriterion(nn.Module):
    def __init__(self, reduction="mean", weight=2.0):
        super().__init__()
        self.reduction, self.weight = reduction, weight

    def forward(self, outputs, targets):
        loss = 1.0 - generalized_iou(outputs["pred_boxes"], targets["boxes"])
        if self.reduction == "mean":
            loss = loss.mean()
        elif self.reduction == "sum":
            loss = loss.sum()
        return self.weight * loss


if __name__ == "__main__":
    gt = torch.tensor([[30.0, 40.0, 410.0, 420.0], [100.0, 80.0, 180.0, 200.0]]).half()
    pr = (gt + torch.tensor([4.0, -6.0, 9.0, 3.0])).half()
    crit = GIoUCriterion()
    lo = crit({"pred_boxes": pr}, {"boxes": gt})
    hi = crit({"pred_boxes": pr.double()}, {"boxes": gt.double()})
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
