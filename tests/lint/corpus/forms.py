"""The hazards that the rules claim, each in the ways in which code that trains writes them: as a layer, through an
attribute, a constant of the class, a helper, a lambda, a loop over scales, with a widening that comes too late.

`on` holds the inputs with which each goes NaN, inf or raises in fp16; the comment is at the line that makes it so, with
the rule that names it. tests/lint/test_probes.py runs them.
"""

import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import nn as layers

ON = {}
EPSILON = 1e-10


def t(*values):
    return torch.tensor(values)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def on(hazard, *arguments):
    def keep(probe):
        ON[probe.__name__] = hazard, arguments
        return probe

    return keep


ZERO = torch.zeros(3)
HOT = t([60.0, 0.0, 1.0], [1.0, 2.0, -40.0])


# ---- eps


@on("eps", t(0.0, 0.5), t(1.0, 1.0))
class NegativeLikelihood(nn.Module):
    EPS = 1e-8

    def forward(self, hazard_rate, event):
        return -(event * torch.log(hazard_rate + self.EPS)).mean()  # SO206


@on("eps", t(0.0, 1.0))
def spectral_entropy(power):
    density = power / power.sum().clamp(min=1e-3)
    return -(density * (density + EPSILON).log()).sum()  # SO206?


@on("eps", t(0.0, 1.0))
def entropy_of_attention_loss(attn):
    tiny = torch.finfo(torch.float32).tiny
    return -(attn * torch.log(attn.clamp_min(tiny))).sum(-1).mean()  # SO206


@on("eps", t(0.0, 1.0), t(0.5, 0.5))
def js_component_loss(p, m):
    floor = torch.tensor(1e-12, dtype=p.dtype)
    return (p * (torch.maximum(p, floor).log() - m.log().detach())).sum()  # SO204?, SO206


@on("eps", t(0.0, 1.0))
def histogram_loss(h):
    return -torch.log(h + sys.float_info.epsilon).mean()  # SO206?


@on("eps", t(0.0, 1.0))
def bce_by_hand_loss(prob):
    return -torch.log(prob.add(1e-7)).sum()  # SO206


@on("eps", t(0.0, 1.0), t(1.0, 1.0))
class LogDepth(nn.Module):
    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, pred, target):
        return (torch.log(pred + self.eps) - torch.log(target)).abs().sum()  # SO204?, SO206


@on("eps", torch.zeros(2, 3), torch.ones(2, 3))
class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.similarity = nn.CosineSimilarity(dim=-1)

    def forward(self, emb, proto):
        loss = 1 - self.similarity(emb, proto)  # SO206?
        return loss.mean()


@on("eps", ZERO, t(1.0, 1.0, 1.0))
def inverse_depth_penalty(depth, reference):
    disparity = 1.0 / (depth + 1e-6)  # SO206?
    return (disparity - reference).abs().mean()


@on("eps", torch.zeros(2, 3), torch.zeros(2, 3), t(1.0, 1.0))
def siamese_loss(left, right, same):
    return F.cosine_embedding_loss(left, right, same)  # SO206?


@on("eps", t(0.0, 2.0), t(1.0, 2.0))
def count_regression_loss(rate, count):
    return F.poisson_nll_loss(rate, count, log_input=False)  # SO206?


@on("eps", torch.ones(4))
def whiten_loss(feats):
    centred = feats - feats.mean()
    scale = torch.rsqrt((centred * centred).mean() + 1e-9)  # SO201, SO206
    return (centred * scale).abs().mean()


# ---- divisions


@on("division", torch.ones(2, 4), normal(2, 4))
def heatmap_loss(hm, hm_gt):
    lo, hi = hm.min(), hm.max()
    hm = (hm - lo).div(hi - lo)  # SO202
    return F.l1_loss(hm, hm_gt)


@on("division", torch.ones(2, 4), normal(2, 4))
def saliency_kl(smap, fix):
    rescale = lambda v: (v - v.min()) / (v.max() - v.min())  # SO202  # noqa: E731
    return F.kl_div(F.log_softmax(rescale(smap), -1), F.softmax(fix, -1), reduction="batchmean")


@on("division", torch.ones(2, 4), normal(2, 4))
def nss_loss(smap, fix):
    standard = (smap - torch.mean(smap)).mul(torch.reciprocal(torch.std(smap)))  # SO202
    return -(standard * fix).mean()


@on("division", torch.zeros(2, 4), normal(2, 4))
def direction_loss(delta, wanted):
    unit = delta * delta.norm(dim=-1, keepdim=True).pow(-1)  # SO204?
    return (unit - wanted).abs().mean()


@on("division", t(1.0, 2.0), t(0.0, 2.0))
def mape_loss(y_pred, y_true):
    return torch.mean(torch.abs((y_true - y_pred) / y_true))  # SO202?


