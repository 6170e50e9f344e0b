"""Formulas of losses in use, written anew: each goes NaN, inf or silently constant in fp16, and the comment is at the
line that makes it so, with the rule that names it (SO201: where it is asked for). tests/lint/test_probes.py runs them.

The rules of the version before were tried on them first: 19 of the 35 lines were named. Of the others what follows from
a general rule is named now.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class BarlowTwins(nn.Module):
    def __init__(self, lambd=5e-3):
        super().__init__()
        self.lambd = lambd

    def loss(self, z_a, z_b):
        n, d = z_a.shape
        z_a = (z_a - z_a.mean(0)) / z_a.std(0)  # SO202
        z_b = (z_b - z_b.mean(0)) / (z_b.std(0) + 1e-3)
        c = z_a.T @ z_b / n
        off = c.flatten()[:-1].view(d - 1, d + 1)[:, 1:]
        return (torch.diagonal(c) - 1).float().pow(2).sum() + self.lambd * off.float().pow(2).sum()


def swapped_assignment_loss(scores_t, scores_s, eps=0.05):
    q = torch.exp(scores_t / eps).t()
    q = q / q.sum(dim=0, keepdim=True)  # SO211
    return -(q.t() * F.log_softmax(scores_s / 0.1, dim=1)).sum(1).mean()


class ArcMarginLoss(nn.Module):
    def __init__(self, m=0.5, s=16.0):
        super().__init__()
        self.m, self.s = m, s

    def forward(self, cosine, labels):
        sine = torch.sqrt(1.0 - cosine.pow(2))  # SO204
        phi = cosine * math.cos(self.m) - sine * math.sin(self.m)
        one_hot = F.one_hot(labels, cosine.size(1)).to(cosine.dtype)
        return F.cross_entropy((one_hot * phi + (1 - one_hot) * cosine) * self.s, labels)


class AMSoftmaxLoss(nn.Module):
    def __init__(self, s=30.0, m=0.4):
        super().__init__()
        self.s, self.m = s, m

    def forward(self, cosine, labels):
        target = self.s * (cosine.gather(1, labels[:, None]).squeeze(1) - self.m)
        others = torch.exp(self.s * cosine).sum(1) - torch.exp(self.s * cosine.gather(1, labels[:, None]).squeeze(1))
        denominator = torch.exp(target) + others
        return -(target - torch.log(denominator)).mean()  # SO211


class AsymmetricLoss(nn.Module):
    def __init__(self, gamma_neg=4, clip=0.05, eps=1e-8):
        super().__init__()
        self.gamma_neg, self.clip, self.eps = gamma_neg, clip, eps

    def forward(self, x, y):
        xs_pos = torch.sigmoid(x)
        xs_neg = (1 - xs_pos + self.clip).clamp(max=1)
        positive = y * torch.log(xs_pos.clamp(min=self.eps))  # SO206
        negative = (1 - y) * torch.log(xs_neg.clamp(min=1e-3))
        return -(positive + negative * (1 - xs_neg) ** self.gamma_neg).mean()


class GeneralizedCrossEntropy(nn.Module):
    def __init__(self, q=0.7):
        super().__init__()
        self.q = q

    def forward(self, logits, labels):
        p = F.softmax(logits, dim=1).gather(1, labels[:, None]).squeeze(1)
        return ((1 - p**self.q) / self.q).mean()  # SO204


def sinkhorn_loss(cost, mu, nu, eps=0.1, steps=3):
    u, v = torch.zeros_like(mu), torch.zeros_like(nu)
    for _ in range(steps):
        u = eps * (torch.log(mu + 1e-8) - torch.logsumexp((v[None] - cost) / eps, 1))  # SO206?
        v = eps * (torch.log(nu + 1e-2) - torch.logsumexp((u[:, None] - cost) / eps, 0))
    return (torch.exp((u[:, None] + v[None] - cost) / eps) * cost).sum()


def gradient_penalty(gradients, target=1.0):
    flat = gradients.view(gradients.size(0), -1)
    slopes = torch.sqrt(torch.sum(flat.float() ** 2, dim=1))  # SO205
    return ((slopes - target) ** 2).mean()


def mmd_loss(source, target, kernel_mul=2.0, kernel_num=3):
    total = torch.cat([source, target])
    n = total.size(0)
    distances = (total[None] - total[:, None]).float().pow(2).sum(2)
    bandwidth = distances.detach().sum() / (n * n - n)
    bandwidth = bandwidth / kernel_mul ** (kernel_num // 2)
    kernels = sum(torch.exp(-distances / (bandwidth * kernel_mul**i)) for i in range(kernel_num))  # SO202?
    k = source.size(0)
    return (kernels[:k, :k] + kernels[k:, k:] - 2 * kernels[:k, k:]).mean()


def cka_distance_loss(x, y):
    k, l = x @ x.T, y @ y.T
    hsic = (k * l).float().sum()
    norm_k, norm_l = torch.sqrt((k.float() ** 2).sum()), torch.sqrt((l.float() ** 2).sum())  # SO205
    return 1 - hsic / (norm_k * norm_l)


class InfoNCE(nn.Module):
    def __init__(self, temperature=0.05):
        super().__init__()
        self.temperature = temperature

    def forward(self, query, keys):
        q, k = F.normalize(query, dim=-1, eps=1e-3), F.normalize(keys, dim=-1, eps=1e-3)
        similarity = torch.exp(q @ k.T / self.temperature)
        positive = similarity.diagonal()
        loss = -torch.log(positive / similarity.sum(dim=1))  # SO211
        return loss.mean()


def si_snr_loss(estimate, source, eps=1e-8):
    scale = (estimate * source).float().sum(-1, keepdim=True) / (source.float().pow(2).sum(-1, keepdim=True) + 1e-3)
    projection = (scale * source).to(estimate.dtype)
    noise = estimate - projection
    ratio = projection.norm(dim=-1) / (noise.norm(dim=-1) + eps)  # SO206?
    return -20 * torch.log10(ratio + 1e-3).mean()


class SpectralConvergenceLoss(nn.Module):
    def forward(self, x_mag, y_mag):
        return torch.norm(y_mag - x_mag, p="fro") / torch.norm(y_mag, p="fro")  # SO202?


class LogMagnitudeLoss(nn.Module):
    def forward(self, real, imag, y_mag):
        x_mag = torch.sqrt(torch.clamp(real**2 + imag**2, min=1e-8))  # SO206?
        return F.l1_loss(x_mag, y_mag)


def uniformity_loss(x, t=2.0):
    return torch.pdist(x.float()).to(x.dtype).pow(2).mul(-t).exp().mean().log()  # SO211


class CharbonnierLoss(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x, y):
        diff = x - y
        return torch.mean(torch.sqrt(diff * diff + self.eps**2))  # SO206


def geodesic_loss(r1, r2):
    m = torch.bmm(r1, r2.transpose(1, 2))
    cos = (m[:, 0, 0] + m[:, 1, 1] + m[:, 2, 2] - 1) / 2
    return torch.acos(cos).mean()  # SO204


def soft_dtw_step_loss(r0, r1, r2, cost, gamma=0.01):
    z = -torch.stack([r0, r1, r2]) / gamma
    softmin = -gamma * torch.log(torch.exp(z).sum(0))  # SO211
    return (cost + softmin).mean()


def heteroscedastic_loss(mean, log_var, target):
    return (0.5 * torch.exp(-log_var) * (target - mean) ** 2 + 0.5 * log_var).mean()  # SO201?


def giou_loss(boxes1, boxes2, eps=1e-3):
    x1, y1 = torch.max(boxes1[:, 0], boxes2[:, 0]), torch.max(boxes1[:, 1], boxes2[:, 1])
    x2, y2 = torch.min(boxes1[:, 2], boxes2[:, 2]), torch.min(boxes1[:, 3], boxes2[:, 3])
    inter = (x2 - x1).clamp(min=0) * (y2 - y1).clamp(min=0)
    area1 = (boxes1[:, 2] - boxes1[:, 0]) * (boxes1[:, 3] - boxes1[:, 1])
    area2 = (boxes2[:, 2] - boxes2[:, 0]) * (boxes2[:, 3] - boxes2[:, 1])
    return (1 - inter / (area1 + area2 - inter + eps)).mean()  # not named


def cox_partial_loss(risk, events):
    order = torch.argsort(risk.detach(), descending=True)
    risk, events = risk[order], events[order]
    log_cumulative = torch.log(torch.cumsum(torch.exp(risk), dim=0))  # SO211
    return -((risk - log_cumulative) * events).sum() / events.sum().clamp(min=1)


def jensen_shannon_loss(p, q):
    m = 0.5 * (p + q)
    left = (p * (p / m).log()).sum(-1)  # SO204
    right = (q * (q.clamp(min=1e-3) / m.clamp(min=1e-3)).log()).sum(-1)
    return 0.5 * (left + right).mean()


def kurtosis_penalty(w, target=1.8):
    d = w - w.mean()
    fourth = (d**4).mean()  # SO201?
    return (fourth / (d.float().var() ** 2 + 1e-3) - target) ** 2


def focal_frequency_loss(real, fake, alpha=1.0):
    distance = (real - fake).abs()
    weight = distance**alpha
    weight = weight / weight.max()  # SO202?
    return (weight.detach() * distance).mean()


def adversarial_d_loss(real_logits, fake_logits):
    real, fake = torch.sigmoid(real_logits), torch.sigmoid(fake_logits)
    return -(torch.log(real.clamp(min=1e-3)) + torch.log(1 - fake)).mean()  # SO204


def sentence_loss(hidden, attention_mask, target):
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    pooled = torch.where(mask > 0, hidden, 0).sum(1) / mask.sum(1)  # SO202
    return F.l1_loss(pooled, target)


class CenterLoss(nn.Module):
    def forward(self, x, centers):
        distances = x.pow(2).sum(1, keepdim=True) + centers.pow(2).sum(1)  # SO201?
        distances = distances - 2 * x @ centers.t()
        return distances.clamp(1e-3, 1e4).mean()


def spectral_angle_loss(pred, target):
    dot = (pred * target).float().sum(1)
    cos = dot / (pred.float().norm(dim=1) * target.float().norm(dim=1) + 1e-3)
    return torch.acos(cos).mean()  # SO204


def evidential_regularizer(evidence, labels):
    alpha = evidence + 1
    strength = alpha.sum(1, keepdim=True)
    log_beta = torch.lgamma(strength).squeeze(1) - torch.lgamma(alpha).sum(1)  # not named
    return log_beta.mean()


def weighted_mse_loss(pred, target, weight):
    squared = weight * (pred - target) ** 2  # SO201?
    return squared.sum() / weight.sum().clamp(min=1e-3)


def list_mle_loss(scores, labels, eps=1e-10):
    ranked = scores.gather(1, labels.argsort(dim=1, descending=True))
    shifted = ranked - ranked.max(dim=1, keepdim=True)[0]
    tails = torch.exp(shifted).flip(1).cumsum(1).flip(1)
    return (torch.log(tails + eps) - shifted).sum(1).mean()  # SO206?


def poisson_deviance_loss(rate, counts):
    return 2 * (counts * torch.log(counts / rate) - (counts - rate)).mean()  # SO204?


def attention_transfer_loss(student, teacher):
    s = student.pow(2).mean(1).flatten(1)  # SO201?
    t = teacher.pow(2).mean(1).flatten(1)
    return (F.normalize(s, dim=1, eps=1e-3) - F.normalize(t, dim=1, eps=1e-3)).abs().mean()


def relational_distance_loss(student, teacher):
    d = torch.cdist(student.float(), student.float())
    d = d / d[d > 0].mean()  # SO202?
    with torch.no_grad():
        t = torch.cdist(teacher.float(), teacher.float())
        t = t / (t[t > 0].mean() + 1e-3)
    return F.smooth_l1_loss(d, t)


def normalised_cross_correlation_loss(x, y):
    x, y = x - x.mean(), y - y.mean()
    cross = (x * y).float().mean()
    return 1 - cross / (x.std() * y.std())  # SO202
