"""Losses as people write them, each with a line that goes NaN, inf or silently wrong under mixed precision.

The comment on such a line says which rules must name it; SO201: where they are asked for. Nothing here is run.
"""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor as T

# ---- metric learning


def contrastive(a, b, same, margin=1.0):
    a = F.normalize(a, p=2, dim=1)  # SO206?
    b = F.normalize(b, p=2, dim=1)  # SO206?
    d = _euclidean(a, b)
    loss = same * d.pow(2) + (1 - same) * F.relu(margin - d).pow(2)
    return loss.mean()


def _euclidean(a, b):
    return torch.sqrt((a - b).pow(2).sum(dim=1))  # SO205?


class CosineDistance(nn.Module):
    def forward(self, x1, x2):
        return 1 - (x1 * x2).sum(-1) / (x1.norm(dim=-1) * x2.norm(dim=-1))  # SO202


class NTXentLoss(nn.Module):
    def __init__(self, temperature=0.07):
        super().__init__()
        self.temperature = temperature

    def forward(self, z1, z2):
        sim = F.cosine_similarity(z1.unsqueeze(1), z2.unsqueeze(0), dim=-1) / self.temperature  # SO206?
        e = torch.exp(sim)  # SO213
        positives = e.diagonal()
        return -torch.log(positives / e.sum(dim=1)).mean()  # SO211


class LiftedStructureLoss(nn.Module):
    def forward(self, distances, negatives):
        return torch.log(torch.sum(torch.exp(1.0 - distances) * 1.0, dim=1)).mean()


def multi_similarity_loss(sim, positive, alpha=2.0, base=0.5):
    s = torch.where(positive, sim, base)
    return torch.log(1 + torch.exp(-alpha * (s - base))).mean() / alpha  # SO211?


def soft_margin_triplet_loss(d_ap, d_an):
    return torch.log1p(torch.exp(d_ap - d_an)).mean()  # SO211?


def angular_loss(embedding, center):
    cos = (embedding * center).sum(dim=-1)
    return torch.acos(cos).mean()  # SO204


# ---- segmentation


class DiceLoss(nn.Module):
    def __init__(self, smooth=1.0):
        super().__init__()
        self.smooth = smooth

    def forward(self, logits, targets):
        probs = torch.sigmoid(logits).view(-1)
        targets = targets.view(-1)
        intersection = (probs * targets).sum()  # SO210
        dice = (2.0 * intersection + self.smooth) / (probs.sum() + targets.sum() + self.smooth)
        return 1 - dice


def tversky_loss(pred, target, alpha=0.3, beta=0.7, eps=1e-7):
    dims = (0, 2, 3)
    tp = torch.sum(pred * target, dims)  # SO210
    fp = torch.sum(pred * (1 - target), dims)
    fn = torch.sum((1 - pred) * target, dims)
    return 1 - (tp / (tp + alpha * fp + beta * fn + eps)).mean()  # SO206?


def generalized_dice_loss(pred, target):
    volume = target.flatten(2).sum(-1)
    w = 1.0 / (volume * volume).clamp(min=1e-6)  # SO206?
    overlap = ((pred * target).flatten(2).sum(-1) * w).sum(-1)  # SO210
    total = ((pred + target).flatten(2).sum(-1) * w).sum(-1)
    return 1 - (2 * overlap / (total + overlap * 0 + 1e-5)).mean()  # SO206?


def mcc_loss(p, y):
    tp = torch.sum(p * y)
    tn = torch.sum((1 - p) * (1 - y))
    fp = torch.sum(p * (1 - y))
    fn = torch.sum((1 - p) * y)
    numerator = tp * tn - fp * fn  # SO210
    denominator = torch.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn) + 1.0)  # SO210
    return 1 - numerator / denominator


def iou_loss(pred, target):
    inter = torch.einsum("bchw,bchw->bc", pred, target)  # SO210
    union = pred.sum((2, 3)) + target.sum((2, 3)) - inter
    return 1 - ((inter + 1) / (union + 1)).mean()


class FocalTverskyLoss(nn.Module):
    def __init__(self, gamma=0.75):
        super().__init__()
        self.gamma = gamma

    def forward(self, p):
        return ((1 - p) ** self.gamma).mean()  # SO204


# ---- depth


def scale_invariant_loss(batch, prediction):
    mask = batch["depth"] > 0
    d = torch.log(prediction[mask]) - torch.log(batch["depth"][mask])  # SO101 SO204
    return d.pow(2).mean() - 0.85 * d.mean() ** 2  # SO201?


def silog_loss(pred, gt, variance_focus=0.85):
    d = torch.log(pred) - torch.log(gt)  # SO204
    return torch.sqrt((d**2).mean() - variance_focus * (d.mean() ** 2)) * 10.0  # SO201? SO204


def normalized_depth_loss(disp, depth):
    disp = (disp - disp.min()) / (disp.max() - disp.min())  # SO202
    lowest = depth.amin((1, 2), keepdim=True)
    depth = (depth - lowest) / (depth.amax((1, 2), keepdim=True) - lowest)  # SO202
    return (disp - depth).abs().mean()


def masked_depth_loss(batch, out):
    valid = batch["valid_mask"].float()
    error = (out["depth"] - batch["depth"]).abs() * valid  # SO105?
    return error.sum() / valid.sum()  # SO202?