@on("division", t(1.0, 2.0), t(0.0, 2.0))
class RelativeError(nn.Module):
    def forward(self, pred, target):
        return ((pred - target).abs() / target.abs()).mean()  # SO202?


@on("division", t(0.5, 1.0), t(1e-4, 1.0))
def kendall_gal_loss(task_losses, sigmas):
    return torch.sum(task_losses / (2 * sigmas.pow(2))) + torch.log1p(sigmas).sum()  # SO202?


@on("division", normal(2, 3), t(-100, -100))
class TokenLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.ce = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, logits, labels):
        return self.ce(logits, labels)  # SO202?


@on("division", normal(2, 3, 4), torch.full((2, 4), 255))
def segmentation_loss(seg_logits, seg_label):
    return F.cross_entropy(seg_logits, seg_label, ignore_index=255)  # SO202?


@on("division", [torch.ones(2, 4), torch.ones(2, 2)], [normal(2, 4), normal(2, 2)])
def multiscale_loss(outs, gts):
    total = 0.0
    for o, g in zip(outs, gts):
        o = (o - o.mean()) / o.std()  # SO202
        total = total + (o - g).abs().mean()
    return total


@on("division", t(1.0, 2.0), t(3.0, 4.0), t(0.0, 0.0))
def weighted_l1(a_map, b_map, w):
    return (w * (a_map - b_map).abs()).sum().div(w.sum())  # SO202?


@on("division", {"pts": normal(2, 3), "vis": torch.zeros(2, 3)}, normal(2, 3))
def keypoint_loss(pred_dict, kp):
    vis = pred_dict["vis"]
    err = (pred_dict["pts"] - kp).abs()
    return (err * vis).sum() / vis.sum()  # SO202?


@on("division", torch.zeros(2, 3), normal(2, 3))
def plcc_loss(p_score, mos):
    p_score = p_score - p_score.mean()
    mos = mos - mos.mean()
    cov = (p_score * mos).sum()
    return 1 - cov / (torch.linalg.vector_norm(p_score) * torch.linalg.vector_norm(mos))  # SO202


@on("division", normal(2, 3), torch.zeros(2, 3))
def adain_loss(content, style):
    (mu_c, sd_c), (mu_s, sd_s) = _stats(content), _stats(style)
    whitened = (style - mu_s) / sd_s  # the deviation comes out of a helper
    return (whitened * sd_c + mu_c - content).abs().mean()


def _stats(feat):
    return feat.mean(-1, keepdim=True), feat.std(-1, keepdim=True)


# ---- domains


@on("domain", HOT, t(0, 0))
class SoftmaxThenLog(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x, y):
        p = self.softmax(x)
        return F.nll_loss(torch.log(p), y)  # SO204


@on("domain", HOT)
class Certainty(layers.Module):
    def __init__(self):
        super().__init__()
        self.head = layers.Sequential(layers.Identity(), layers.Sigmoid())

    def forward(self, z):
        q = self.head(z)
        return -(q * q.log()).mean()  # SO204


@on("domain", t(0.0, 1.0), t(1.0, 0.5))
def information_gain_loss(posterior, prior):
    return (torch.xlogy(posterior, posterior) - torch.xlogy(posterior, prior)).sum()  # SO204?


@on("domain", t(0.0, 1.0))
def entr_penalty(assignments):
    return -torch.special.entr(assignments).sum(-1).mean()  # SO204?


@on("domain", t(1.0, 0.5))
def logit_matching_loss(p_student):
    return torch.logit(p_student).abs().mean()  # SO204


@on("domain", torch.zeros(2, 3), torch.zeros(2, 3))
def poincare_distance(u, v):
    sq = (u - v).square().sum(-1)
    arg = 1 + 2 * sq / ((1 - u.square().sum(-1)) * (1 - v.square().sum(-1)))
    return torch.acosh(arg).mean()  # SO204


@on("domain", t(1.0, 0.2))
def fisher_z_loss(r):
    return torch.atanh(r).square().mean()  # SO201?, SO204


@on("domain", t([1.0, 0.0, 0.0, 0.0]), t([1.0, 0.0, 0.0, 0.0]))
class QuaternionAngle(nn.Module):
    def forward(self, q1, q2):
        dot = torch.einsum("bi,bi->b", q1, q2).abs()
        return (2 * dot.clamp(max=1.0).arccos()).mean()  # SO204


@on("domain", t(0.0, 0.0), t(0.0, 1.0))
def gradient_magnitude_loss(gx, gy):
    magnitude = (gx.pow(2) + gy.pow(2)) ** 0.5  # SO204?
    return magnitude.mean()


