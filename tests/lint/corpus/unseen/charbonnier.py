import torch
from torch import nn


class CharbonnierLoss(nn.Module):
    def __init__(self, loss_weight=1.0, reduction="mean", eps=1e-6):
        super().__init__()
        if reduction not in ("none", "mean"):
            raise ValueError(reduction)
        self.loss_weight = loss_weight
        self.reduction = reduction
        self.eps = eps

    def forward(self, pred, target, weight=None):
        diff = pred - target
        loss = torch.sqrt(diff * diff + self.eps**2)
        if weight is not None:
            loss = loss * weight
        if self.reduction == "mean":
            loss = loss.mean()
        return self.loss_weight * loss


if __name__ == "__main__":
    torch.manual_seed(0)
    hr = torch.rand(1, 3, 16, 16).half()
    sr = (hr + 0.002 * torch.randn(1, 3, 16, 16)).half()
    grads = []
    for dt in (torch.float16, torch.float32):
        x = sr.detach().to(dt).requires_grad_()
        CharbonnierLoss()(x, hr.to(dt)).backward()
        grads.append(x.grad)
    bad = not grads[0].isfinite().all() and grads[1].isfinite().all()
    print(grads[0].norm().item(), grads[1].norm().item(), "BROKEN" if bad else "fine")
