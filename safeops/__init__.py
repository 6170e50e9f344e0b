"""safeops: loss building blocks for PyTorch that stay correct under mixed precision, at the speed of memory.

    import safeops

    loss = safeops.mse_loss(prediction, target, mask=valid)

Functions follow torch and torch.nn.functional in names, arguments and defaults; masks are boolean, True = keep.
"""

import importlib
import os
from typing import TYPE_CHECKING

from safeops import distributed
from safeops.amp.clip_grad_norm_ import clip_grad_norm_
from safeops.amp.combine_losses import combine_losses
from safeops.amp.fp32_region import fp32_region
from safeops.amp.grad_norm import grad_norm
from safeops.amp.to_device import to_device
from safeops.amp.warmup import warmup
from safeops.core import VERSION
from safeops.head.head_loss import head_loss
from safeops.ops.classification.cross_entropy import cross_entropy
from safeops.ops.classification.ctc_loss import ctc_loss
from safeops.ops.classification.masked_log_softmax import masked_log_softmax
from safeops.ops.classification.masked_softmax import masked_softmax
from safeops.ops.classification.multi_margin_loss import multi_margin_loss
from safeops.ops.classification.multilabel_margin_loss import multilabel_margin_loss
from safeops.ops.classification.multilabel_soft_margin_loss import multilabel_soft_margin_loss
from safeops.ops.classification.nll_loss import nll_loss
from safeops.ops.classification.softmax_focal_loss import softmax_focal_loss
from safeops.ops.classification.token_log_probs import token_log_probs
from safeops.ops.divergences.js_div_with_logits import js_div_with_logits
from safeops.ops.divergences.kl_div_with_logits import kl_div_with_logits
from safeops.ops.divergences.reverse_kl_div_with_logits import reverse_kl_div_with_logits
from safeops.ops.divergences.tv_with_logits import tv_with_logits
from safeops.ops.elementwise.apply_where import apply_where
from safeops.ops.elementwise.log1mexp import log1mexp
from safeops.ops.elementwise.magnitude import magnitude
from safeops.ops.elementwise.masked_fill import masked_fill
from safeops.ops.elementwise.safe_acos import safe_acos
from safeops.ops.elementwise.safe_acosh import safe_acosh
from safeops.ops.elementwise.safe_asin import safe_asin
from safeops.ops.elementwise.safe_atan2 import safe_atan2
from safeops.ops.elementwise.safe_div import safe_div
from safeops.ops.elementwise.safe_exp import safe_exp
from safeops.ops.elementwise.safe_log import safe_log
from safeops.ops.elementwise.safe_pow import safe_pow
from safeops.ops.elementwise.safe_reciprocal import safe_reciprocal
from safeops.ops.elementwise.safe_rsqrt import safe_rsqrt
from safeops.ops.elementwise.safe_sqrt import safe_sqrt
from safeops.ops.elementwise.xlogy import xlogy
from safeops.ops.images.lpips_distance import lpips_distance
from safeops.ops.images.ms_ssim import ms_ssim
from safeops.ops.images.psnr import psnr
from safeops.ops.images.ssim import ssim
from safeops.ops.images.ssim_loss import ssim_loss
from safeops.ops.images.total_variation import total_variation
from safeops.ops.linear.linear_cross_entropy import linear_cross_entropy
from safeops.ops.linear.linear_js_div import linear_js_div
from safeops.ops.linear.linear_kl_div import linear_kl_div
from safeops.ops.linear.linear_reverse_kl_div import linear_reverse_kl_div
from safeops.ops.linear.linear_token_log_probs import linear_token_log_probs
from safeops.ops.linear.linear_tv import linear_tv
from safeops.ops.losses.binary_cross_entropy import binary_cross_entropy
from safeops.ops.losses.binary_cross_entropy_with_logits import binary_cross_entropy_with_logits
from safeops.ops.losses.charbonnier_loss import charbonnier_loss
from safeops.ops.losses.dice_loss import dice_loss
from safeops.ops.losses.gaussian_kl_div import gaussian_kl_div
from safeops.ops.losses.gaussian_nll_loss import gaussian_nll_loss
from safeops.ops.losses.generalized_dice_loss import generalized_dice_loss
from safeops.ops.losses.hinge_embedding_loss import hinge_embedding_loss
from safeops.ops.losses.huber_loss import huber_loss
from safeops.ops.losses.js_div import js_div
from safeops.ops.losses.kl_div import kl_div
from safeops.ops.losses.l1_loss import l1_loss
from safeops.ops.losses.log_cosh_loss import log_cosh_loss
from safeops.ops.losses.margin_ranking_loss import margin_ranking_loss
from safeops.ops.losses.mse_loss import mse_loss
from safeops.ops.losses.poisson_nll_loss import poisson_nll_loss
from safeops.ops.losses.quantile_loss import quantile_loss
from safeops.ops.losses.sigmoid_focal_loss import sigmoid_focal_loss
from safeops.ops.losses.silog_loss import silog_loss
from safeops.ops.losses.smooth_l1_loss import smooth_l1_loss
from safeops.ops.losses.soft_margin_loss import soft_margin_loss
from safeops.ops.losses.tversky_loss import tversky_loss
from safeops.ops.policies.discounted_sum import discounted_sum
from safeops.ops.policies.group_advantages import group_advantages
from safeops.ops.policies.kl_to_reference import kl_to_reference
from safeops.ops.policies.policy_loss import policy_loss
from safeops.ops.rankings.cox_loss import cox_loss
from safeops.ops.rankings.ordinal_loss import ordinal_loss
from safeops.ops.rankings.plackett_luce_loss import plackett_luce_loss
from safeops.ops.rankings.preference_loss import preference_loss
from safeops.ops.rankings.reward_ranking_loss import reward_ranking_loss
from safeops.ops.reductions.masked_amax import masked_amax
from safeops.ops.reductions.masked_amin import masked_amin
from safeops.ops.reductions.masked_count import masked_count
from safeops.ops.reductions.masked_logsumexp import masked_logsumexp
from safeops.ops.reductions.masked_mean import masked_mean
from safeops.ops.reductions.masked_norm import masked_norm
from safeops.ops.reductions.masked_rms import masked_rms
from safeops.ops.reductions.masked_std import masked_std
from safeops.ops.reductions.masked_sum import masked_sum
from safeops.ops.reductions.masked_sum_of_squares import masked_sum_of_squares
from safeops.ops.reductions.masked_var import masked_var
from safeops.ops.reductions.safe_norm import safe_norm
from safeops.ops.reductions.segment_max import segment_max
from safeops.ops.reductions.segment_mean import segment_mean
from safeops.ops.reductions.segment_sum import segment_sum
from safeops.ops.routers.load_balancing_loss import load_balancing_loss
from safeops.ops.routers.router_entropy import router_entropy
from safeops.ops.routers.router_load import router_load
from safeops.ops.routers.router_z_loss import router_z_loss
from safeops.ops.selection.masked_compact import masked_compact
from safeops.ops.selection.masked_scatter import masked_scatter
from safeops.ops.selection.masked_select import masked_select
from safeops.ops.selection.safe_gather import safe_gather
from safeops.ops.selection.safe_index_select import safe_index_select
from safeops.ops.vectors.box_iou_loss import box_iou_loss
from safeops.ops.vectors.cosine_embedding_loss import cosine_embedding_loss
from safeops.ops.vectors.cosine_similarity import cosine_similarity
from safeops.ops.vectors.info_nce_loss import info_nce_loss
from safeops.ops.vectors.normalize import normalize
from safeops.ops.vectors.si_sdr_loss import si_sdr_loss
from safeops.ops.vectors.supervised_contrastive_loss import supervised_contrastive_loss
from safeops.ops.vectors.triplet_margin_loss import triplet_margin_loss
from safeops.ops.vectors.triplet_margin_with_distance_loss import triplet_margin_with_distance_loss

