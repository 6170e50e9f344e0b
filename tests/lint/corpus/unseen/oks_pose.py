import torch
import torch.nn as nn

SIGMAS = [0.026, 0.025, 0.035, 0.079, 0.072, 0.062, 0.107, 0.087, 0.089]


class KeypointOKSLoss(nn.Module):
    def __init__(self, sigmas=SIGMAS):
        super().__init__()
        self.register_buffer("sigmas", torch.tensor(sigmas))

    def forward(self, pred_kpts, gt_kpts, visible, gt_boxes):
        d = (pred_kpts - gt_kpts).pow(2).sum(-1)
        area = gt_boxes[:, 2:].prod(dim=1, keepdim=True)
        k = (2 * self.sigmas.to(d.dtype)) ** 2
        e = d / (2 * area * k)
        vis = visible.to(d.dtype)
        per_person = ((1 - torch.exp(-e)) * vis).sum(1) / vis.sum(1).clamp(min=1)
        return per_person.mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    boxes = torch.tensor([[320.0, 300.0, 260.0, 420.0], [700.0, 310.0, 240.0, 390.0]]).half()
    gt = (boxes[:, None, :2] + 90 * torch.randn(2, 9, 2)).half()
    pred = (gt + 14 * torch.randn(2, 9, 2)).half()
    vis = torch.ones(2, 9, dtype=torch.bool)
    crit = KeypointOKSLoss()
    lo = crit(pred, gt, vis, boxes)
    hi = crit(pred.float(), gt.float(), vis, boxes.float())
    print(lo.item(), hi.item(), "BROKEN" if abs(lo - hi) > 0.1 * hi else "fine")