@on("domain", torch.ones(2, 3))
def std_regularizer(z):
    return F.relu(1 - z.var(dim=0, unbiased=False).sqrt()).mean()  # SO204


@on("domain", [torch.ones(3), torch.ones(3)], [torch.ones(3), torch.ones(3)])
class PyramidRMSE(nn.Module):
    def __init__(self):
        super().__init__()
        self.crit = nn.MSELoss()

    def forward(self, levels, truths):
        return sum(torch.sqrt(self.crit(a, b)) for a, b in zip(levels, truths))  # SO204?


@on("domain", ZERO)
def total_variation(field):
    dx = field[1:] - field[:-1]
    return torch.linalg.vector_norm(dx).sqrt() + dx.abs().sqrt().mean()  # SO204


@on("domain", t([0.0, 1.0], [0.5, 0.5]), t(0, 0))
def nll_of_probabilities(proba, index):
    picked = proba.gather(1, index.view(-1, 1)).squeeze(1)
    return picked.log().neg().mean()  # SO204?


@on("domain", t(1.0, 0.2))
def complementary_log_log_loss(survive):
    return -torch.log(1.0 - survive).mean()  # SO204


@on("domain", t(0.0, 0.3))
def bhattacharyya(p_hist):
    coefficient = torch.sqrt(p_hist).sum()  # SO204?
    return 1 - coefficient


# ---- fills


@on("fill", normal(2, 3), t([True, False, True], [True, True, True]))
def pooling_attention(scores, pad):
    bias = torch.zeros_like(scores).masked_fill(pad, float("-inf"))
    weights = torch.softmax(scores + bias, dim=-1)  # SO207
    return (weights * scores).nan_to_num().sum() + weights.sum()


@on("fill", normal(2, 3), t([1.0, 0.0, 1.0], [1.0, 1.0, 1.0]))
def hardest_negative_loss(dist, same):
    nearest = (dist + 1e5 * same).min(dim=1)[0]  # SO207
    furthest = (dist - 1e5 * (1 - same)).max(dim=1)[0]
    return F.relu(furthest - nearest + 1).mean() + nearest.mean()


@on("fill", normal(2, 3), t([1.0, 0.0, 1.0], [1.0, 1.0, 1.0]))
def decoder_scores(energy: torch.Tensor, attn_mask: torch.Tensor):
    energy = energy - (1 - attn_mask) * 1e10  # SO207?
    return energy.softmax(-1).sum()


@on("fill", normal(2, 3), t([True, False, True], [True, True, True]))
def pointer_loss(logits, invalid):
    logits = logits.clone()
    logits[invalid] = -1e9  # SO207?
    return -F.log_softmax(logits, dim=-1)[:, 1].mean()


@on("fill", normal(2, 3), t([1.0, 0.0, 1.0], [0.0, 0.0, 0.0]))
def graph_attention_loss(e, adj):
    zero_vec = -9e15 * torch.ones_like(e)  # SO207
    attention = torch.where(adj > 0, e, zero_vec)
    return F.softmax(attention, dim=1).diagonal().sum()


@on("fill", normal(2, 3), t([True, False, True], [True, True, True]))
class MaskedSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, scores, mask):
        hidden = scores.masked_fill(mask, -np.inf)
        return self.softmax(hidden).sum()  # SO207


@on("fill", normal(2, 3), t([1.0, 0.0, 1.0], [1.0, 1.0, 0.0]))
def crf_score_loss(emissions, mask):
    emissions = emissions + (1.0 - mask) * torch.finfo(torch.float32).min  # SO207?
    return torch.logsumexp(emissions, 1).mean()


# ---- exponentials


@on("exponential", t(0.0, 0.0), t(12.0, 0.0))
def vae_kl(mu, logvar):
    return (-0.5 * (1 + logvar - mu**2 - logvar.exp())).sum()  # SO213?


@on("exponential", t(2.0, 0.0), t(-12.0, 0.0))
class Heteroscedastic(nn.Module):
    def forward(self, residual, log_variance):
        precision = torch.exp(-log_variance)  # SO213?
        return (precision * residual.abs() + log_variance).mean()


@on("exponential", t(12.0, 1.0), t(3.0, 1.0))
def poisson_loss(log_rate, counts):
    return (log_rate.exp() - counts * log_rate).mean()  # SO213


@on("exponential", t([13.0, 0.0], [1.0, 2.0]))
def softmax_by_hand_loss(scores):
    e = scores.exp()
    z = e.sum(-1, keepdim=True)
    return -(e / z).diagonal().mean()  # SO211


@on("exponential", t(13.0, 2.0))
def logistic_loss(margin):
    return torch.log(torch.add(torch.exp(margin), 1)).mean()  # SO211?


