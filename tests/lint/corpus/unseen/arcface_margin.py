import torch
import torch.nn as nn
import torch.nn.functional as F


class AngularMarginLoss(nn.Module):
    def __init__(self, scale=64.0, margin=0.5):
        super().__init__()
        self.s = scale
        self.m = margin
        self.eps = 1e-7

    def forward(self, cosine, labels):
        cosine = cosine.clamp(-1.0 + self.eps, 1.0 - self.eps)
        target = cosine.gather(1, labels[:, None])
        theta = torch.acos(target)
        shifted = torch.cos(theta + self.m)
        logits = cosine.scatter(1, labels[:, None], shifted)
        return F.cross_entropy(self.s * logits, labels)


if __name__ == "__main__":
    torch.manual_seed(0)
    cos = (0.1 * torch.randn(6, 10)).half()
    lab = torch.arange(6)
    cos[torch.arange(6), lab] = torch.tensor([0.61, 0.74, 0.9999, 0.88, 0.52, 0.93]).half()
    grads = []
    for dt in (torch.float16, torch.float32):
        c = cos.detach().to(dt).requires_grad_()
        AngularMarginLoss()(c, lab).backward()
        grads.append(c.grad)
    bad = not grads[0].isfinite().all() and grads[1].isfinite().all()
    print(grads[0].abs().max().item(), grads[1].abs().max().item(), "BROKEN" if bad else "fine")
