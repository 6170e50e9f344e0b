import torch
import torch.nn as nn


def tversky_index(prob, target, alpha, beta, smooth):
    prob, target = prob.flatten(1), target.flatten(1)
    tp = (prob * target).mean(1)
    fn = ((1 - prob) * target).mean(1)
    fp = (prob * (1 - target)).mean(1)
    return (tp + smooth) / (tp + alpha * fn + beta * fp + smooth)


class FocalTverskyLoss(nn.Module):
    def __init__(self, alpha=0.7, beta=0.3, gamma=0.75, smooth=0.01):
        super().__init__()
        self.alpha = alpha
        self.beta = beta
        self.gamma = gamma
        self.smooth = smooth

    def forward(self, inputs, targets):
        ti = tversky_index(inputs.sigmoid(), targets, self.alpha, self.beta, self.smooth)
        return (1 - ti).pow(self.gamma).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    target = (torch.rand(2, 1, 48, 48) > 0.5).half()
    logits = ((2 * target - 1) * 9.5).half()
    crit = FocalTverskyLoss()
    grads = []
    for dt in (torch.float16, torch.float32):
        x = logits.detach().to(dt).requires_grad_()
        crit(x, target.to(dt)).backward()
        grads.append(x.grad)
    bad = not grads[0].isfinite().all() and grads[1].isfinite().all()
    print(grads[0].abs().max().item(), grads[1].abs().max().item(), "BROKEN" if bad else "fine")
