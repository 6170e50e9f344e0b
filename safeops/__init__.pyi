"""Types of safeops, written by scripts/type_stubs.py."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from safeops import debug as debug
from safeops import distributed as distributed
from safeops import nn as nn
from safeops.amp.clip_grad_norm_ import clip_grad_norm_ as clip_grad_norm_
from safeops.amp.combine_losses import combine_losses as combine_losses
from safeops.amp.fp32_region import fp32_region as fp32_region
from safeops.amp.grad_norm import grad_norm as grad_norm
from safeops.amp.to_device import to_device as to_device
from safeops.amp.warmup import warmup as warmup
from safeops.head.head_loss import head_loss as head_loss
from safeops.ops.classification.cross_entropy import CrossEntropyOfSupport
from safeops.ops.classification.token_log_probs import TokenLogProbs
from safeops.ops.classification.token_log_probs import TokenLogProbsAndArgmax
from safeops.ops.classification.token_log_probs import TokenLogProbsOfSupport
from safeops.ops.elementwise.apply_where import apply_where as apply_where
from safeops.ops.policies.policy_loss import PolicyLossAndStatistics
from safeops.ops.rankings.preference_loss import PreferenceLossAndRewards
from safeops.ops.routers.router_load import RouterLoad
from safeops.ops.selection.masked_compact import MaskedCompact
from safeops.safe.mode import safe_mode as safe_mode

__version__: str

def binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, *, mask: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def binary_cross_entropy_with_logits(input: Tensor, target: Tensor, weight: Tensor | None = None, *,
    mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    pos_weight: Tensor | None = None) -> Tensor: ...
def box_iou_loss(input: Tensor, target: Tensor, *, kind: Literal["iou", "giou", "diou", "ciou"] = "iou",
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def charbonnier_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", eps: float = 0.001) -> Tensor: ...
def cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, *,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float | None = 1e-08) -> Tensor: ...
def cox_loss(risk: Tensor, time: Tensor, event: Tensor, *, ties: Literal["breslow", "efron"] = "breslow",
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, *, mask: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, row_weight: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero", support: None = None,
    support_threshold: Tensor | None = None, outside: Literal["-inf", "mask"] = "-inf") -> Tensor: ...
@overload
def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, *, mask: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, row_weight: Tensor | None = None, temperature: float = 1.0, softcap: float | None = None,
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    support: Tensor | Sequence[Tensor], support_threshold: Tensor | None = None,
    outside: Literal["-inf", "mask"] = "-inf") -> CrossEntropyOfSupport: ...
def ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int], blank: int = 0, reduction: Literal["none", "mean", "sum"] = "mean",
    zero_infinity: bool = False, *, mask: Tensor | None = None, weight: Tensor | None = None,
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def dice_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", squared_pred: bool = False, smooth_nr: float = 1e-05,
    smooth_dr: float = 1e-05, ignore_index: int | None = None, batch: bool = False) -> Tensor: ...
def discounted_sum(rewards: Tensor, values: Tensor | None = None, mask: Tensor | None = None, *, gamma: float,
    lam: float = 1.0, cu_seqlens: Tensor | None = None) -> Tensor: ...
def gaussian_kl_div(mean: Tensor, log_var: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum", "batchmean"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", prior_mean: float = 0.0, prior_log_var: float = 0.0) -> Tensor: ...
def gaussian_nll_loss(input: Tensor, target: Tensor, var: Tensor, full: bool = False, eps: float = 1e-06,
    reduction: Literal["none", "mean", "sum"] = "mean", *, mask: Tensor | None = None, weight: Tensor | None = None,
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def generalized_dice_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", squared_pred: bool = False, smooth_nr: float = 1e-05,
    smooth_dr: float = 1e-05, ignore_index: int | None = None, batch: bool = False) -> Tensor: ...
def group_advantages(rewards: Tensor, groups: int | Tensor, *, scale: bool = True, leave_one_out: bool = False,
    mask: Tensor | None = None, correction: float = 1.0, eps: float = 0.0001,
    process_group: object | None = None) -> Tensor: ...
def hinge_embedding_loss(input: Tensor, target: Tensor, margin: float = 1.0, *, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def huber_loss(input: Tensor, target: Tensor, reduction: Literal["none", "mean", "sum"] = "mean", delta: float = 1.0,
    weight: Tensor | None = None, *, mask: Tensor | None = None, denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def info_nce_loss(query: Tensor, positive_key: Tensor, negative_keys: Tensor | None = None, *,
    temperature: Tensor | float = 0.1, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def js_div(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum", "batchmean"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def js_div_with_logits(input: Tensor, target: Tensor | None = None, *, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, beta: float = 0.5, target_values: Tensor | None = None,
    target_indices: Tensor | None = None, tail: Literal["bucket", "renormalize"] = "bucket",
    support: Tensor | Sequence[Tensor] | None = None, support_threshold: Tensor | None = None) -> Tensor: ...
def kl_div(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum", "batchmean"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", log_target: bool = False) -> Tensor: ...
def kl_div_with_logits(input: Tensor, target: Tensor | None = None, *, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, target_values: Tensor | None = None, target_indices: Tensor | None = None,
    tail: Literal["bucket", "renormalize"] = "bucket", support: Tensor | Sequence[Tensor] | None = None,
    support_threshold: Tensor | None = None) -> Tensor: ...
def kl_to_reference(log_prob: Tensor, reference_log_prob: Tensor, *, kind: Literal["k1", "k2", "k3"] = "k3",
    mask: Tensor | None = None) -> Tensor: ...
def l1_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, row_weight: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", memory: Literal["auto", "low"] = "auto",
    logits_dtype: torch.dtype | None = None) -> Tensor: ...
def linear_js_div(input: Tensor, linear_weight: Tensor, target: Tensor | None = None,
    target_weight: Tensor | None = None, *, linear_bias: Tensor | None = None, target_bias: Tensor | None = None,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, beta: float = 0.5, logits_dtype: torch.dtype | None = None,
    target_values: Tensor | None = None, target_indices: Tensor | None = None,
    tail: Literal["bucket", "renormalize"] = "bucket", support: Tensor | Sequence[Tensor] | None = None,
    support_threshold: Tensor | None = None) -> Tensor: ...
def linear_kl_div(input: Tensor, linear_weight: Tensor, target: Tensor | None = None,
    target_weight: Tensor | None = None, *, linear_bias: Tensor | None = None, target_bias: Tensor | None = None,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, logits_dtype: torch.dtype | None = None, target_values: Tensor | None = None,
    target_indices: Tensor | None = None, tail: Literal["bucket", "renormalize"] = "bucket",
    support: Tensor | Sequence[Tensor] | None = None, support_threshold: Tensor | None = None) -> Tensor: ...
def linear_reverse_kl_div(input: Tensor, linear_weight: Tensor, target: Tensor | None = None,
    target_weight: Tensor | None = None, *, linear_bias: Tensor | None = None, target_bias: Tensor | None = None,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, logits_dtype: torch.dtype | None = None, target_values: Tensor | None = None,
    target_indices: Tensor | None = None, tail: Literal["bucket", "renormalize"] = "bucket",
    support: Tensor | Sequence[Tensor] | None = None, support_threshold: Tensor | None = None) -> Tensor: ...
@overload
def linear_token_log_probs(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    mask: Tensor | None = None, ignore_index: int = -100, temperature: float = 1.0, softcap: float | None = None,
    logits_dtype: torch.dtype | None = None, support: None = None, support_threshold: Tensor | None = None,
    outside: Literal["-inf", "mask"] = "-inf") -> TokenLogProbs: ...
@overload
def linear_token_log_probs(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    mask: Tensor | None = None, ignore_index: int = -100, temperature: float = 1.0, softcap: float | None = None,
    logits_dtype: torch.dtype | None = None, support: Tensor | Sequence[Tensor],
    support_threshold: Tensor | None = None, outside: Literal["-inf", "mask"] = "-inf") -> TokenLogProbsOfSupport: ...
def linear_tv(input: Tensor, linear_weight: Tensor, target: Tensor | None = None, target_weight: Tensor | None = None,
    *, linear_bias: Tensor | None = None, target_bias: Tensor | None = None, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, logits_dtype: torch.dtype | None = None, target_values: Tensor | None = None,
    target_indices: Tensor | None = None, tail: Literal["bucket", "renormalize"] = "bucket",
    support: Tensor | Sequence[Tensor] | None = None, support_threshold: Tensor | None = None) -> Tensor: ...
def load_balancing_loss(logits: Tensor, expert_index: Tensor | None = None, *, top_k: int | None = None,
    scores: Literal["softmax", "sigmoid", "probabilities"] = "softmax",
    level: Literal["batch", "sequence", "global"] = "batch", load: Tensor | None = None, group: object | None = None,
    mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def log1mexp(input: Tensor) -> Tensor: ...
def log_cosh_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def lpips_distance(features0: Sequence[Tensor], features1: Sequence[Tensor], weights: Sequence[Tensor] | None = None, *,
    mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def magnitude(input: Tensor, other: Tensor | None = None) -> Tensor: ...
def margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, *,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_amax(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_amin(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_compact(input: Tensor, mask: Tensor, *, capacity: int, fill_value: float = 0) -> MaskedCompact: ...
def masked_count(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_fill(input: Tensor, fill_mask: Tensor, value: float | Tensor) -> Tensor: ...
def masked_log_softmax(input: Tensor, mask: Tensor | None = None, dim: int = -1) -> Tensor: ...
def masked_logsumexp(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise", "-inf"] = "zero") -> Tensor: ...
def masked_mean(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_norm(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *, ord: float = 2,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_rms(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Tensor: ...
def masked_select(input: Tensor, mask: Tensor) -> Tensor: ...
def masked_softmax(input: Tensor, mask: Tensor | None = None, dim: int = -1) -> Tensor: ...
def masked_std(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    correction: float = 1, keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_sum(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_sum_of_squares(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def masked_var(input: Tensor, mask: Tensor | None = None, dim: int | Sequence[int] | None = None, *,
    correction: float = 1, keepdim: bool = False, weight: Tensor | None = None, dtype: torch.dtype | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def ms_ssim(input: Tensor, target: Tensor, *, mask: Tensor | None = None, data_range: float = 1.0, win_size: int = 11,
    win_sigma: float = 1.5, k1: float = 0.01, k2: float = 0.03, padding: Literal["valid", "same"] = "valid",
    betas: Sequence[float] | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def mse_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def multi_margin_loss(input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None, *,
    mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def multilabel_margin_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def multilabel_soft_margin_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, *,
    mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, *, mask: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", ignore_index: int = -100,
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def normalize(input: Tensor, p: float = 2.0, dim: int | Sequence[int] = 1, eps: float | None = 1e-12) -> Tensor: ...
def ordinal_loss(logits: Tensor, target: Tensor, *, kind: Literal["corn", "coral"] = "corn", mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def plackett_luce_loss(scores: Tensor, ranking: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def poisson_nll_loss(input: Tensor, target: Tensor, log_input: bool = True, full: bool = False, *,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    eps: float = 1e-08) -> Tensor: ...
def policy_loss(log_prob: Tensor, old_log_prob: Tensor | None, advantage: Tensor, *, mask: Tensor | None = None,
    weight: Tensor | None = None, cu_seqlens: Tensor | None = None,
    level: Literal["token", "sequence", "sequence_token"] = "token", clip: float | Sequence[float] = (0.2, 0.28),
    dual_clip: float | None = None, objective: Literal["clip", "cispo"] = "clip",
    reference_log_prob: Tensor | None = None, kl: Literal["k1", "k2", "k3"] = "k3", beta: float = 0.0,
    reduction: Literal["none", "mean", "sum", "sequence_mean"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> PolicyLossAndStatistics: ...
def preference_loss(chosen: Tensor, rejected: Tensor, reference_chosen: Tensor | None = None,
    reference_rejected: Tensor | None = None, *,
    objective: Literal["dpo", "ipo", "kto", "orpo", "simpo", "cpo"] = "dpo", beta: float = 0.1,
    label_smoothing: float = 0.0, margin: Tensor | float = 0.0, reference_point: Tensor | None = None,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> PreferenceLossAndRewards: ...
def psnr(input: Tensor, target: Tensor, *, mask: Tensor | None = None, data_range: float = 1.0,
    reduction: Literal["none", "mean", "sum"] = "mean", empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def quantile_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", quantile: float | Sequence[float] | Tensor = 0.5) -> Tensor: ...
def reverse_kl_div_with_logits(input: Tensor, target: Tensor | None = None, *, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, target_values: Tensor | None = None, target_indices: Tensor | None = None,
    tail: Literal["bucket", "renormalize"] = "bucket", support: Tensor | Sequence[Tensor] | None = None,
    support_threshold: Tensor | None = None) -> Tensor: ...
def reward_ranking_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float | None = None, center: float = 0.0,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def router_entropy(logits: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def router_load(logits: Tensor, expert_index: Tensor | None = None, *, top_k: int | None = None,
    scores: Literal["softmax", "sigmoid", "probabilities"] = "softmax", group: object | None = None,
    mask: Tensor | None = None) -> RouterLoad: ...
def router_z_loss(logits: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def safe_acos(input: Tensor) -> Tensor: ...
def safe_acosh(input: Tensor) -> Tensor: ...
def safe_asin(input: Tensor) -> Tensor: ...
def safe_atan2(input: Tensor, other: Tensor) -> Tensor: ...
def safe_div(input: Tensor, other: Tensor | float, *, eps: float | None = None, fill_value: float | None = 0.0,
    dtype: torch.dtype | None = None) -> Tensor: ...
def safe_exp(input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor: ...
def safe_gather(input: Tensor, dim: int, index: Tensor, *, fill_value: float = 0) -> Tensor: ...
def safe_index_select(input: Tensor, dim: int, index: Tensor, *, fill_value: float = 0) -> Tensor: ...
def safe_log(input: Tensor, *, eps: float | None = None, dtype: torch.dtype | None = None) -> Tensor: ...
def safe_norm(input: Tensor, dim: int | Sequence[int] | None = None, *, ord: float = 2, keepdim: bool = False,
    mask: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor: ...
def safe_pow(input: Tensor, exponent: Tensor | float, *, dtype: torch.dtype | None = None) -> Tensor: ...
def safe_reciprocal(input: Tensor, *, eps: float | None = None, fill_value: float | None = 0.0,
    dtype: torch.dtype | None = None) -> Tensor: ...
def safe_rsqrt(input: Tensor, *, eps: float | None = None, dtype: torch.dtype | None = None) -> Tensor: ...
def safe_sqrt(input: Tensor, *, eps: float | None = None, dtype: torch.dtype | None = None) -> Tensor: ...
def segment_max(input: Tensor, *, cu_seqlens: Tensor | None = None, segment_ids: Tensor | None = None,
    num_segments: int | None = None, mask: Tensor | None = None, weight: Tensor | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def segment_mean(input: Tensor, *, cu_seqlens: Tensor | None = None, segment_ids: Tensor | None = None,
    num_segments: int | None = None, mask: Tensor | None = None, weight: Tensor | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def segment_sum(input: Tensor, *, cu_seqlens: Tensor | None = None, segment_ids: Tensor | None = None,
    num_segments: int | None = None, mask: Tensor | None = None, weight: Tensor | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def si_sdr_loss(input: Tensor, target: Tensor, *, zero_mean: bool = False, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def sigmoid_focal_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", alpha: float = 0.25, gamma: float = 2.0) -> Tensor: ...
def silog_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", variance_focus: float = 0.85, batch: bool = True,
    eps: float = 0.0) -> Tensor: ...
def smooth_l1_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", beta: float = 1.0) -> Tensor: ...
def soft_margin_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def softmax_focal_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, *, gamma: float = 2.0,
    mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean", ignore_index: int = -100,
    row_weight: Tensor | None = None, denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def ssim(input: Tensor, target: Tensor, *, mask: Tensor | None = None, data_range: float = 1.0, win_size: int = 11,
    win_sigma: float = 1.5, k1: float = 0.01, k2: float = 0.03, padding: Literal["valid", "same"] = "valid",
    reduction: Literal["none", "mean", "sum"] = "mean", empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def ssim_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", data_range: float = 1.0, win_size: int = 11,
    win_sigma: float = 1.5, k1: float = 0.01, k2: float = 0.03,
    padding: Literal["valid", "same"] = "valid") -> Tensor: ...
def supervised_contrastive_loss(features: Tensor, labels: Tensor, *, temperature: Tensor | float = 0.07,
    mask: Tensor | None = None, weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
@overload
def token_log_probs(logits: Tensor, target: Tensor, *, mask: Tensor | None = None, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, with_argmax: Literal[False] = False, support: None = None,
    support_threshold: Tensor | None = None, outside: Literal["-inf", "mask"] = "-inf") -> TokenLogProbs: ...
@overload
def token_log_probs(logits: Tensor, target: Tensor, *, mask: Tensor | None = None, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, with_argmax: Literal[True], support: None = None,
    support_threshold: Tensor | None = None, outside: Literal["-inf", "mask"] = "-inf") -> TokenLogProbsAndArgmax: ...
@overload
def token_log_probs(logits: Tensor, target: Tensor, *, mask: Tensor | None = None, ignore_index: int = -100,
    temperature: float = 1.0, softcap: float | None = None, with_argmax: Literal[False] = False,
    support: Tensor | Sequence[Tensor], support_threshold: Tensor | None = None,
    outside: Literal["-inf", "mask"] = "-inf") -> TokenLogProbsOfSupport: ...
def total_variation(input: Tensor, *, mask: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-06, swap: bool = False, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def triplet_margin_with_distance_loss(anchor: Tensor, positive: Tensor, negative: Tensor, *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None, margin: float = 1.0, swap: bool = False,
    reduction: Literal["none", "mean", "sum"] = "mean", mask: Tensor | None = None, weight: Tensor | None = None,
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero") -> Tensor: ...
def tv_with_logits(input: Tensor, target: Tensor | None = None, *, mask: Tensor | None = None,
    weight: Tensor | None = None, reduction: Literal["none", "mean", "sum"] = "mean",
    denominator: Tensor | float | None = None, empty: Literal["zero", "nan", "raise"] = "zero",
    temperature: float = 1.0, target_values: Tensor | None = None, target_indices: Tensor | None = None,
    tail: Literal["bucket", "renormalize"] = "bucket", support: Tensor | Sequence[Tensor] | None = None,
    support_threshold: Tensor | None = None) -> Tensor: ...
def tversky_loss(input: Tensor, target: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean", denominator: Tensor | float | None = None,
    empty: Literal["zero", "nan", "raise"] = "zero", squared_pred: bool = False, smooth_nr: float = 1e-05,
    smooth_dr: float = 1e-05, ignore_index: int | None = None, batch: bool = False, alpha: float = 0.5,
    beta: float = 0.5, gamma: float = 1.0) -> Tensor: ...
def xlogy(input: Tensor, other: Tensor | float) -> Tensor: ...