@on("exponential", t(100.0, 2.0), t(1.0, 1.0))
def decibel_loss(db, reference):
    return F.l1_loss(10 ** (db / 10), reference)  # SO213


@on("exponential", t([0.9, 0.95], [0.1, 0.2]))
class TemperedContrast(nn.Module):
    def __init__(self, tau=0.05):
        super().__init__()
        self.inv_tau = 1.0 / tau

    def forward(self, sim):
        pos = torch.exp(sim * self.inv_tau)  # SO213
        return -(sim.diagonal() - pos.sum(1)).mean()


@on("exponential", t([13.0, 0.0], [1.0, 2.0]), t([True, False], [False, True]))
def energy_score_loss(logits, positive):
    unnormalised = torch.exp(logits)  # SO213
    return -(unnormalised * positive).sum(1).log().mean()


# ---- squares and sums


@on("square", t(300.0, 1.0), t(0.0, 1.0))
def late_widening_loss(pred, target):
    return torch.square(pred - target).float().mean()  # SO201?


@on("square", torch.full((2, 64), 40.0), torch.zeros(2, 2))
def gram_style(feature_map, gram_target):
    c, n = feature_map.shape
    g = torch.mm(feature_map, feature_map.t()) / (c * n)  # SO201
    return F.l1_loss(g, gram_target)


@on("square", 300 * normal(4, 3))
def decorrelation_loss(z):
    z = z - z.mean(0)
    cov = torch.einsum("bi,bj->ij", z, z) / (z.shape[0] - 1)  # SO201?
    return cov.abs().mean()


@on("square", torch.full((300,), 20.0), torch.zeros(300))
def reconstruction_loss(recon_x, x):
    return F.mse_loss(recon_x, x, reduction="sum") / x.shape[0]  # SO201?


@on("square", [torch.full((300,), 20.0)], [torch.zeros(300)])
def feature_matching_loss(fake_feats, real_feats):
    loss = 0
    for i in range(len(fake_feats)):
        diff = fake_feats[i] - real_feats[i]
        loss += (diff * diff).sum() / len(diff)  # SO201?
    return loss


@on("square", torch.full((300,), 300.0))
def activity_regularizer(h):
    energy = h.pow(2)
    return 0.1 * energy.mean()  # SO201?


@on("square", t(300.0, 1.0), t(0.0, 1.0))
def robust_charbonnier(a, b, eps=1e-3):
    r = a - b
    return torch.sqrt(r * r + eps * eps).mean()  # SO201?


@on("square", torch.full((300, 300), 1.0), torch.zeros(300, 300))
def mean_by_hand_loss(flow_a, flow_b):
    err = (flow_a - flow_b).abs()
    return err.sum() / err.numel()  # SO201?


@on("square", t(300.0, 1.0), t(0.0, 1.0))
class Huberised(nn.Module):
    def forward(self, inp, tgt):
        delta = (inp - tgt).abs()
        quad = torch.clamp(delta, max=1e3) ** 2
        return torch.mean(quad)  # SO201?


# ---- selections after the fact


@on("select", t(1.0, 2.0), t(0.0, 1.0))
def filled_ratio_loss(num, den):
    r = (num / den).masked_fill(den == 0, 0.0)  # SO208
    return r.mean()


@on("select", t(0.0, 2.0), t(0.0, 1.0))
def cleaned_ratio_loss(num, den):
    return torch.nan_to_num(num / den).mean()  # SO208


@on("select", t(0.0, 2.0))
def sqrt_where_positive_loss(v):
    root = torch.sqrt(v).where(v > 0, torch.zeros_like(v))  # SO208
    return root.mean()


@on("select", t(0.0, 2.0), t(0.0, 1.0))
def kept_ratio_loss(num, den):
    ok = den.abs() > 1e-3
    return torch.where(ok, num / den, torch.zeros_like(num)).sum()  # SO208


# ---- training


@on("overlap", torch.ones(70000), torch.ones(70000))
def soft_f1(y_hat, y):
    tp = (y_hat * y).sum()  # SO210
    fp = (y_hat * (1 - y)).sum()
    fn = ((1 - y_hat) * y).sum()
    return 1 - 2 * tp / (2 * tp + fn + fp + 1)


@on("overlap", torch.ones(70000), torch.ones(70000))
class JaccardDistance(nn.Module):
    def forward(self, p, q):
        num = torch.minimum(p, q).sum()  # SO210
        den = torch.maximum(p, q).sum()
        return 1 - (num + 1) / (den + 1)


@on("overlap", 4096 + normal(64))
def batch_variance_loss(a):
    n = a.numel()
    var = a.square().sum() / n - (a.sum() / n).square()  # SO201?, SO212
    return var.sqrt()
