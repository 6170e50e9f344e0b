"""Losses and metrics in the habits of public repositories, written by someone who had not read the rules: each goes
NaN, inf or silently constant in fp16, and the comment is at the line that makes it so, with the rule that names it.
tests/lint/test_probes.py runs them.

Of 59 (two were training steps, the examples of SO405 and SO406 now) the rules of that day named the line and the cause
in 29, and the line for another reason in 2. What followed from a general cause was added then.
"""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.07):
        super().__init__()
        self.temperature = temperature

    def forward(self, features, labels):
        labels = labels.contiguous().view(-1, 1)
        mask = torch.eq(labels, labels.T).to(features.dtype)
        logits_mask = 1 - torch.eye(len(labels), dtype=features.dtype)
        mask = mask * logits_mask
        logits = features @ features.T / self.temperature
        logits = logits - logits.max(dim=1, keepdim=True)[0].detach()
        exp_logits = torch.exp(logits) * logits_mask
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True) + 1e-3)
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1)  # SO202?
        return -mean_log_prob_pos.mean()


class SILogLoss(nn.Module):
    def __init__(self, variance_focus=0.85):
        super().__init__()
        self.variance_focus = variance_focus

    def forward(self, depth_est, depth_gt, mask):
        d = torch.log(depth_est[mask]) - torch.log(depth_gt[mask])
        return torch.sqrt((d**2).mean() - self.variance_focus * (d.mean() ** 2)) * 10.0  # SO201?, SO204


class ScaleInvariantRatioLoss(nn.Module):
    def forward(self, pred, target):
        numerator = torch.pow(pred - target, 2)
        denominator = torch.pow(pred + target, 2)
        denominator = torch.where(denominator == 0, torch.full_like(denominator, 1e-8), denominator)  # SO206?
        return (numerator / denominator).mean()


def bbox_ciou(box1, box2, eps=1e-7):
    x1, y1, x2, y2 = box1.unbind(-1)
    a1, b1, a2, b2 = box2.unbind(-1)
    inter = (torch.min(x2, a2) - torch.max(x1, a1)).clamp(0) * (torch.min(y2, b2) - torch.max(y1, b1)).clamp(0)
    w1, h1, w2, h2 = x2 - x1, y2 - y1 + eps, a2 - a1, b2 - b1 + eps
    iou = inter / (w1 * h1 + w2 * h2 - inter + eps)
    v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / h2) - torch.atan(w1 / h1), 2)
    alpha = v / (v - iou + (1 + eps))  # SO206
    return (1 - iou + v * alpha).mean()


def ppo_policy_loss(new_logprobs, old_logprobs, advantages, clip_coef=0.2):
    logratio = new_logprobs - old_logprobs
    ratio = logratio.exp()  # SO213?
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    return torch.max(pg_loss1, pg_loss2).mean()


def normalised_advantage_loss(logprobs, rewards, values):
    advantages = rewards - values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # SO206
    return -(advantages.detach() * logprobs).mean()


def policy_entropy_bonus(logits):
    probs = F.softmax(logits, dim=-1)
    return (probs * torch.log(probs + 1e-10)).sum(-1).mean()  # SO206?


def tanh_gaussian_log_prob(mean, log_std, noise):
    std = log_std.exp()
    x = mean + std * noise
    action = torch.tanh(x)
    log_prob = -0.5 * noise.pow(2) - log_std - 0.5 * math.log(2 * math.pi)
    log_prob = log_prob - torch.log(1 - action.pow(2) + 1e-6)  # the slope there, 1e6
    return log_prob.sum(-1).mean()


def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.5):
    logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    return -torch.log(torch.sigmoid(beta * logits)).mean()  # SO204


def explained_variance(y_pred, y):
    return 1 - torch.var(y - y_pred) / torch.var(y)  # SO202


class VAELoss(nn.Module):
    def forward(self, recon, x, mu, log_var):
        recon_loss = F.mse_loss(recon, x)
        kld = -0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1)  # exp(12)
        return recon_loss + 0.00025 * kld.mean()


class VectorQuantizer(nn.Module):
    def perplexity(self, encodings):
        avg_probs = torch.mean(encodings, dim=0)
        return torch.exp(-torch.sum(avg_probs * torch.log(avg_probs + 1e-10)))  # SO206


def codebook_commitment_loss(z, codebook):
    d = (
        torch.sum(z**2, dim=1, keepdim=True)  # SO201?
        + torch.sum(codebook**2, dim=1)
        - 2 * torch.matmul(z, codebook.t())
    )
    weights = F.softmax(-d, dim=1)
    return F.mse_loss(weights @ codebook, z)