if TYPE_CHECKING:
    from safeops import debug, nn
    from safeops.safe.mode import safe_mode

__version__ = VERSION

__all__ = [
    "apply_where",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "box_iou_loss",
    "charbonnier_loss",
    "clip_grad_norm_",
    "combine_losses",
    "cosine_embedding_loss",
    "cosine_similarity",
    "cox_loss",
    "cross_entropy",
    "ctc_loss",
    "debug",
    "dice_loss",
    "discounted_sum",
    "distributed",
    "fp32_region",
    "gaussian_kl_div",
    "gaussian_nll_loss",
    "generalized_dice_loss",
    "grad_norm",
    "group_advantages",
    "head_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "info_nce_loss",
    "js_div",
    "js_div_with_logits",
    "kl_div",
    "kl_div_with_logits",
    "kl_to_reference",
    "l1_loss",
    "linear_cross_entropy",
    "linear_js_div",
    "linear_kl_div",
    "linear_reverse_kl_div",
    "linear_token_log_probs",
    "linear_tv",
    "load_balancing_loss",
    "log1mexp",
    "log_cosh_loss",
    "lpips_distance",
    "magnitude",
    "margin_ranking_loss",
    "masked_amax",
    "masked_amin",
    "masked_compact",
    "masked_count",
    "masked_fill",
    "masked_log_softmax",
    "masked_logsumexp",
    "masked_mean",
    "masked_norm",
    "masked_rms",
    "masked_scatter",
    "masked_select",
    "masked_softmax",
    "masked_std",
    "masked_sum",
    "masked_sum_of_squares",
    "masked_var",
    "ms_ssim",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "nn",
    "normalize",
    "ordinal_loss",
    "plackett_luce_loss",
    "poisson_nll_loss",
    "policy_loss",
    "preference_loss",
    "psnr",
    "quantile_loss",
    "reverse_kl_div_with_logits",
    "reward_ranking_loss",
    "router_entropy",
    "router_load",
    "router_z_loss",
    "safe_acos",
    "safe_acosh",
    "safe_asin",
    "safe_atan2",
    "safe_div",
    "safe_exp",
    "safe_gather",
    "safe_index_select",
    "safe_log",
    "safe_mode",
    "safe_norm",
    "safe_pow",
    "safe_reciprocal",
    "safe_rsqrt",
    "safe_sqrt",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "si_sdr_loss",
    "sigmoid_focal_loss",
    "silog_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softmax_focal_loss",
    "ssim",
    "ssim_loss",
    "supervised_contrastive_loss",
    "to_device",
    "token_log_probs",
    "total_variation",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "tv_with_logits",
    "tversky_loss",
    "warmup",
    "xlogy",
]

# Imported at their first use: a training that uses none of them does not import a quarter of the package.
_LAZY = {"debug": "debug", "nn": "nn", "safe": "safe", "safe_mode": "safe.mode"}


def __getattr__(name):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_LAZY[name]}")
    globals()[name] = value = getattr(module, name) if name == "safe_mode" else module
    return value


def __dir__():
    return sorted({*globals(), *_LAZY})


if os.environ.get("SAFEOPS_SAFE", "0") not in ("", "0"):
    from safeops.safe.mode import enter_by_environment

    enter_by_environment()
