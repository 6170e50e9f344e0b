"""Losses as people write them that are right: nothing here may be named. Nothing here is run."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def clamped_dice_loss(probs, targets, eps=1e-3):
    probs, targets = probs.float(), targets.float()
    overlap = (probs * targets).sum((2, 3))
    return 1 - ((2 * overlap + eps) / (probs.sum((2, 3)) + targets.sum((2, 3)) + eps)).mean()


def focal_loss(logits, targets, gamma=2.0, alpha=0.25):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (ce * (1 - p_t) ** gamma).mean()


def masked_l1_loss(pred, target, mask):
    error = torch.where(mask, (pred - target).abs(), 0)
    return error.sum() / mask.sum().clamp(min=1)


def optional_mask_loss(pred, target, mask=None):
    error = (pred - target).abs()
    if mask is not None:
        error = torch.where(mask, error, 0)
    return error.mean()


def probabilities_loss(logits, labels, mask):
    p = logits.sigmoid()
    return ((p - labels) * mask).mean()


def one_hot_loss(logits, target, valid):
    y = F.one_hot(target, logits.shape[1]) * valid.unsqueeze(-1)
    return -(F.log_softmax(logits, dim=-1) * y.float()).sum(-1).mean()


def stable_softplus_loss(x):
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).mean()


def logsumexp_loss(x):
    top = x.max(dim=-1, keepdim=True).values
    return (top.squeeze(-1) + torch.log(torch.exp(x - top).sum(-1))).mean()


def charbonnier_loss(x, y, eps=1e-3):
    return torch.sqrt((x.float() - y.float()) ** 2 + eps**2).mean()


def capped_penalty(x):
    y = x * 3
    y[y > 2] = 2
    return y.mean()


def squared_penalty(x):
    y = x.float().pow(2)
    y[y > 4] = 4
    return y.mean()


def clipped_penalty(x):
    y = x + 1
    y.clamp_(0, 1)
    y *= 2
    return y.mean()


def host_metric_loss(x, y):
    keep = (y > 0).cpu()  # noqa: SO301
    return x.cpu()[keep].mean()  # noqa: SO301


class PolyLoss(nn.Module):
    def __init__(self, epsilon=1.0):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, reduction="none")
        return (ce + self.epsilon * (1 - torch.exp(-ce))).mean()


def rbf_loss(x, y, sigma=1.0):
    d = torch.cdist(x.float(), y.float())
    return torch.exp(-d.square() / (2 * sigma**2)).mean()


def guarded_ratio_loss(x, mask):
    n = mask.sum()
    if n == 0:  # noqa: SO303
        return x.sum() * 0
    return torch.where(mask, x, 0).sum() / n


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return F.softmax(scores, dim=-1) @ v


def causal_attention(q: torch.Tensor, k: torch.Tensor):
    scores = q @ k.transpose(-2, -1)
    future = torch.ones(q.size(-2), k.size(-2)).triu(1).bool()
    return scores.masked_fill(future, float("-inf")).softmax(-1)


@torch.no_grad()
def ema_penalty(average, x):
    average[average.isnan()] = 0
    average.mul_(0.9).add_(x, alpha=0.1)
    return average.square().mean(dtype=torch.float32)


def ignoring_dice_loss(logits, y_true, ignore_index=255):
    p = logits.float().log_softmax(dim=1).exp()
    mask = y_true != ignore_index
    classes = F.one_hot((y_true * mask).long(), logits.shape[1])
    y_true = y_true * mask
    return (p - classes.movedim(-1, 1)).abs().mean() + y_true.float().mean()


def one_hot_code_loss(logits, index):
    valid = (index >= 0).unsqueeze(-1)
    code = torch.zeros(*index.shape, 4).scatter(-1, index.unsqueeze(-1).clamp(min=0), 1) * valid
    return F.binary_cross_entropy_with_logits(logits, code)


def tempered_loss(logits, target, t1=0.8):
    return (_exp_t(logits.float(), t1) * target).mean()


def _exp_t(u, t):
    if t == 1.0:
        return u.exp()
    return torch.relu(1 + (1 - t) * u)


def counted_loss(error, mask):
    n = mask.sum()
    kept = torch.where(mask, error, 0).sum()
    return 0 if mask.sum() == 0 else kept / n  # noqa: SO303


class RecordedLoss(nn.Module):
    def forward(self, x, y):
        loss = (x - y).abs().mean()
        with torch.no_grad():
            self.average = loss.item()
        return loss


def projection_loss(x, y, eps=1e-3):
    x, y = x.float(), y.float()
    alpha = (x * y).sum(-1) / (y.square().sum(-1) + eps)
    return (alpha.unsqueeze(-1) * y - x).abs().mean()


def variance_loss(x):
    return F.relu(1 - x.float().std(0)).mean()


def difference_loss(a, b):
    return (a.float().pow(2).mean() - b.float().pow(2).mean()).abs()