def min_snr_loss(model_pred, target, alphas_cumprod, timesteps, gamma=5.0):
    snr = alphas_cumprod[timesteps] / (1 - alphas_cumprod[timesteps])
    weights = torch.stack([snr, gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr  # 0 at the last step
    loss = F.mse_loss(model_pred, target, reduction="none").mean(dim=1)
    return (loss * weights).mean()


def discretized_gaussian_nll(x, means, log_scales):
    centered = x - means
    inv_stdv = torch.exp(-log_scales)
    cdf_plus = torch.sigmoid(inv_stdv * (centered + 1 / 255.0))
    cdf_min = torch.sigmoid(inv_stdv * (centered - 1 / 255.0))
    log_probs = torch.log((cdf_plus - cdf_min).clamp(min=1e-12))  # SO206?
    return -log_probs.mean()


def r1_penalty(real_grads):
    grad_penalty = real_grads.pow(2).reshape(real_grads.shape[0], -1).sum(1).mean()  # SO201?
    return 5.0 * grad_penalty


def path_length_penalty(grads, mean_path_length):
    path_lengths = torch.sqrt(grads.pow(2).sum(2).mean(1))  # SO201?, SO204?
    return (path_lengths - mean_path_length).pow(2).mean()


class DistillationLoss(nn.Module):
    def __init__(self, T=2.0):
        super().__init__()
        self.T = T

    def forward(self, student_logits, teacher_logits):
        soft_teacher = F.softmax(teacher_logits / self.T, dim=-1)
        soft_student = torch.log(F.softmax(student_logits / self.T, dim=-1))  # SO204
        return F.kl_div(soft_student, soft_teacher, reduction="batchmean") * self.T**2


class LabelSmoothingByHand(nn.Module):
    def __init__(self, classes=3, smoothing=0.1):
        super().__init__()
        self.classes, self.smoothing = classes, smoothing

    def forward(self, pred, target):
        prob = pred.softmax(dim=-1)
        smooth = torch.full_like(prob, self.smoothing / (self.classes - 1))
        smooth.scatter_(1, target.unsqueeze(1), 1 - self.smoothing)
        return (-smooth * prob.log()).sum(dim=-1).mean()  # SO204


def nig_nll(y, gamma, v, alpha, beta):
    two_blambda = 2 * beta * (1 + v)
    nll = (
        0.5 * torch.log(math.pi / v)
        - alpha * torch.log(two_blambda)
        + (alpha + 0.5) * torch.log(v * (y - gamma) ** 2 + two_blambda)  # the square
        + torch.lgamma(alpha)
        - torch.lgamma(alpha + 0.5)
    )
    return nll.mean()


def crps_gaussian(mu, sigma, y):
    z = (y - mu) / sigma  # 0 by rounding
    cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    pdf = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return (sigma * (z * (2 * cdf - 1) + 2 * pdf - 1 / math.sqrt(math.pi))).mean()


class FocalTverskyLoss(nn.Module):
    def forward(self, inputs, targets, alpha=0.7, smooth=1.0, gamma=0.75):
        inputs, targets = inputs.view(-1), targets.view(-1)
        tp = (inputs * targets).sum()
        fp = ((1 - targets) * inputs).sum()
        fn = (targets * (1 - inputs)).sum()
        tversky = (tp + smooth) / (tp + alpha * fn + (1 - alpha) * fp + smooth)
        return (1 - tversky) ** gamma  # SO204


class LogCoshDiceLoss(nn.Module):
    def forward(self, score, target):
        intersect = (score * target).sum()  # SO210
        dice = 1 - (2 * intersect + 1e-5) / (score.sum() + target.sum() + 1e-5)
        return torch.log((torch.exp(dice) + torch.exp(-dice)) / 2)


def midas_align(depth):
    t = depth.median()
    s = (depth - t).abs().mean()
    return (depth - t) / s  # of a constant map


def scale_and_shift_loss(prediction, target, mask):
    a_00 = torch.sum(mask * prediction * prediction, (1, 2))  # SO201?
    a_01 = torch.sum(mask * prediction, (1, 2))
    a_11 = torch.sum(mask, (1, 2))
    b_0 = torch.sum(mask * prediction * target, (1, 2))
    b_1 = torch.sum(mask * target, (1, 2))
    det = a_00 * a_11 - a_01 * a_01
    scale = (a_11 * b_0 - a_01 * b_1) / det
    return (scale.view(-1, 1, 1) * prediction - target).abs().mean()


class BertSelfAttention(nn.Module):
    def forward(self, query, key, value, attention_mask):
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.size(-1))
        scores = scores + (1.0 - attention_mask) * -1e9  # SO207?
        return torch.matmul(nn.Softmax(dim=-1)(scores), value).mean()


def linear_attention(q, k, v, eps=1e-6):
    kv = torch.einsum("nld,nlm->ndm", k, v)
    z = 1 / (torch.einsum("nld,nd->nl", q, k.sum(dim=1)) + eps)  # 1 / 1e-6 is inf
    return torch.einsum("nld,ndm,nl->nlm", q, kv, z).sum()


def raft_sequence_loss(flow_pred, flow_gt):
    return torch.sum((flow_pred - flow_gt) ** 2, dim=1).sqrt().mean()  # SO205


def limb_angle_loss(pred, gt):
    cos = (pred * gt).sum(-1) / (pred.norm(dim=-1) * gt.norm(dim=-1))  # SO202
    return (1 - cos).mean()


def rotation_6d_loss(d6, target):
    a1, a2 = d6[..., :3], d6[..., 3:]
    b1 = F.normalize(a1, dim=-1)  # SO206?
    b2 = a2 - (b1 * a2).sum(-1, keepdim=True) * b1
    return (torch.stack((b1, b2), dim=-2) - target).abs().mean()


def so3_log_loss(R, target):
    trace = R.diagonal(dim1=-2, dim2=-1).sum(-1)
    theta = torch.acos(((trace - 1) / 2).clamp(-0.99, 1.0))
    w = theta / (2 * torch.sin(theta))  # SO202?
    vee = torch.stack((R[:, 2, 1] - R[:, 1, 2], R[:, 0, 2] - R[:, 2, 0], R[:, 1, 0] - R[:, 0, 1]), -1)
    return F.l1_loss(w.unsqueeze(-1) * vee, target)


def log_mel_loss(mel, target_mel):
    log_spec = torch.clamp(mel, min=1e-10).log10()  # SO206?
    log_spec = torch.maximum(log_spec, log_spec.max() - 8.0)
    return F.l1_loss((log_spec + 4.0) / 4.0, target_mel)


def stft_magnitude_loss(real, imag, target_mag):
    mag = torch.sqrt(real**2 + imag**2)  # SO204?
    return F.l1_loss(mag, target_mag)


def nt_xent(z_i, z_j, temperature=0.05):
    out = torch.cat([z_i, z_j])
    sim = torch.exp(torch.mm(out, out.t()) / temperature)  # SO213
    mask = ~torch.eye(len(out), dtype=torch.bool)
    neg = sim.masked_select(mask).view(len(out), -1).sum(dim=-1)
    pos = torch.exp((z_i * z_j).sum(dim=-1) / temperature)
    return -torch.log(torch.cat([pos, pos]) / neg).mean()


def hard_triplet_loss(x, margin=0.3):
    sq = torch.pow(x, 2).sum(dim=1, keepdim=True)
    dist = sq + sq.t() - 2 * torch.mm(x, x.t())
    dist = dist.clamp(min=1e-12).sqrt()  # SO206?
    return F.relu(dist.max(dim=1)[0] - dist.min(dim=1)[0] + margin).mean()


class CircleLoss(nn.Module):
    def __init__(self, m=0.25, gamma=64):
        super().__init__()
        self.m, self.gamma = m, gamma

    def forward(self, sp, sn):
        ap = torch.clamp_min(-sp.detach() + 1 + self.m, min=0.0)
        an = torch.clamp_min(sn.detach() + self.m, min=0.0)
        pos = torch.exp(-ap * (sp - 1 + self.m) * self.gamma).sum()  # SO213
        neg = torch.exp(an * (sn - self.m) * self.gamma).sum()  # SO213
        return torch.log(1 + pos * neg)


class KoLeoLoss(nn.Module):
    def forward(self, student_output, eps=1e-8):
        dots = torch.mm(student_output, student_output.t())
        dots = dots - 2 * torch.eye(len(dots), dtype=dots.dtype)
        nearest = student_output[dots.argmax(dim=1)]
        distances = (student_output - nearest).abs().sum(-1)
        return -torch.log(distances + eps).mean()  # SO206?


def vicreg_covariance(x):
    x = x - x.mean(dim=0)
    cov = (x.T @ x) / (len(x) - 1)  # a product of matrices
    off_diagonal = cov - torch.diag(torch.diagonal(cov))
    return off_diagonal.pow(2).sum() / x.shape[1]


def mixmatch_sharpen_loss(logits, p, T=0.1):
    pt = p ** (1 / T)
    targets = pt / pt.sum(dim=1, keepdim=True)  # SO202?
    return -(targets * F.log_softmax(logits, dim=1)).sum(dim=1).mean()


def advent_entropy_loss(v):
    n, c = v.shape
    return -torch.sum(torch.mul(v, torch.log2(v + 1e-30))) / (n * np.log2(c))  # SO206?


def class_balanced_loss(logits, labels, samples_per_cls, beta=0.9999):
    effective_num = 1.0 - torch.pow(beta, samples_per_cls)  # SO206
    weights = (1.0 - beta) / effective_num
    weights = weights / weights.sum() * len(weights)
    return F.cross_entropy(logits, labels, weight=weights.detach())


def inverse_frequency_loss(logits, labels):
    counts = torch.bincount(labels, minlength=logits.shape[1]).to(logits.dtype)
    weight = counts.sum() / counts  # SO202?
    logp = F.log_softmax(logits, dim=1)
    return -(weight * logp.mean(0)).sum()


class MDNLoss(nn.Module):
    def forward(self, pi, sigma, mu, target):
        prob = torch.exp(-0.5 * ((target.unsqueeze(1) - mu) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        nll = -torch.log(torch.sum(pi * prob, dim=1))  # SO204?
        return nll.mean()


class SSIM(nn.Module):
    def forward(self, x, y):
        mu_x, mu_y = x.mean(-1), y.mean(-1)
        sigma_x = (x**2).mean(-1) - mu_x**2
        sigma_y = (y**2).mean(-1) - mu_y**2
        sigma_xy = (x * y).mean(-1) - mu_x * mu_y
        c1, c2 = 0.01**2, 0.03**2
        n = (2 * mu_x * mu_y + c1) * (2 * sigma_xy + c2)
        d = (mu_x**2 + mu_y**2 + c1) * (sigma_x + sigma_y + c2)
        return torch.clamp((1 - n / d) / 2, 0, 1).mean()  # the slope: 1 / c2**2


def gumbel_softmax_loss(logits, u, target, tau=0.5):
    gumbel = -torch.log(-torch.log(u + 1e-20) + 1e-20)  # SO206?
    y = F.softmax((logits + gumbel) / tau, dim=-1)
    return F.mse_loss(y, target)


class UncertaintyWeighting(nn.Module):
    def forward(self, losses, sigma):
        return (losses / (2 * sigma**2) + torch.log(sigma)).sum()  # 1e-4 squared


def sparse_autoencoder_kl(activations, rho=0.05):
    rho_hat = torch.sigmoid(activations).mean(dim=0)
    return (rho * torch.log(rho / rho_hat) + (1 - rho) * torch.log((1 - rho) / (1 - rho_hat))).sum()  # SO202?, SO204?


def concordance_loss(x, y):
    mx, my = x.mean(), y.mean()
    cov = ((x - mx) * (y - my)).mean()
    ccc = 2 * cov / (x.var() + y.var() + (mx - my) ** 2)  # SO202?
    return 1 - ccc


def log_iou_loss(pred, target):
    inter = (pred * target).sum()
    union = (pred + target - pred * target).sum()
    return -torch.log(inter / union)  # SO202?, SO204?


def nerf_disparity_loss(weights, z_vals, target):
    depth = (weights * z_vals).sum(-1)
    acc = weights.sum(-1)
    disp = 1.0 / torch.max(1e-10 * torch.ones_like(depth), depth / acc)  # SO202?
    return F.mse_loss(disp, target)


def mse2psnr(pred, target):
    mse = torch.mean((pred - target) ** 2)
    return -10.0 * torch.log10(mse)  # SO204?


class RankNetLoss(nn.Module):
    def forward(self, s_i, s_j, sigma=1.0):
        return torch.log(1 + torch.exp(-sigma * (s_i - s_j))).mean()  # SO211?


def tweedie_loss(pred, target, rho=1.5):
    a = -target * torch.pow(pred, 1 - rho) / (1 - rho)  # SO204?
    b = torch.pow(pred, 2 - rho) / (2 - rho)
    return (a + b).mean()


def smape(pred, target):
    return (2 * (pred - target).abs() / (pred.abs() + target.abs() + 1e-8)).mean()  # SO206?


class RMSELoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.mse = nn.MSELoss()

    def forward(self, yhat, y):
        return torch.sqrt(self.mse(yhat, y))  # SO204?


def masked_image_loss(pred, target, mask):
    loss = (pred - target).abs() * mask
    return loss.sum() / mask.sum()  # SO202?


def pair_log_survival(probabilities):
    return -torch.log1p(-probabilities.clamp(max=1.0 - 1e-6)).mean()  # in a function that no name calls a loss