def inverse_depth_loss(output, target):
    return (1.0 / output.depth - 1.0 / target).abs().mean()


def edge_smoothness_loss(disp, img):
    mean_disp = disp.mean(2, True).mean(3, True)
    disp = disp / mean_disp  # SO202?
    grad = (disp[:, :, :, :-1] - disp[:, :, :, 1:]).abs()
    weight = torch.exp(-(img[:, :, :, :-1] - img[:, :, :, 1:]).abs().mean(1, keepdim=True))
    return (grad * weight).mean()


# ---- images


def _ssim(x, y, window, c1=1e-4, c2=9e-4):
    mu_x, mu_y = F.conv2d(x, window), F.conv2d(y, window)
    sigma_x = F.conv2d(x * x, window) - mu_x.pow(2)  # SO212
    sigma_y = F.conv2d(y * y, window) - mu_y.pow(2)  # SO212
    sigma_xy = F.conv2d(x * y, window) - mu_x * mu_y  # SO212
    return ((2 * mu_x * mu_y + c1) * (2 * sigma_xy + c2)) / (
        (mu_x.pow(2) + mu_y.pow(2) + c1) * (sigma_x + sigma_y + c2)
    )


def ssim_loss(x, y, window):
    return 1 - _ssim(x, y, window).mean()


def normalize_tensor(features, eps=1e-10):
    norm = torch.sqrt(torch.sum(features**2, dim=1, keepdim=True))  # SO205
    return features / (norm + eps)  # SO206?


class PerceptualLoss(nn.Module):
    def forward(self, f0, f1):
        return sum((normalize_tensor(a) - normalize_tensor(b)).abs().mean() for a, b in zip(f0, f1))


def psnr_loss(x, y):
    mse = ((x - y) ** 2).mean()  # SO201?
    return -10 * torch.log10(1.0 / mse)  # SO202?


def gram_style_loss(features, target):
    n, c, h, w = features.shape
    flat = features.view(n, c, h * w)
    gram = flat @ flat.transpose(1, 2) / math.sqrt(c * h * w)  # SO201
    return ((gram - target) ** 2).sum()  # SO201?


# ---- sequences


def attention(q: T, k: T, v: T, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)  # SO207
    return torch.matmul(F.softmax(scores, dim=-1), v)


def pooled_attention(q: T, k: T, keep: T):
    s = (q @ k.transpose(-2, -1)) * np.sqrt(0.5)
    s[~keep] = float("-inf")
    return s.softmax(dim=-1)  # SO207


def pointer_attention(q: T, k: T, padding: T):
    s = torch.bmm(q, k)
    s = torch.where(padding, torch.full_like(s, float("-inf")), s)
    return torch.softmax(s, dim=-1)  # SO207


def sequence_loss(logits, targets, mask):
    log_p = log_t(torch.softmax(logits, dim=-1))
    nll = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if mask is not None:
        nll = nll * mask
    return nll.sum() / mask.sum()  # SO202?


def log_t(p, eps=1e-20):
    return torch.log(p + eps)  # SO206


def kl_loss(p, q):
    return (p * (p / q).log()).sum(-1).mean()  # SO204


def label_smoothed_loss(logits, target):
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -p.log().gather(-1, target).mean()  # SO211


def entropy_penalty(model, batch):
    return -(model(batch.images).softmax(1) * model(batch.images).softmax(1).log()).sum(1).mean()  # SO204


# ---- statistics


def ccc_loss(x, y):
    vx, vy = x.var(), y.var()
    cov = ((x - x.mean()) * (y - y.mean())).mean()
    return 1 - 2 * cov / (vx + vy)  # SO202


def pearson_loss(x, y):
    x, y = x - x.mean(), y - y.mean()
    r = (x * y).sum() / (torch.sqrt((x**2).sum()) * torch.sqrt((y**2).sum()))  # SO202? SO205
    return 1 - r


def spread_penalty(z):
    second = (z * z).mean(0)
    return F.relu(1 - (second - z.mean(0) ** 2)).mean()  # SO212


def minkowski_distance_loss(x, y, p):
    return ((x - y).abs() ** p).sum(-1).pow(1 / p).mean()  # SO204?


def get_loss(pred, target):
    ratio = pred / pred.norm()  # SO202
    return (ratio - target).abs().mean()


def log_ratio_loss(pred, target):
    return (torch.log(pred) - torch.log(target)).abs().mean()  # SO204


def log_cosh_loss(pred, target):
    return torch.log(torch.cosh(pred - target)).mean()  # SO211


def gaussian_nll(mean, variance, target):
    nll = 0.5 * (torch.log(variance) + (target - mean) ** 2 / variance)  # SO201? SO204?
    return nll.mean()


def wing_loss(pred, target, omega=10.0):
    d = (pred - target).abs()
    d[d < omega] = omega * torch.log(1 + d[d < omega])  # SO101 SO102
    return d.mean()


# ---- in place


def clipped_loss(pred, target):
    d = pred - target
    s = d**2  # SO201?
    d.clamp_(-1, 1)  # SO209
    return (s + d).float().mean()


def scaled_loss(pred, target):
    target /= 255.0  # SO209
    pred.clamp_(0, 1)  # SO209
    return F.l1_loss(pred, target)


def relu_loss(x, y):
    a = torch.relu(x)
    a[a > 6] = 6  # SO103
    return (a - y).abs().mean()
