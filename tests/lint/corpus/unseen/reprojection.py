import torch
import torch.nn as nn


class ReprojectionLoss(nn.Module):
    def __init__(self, focal=1.2, min_depth=0.05, delta=0.1):
        super().__init__()
        self.focal = focal
        self.min_depth = min_depth
        self.delta = delta

    def project(self, pts):
        return self.focal * pts[..., :2] / pts[..., 2:]

    def forward(self, pred_pts, gt_uv, present):
        pts = pred_pts * present[..., None].to(pred_pts.dtype)
        front = present & (pts[..., 2] > self.min_depth)
        err = (self.project(pts) - gt_uv).abs()
        huber = torch.where(err < self.delta, 0.5 * err**2, self.delta * (err - 0.5 * self.delta))
        loss = torch.where(front[..., None], huber, torch.zeros_like(huber))
        return loss.sum() / front.sum().clamp(min=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    pts = torch.randn(2, 7, 3) * 0.3 + torch.tensor([0.0, 0.0, 2.5])
    uv = (1.2 * pts[..., :2] / pts[..., 2:] + 0.05 * torch.randn(2, 7, 2)).half()
    pts = pts.half()
    present = torch.arange(7)[None] < torch.tensor([[7], [4]])
    crit = ReprojectionLoss()
    x = pts.clone().requires_grad_()
    loss = crit(x, uv, present)
    loss.backward()
    y = pts.double().requires_grad_()
    ref = crit(y[present], uv.double()[present], present[present])
    ref.backward()
    bad = loss.isfinite() and x.grad.isnan().any() and y.grad.isfinite().all()
    print(loss.item(), ref.item(), "BROKEN" if bad else "fine")
