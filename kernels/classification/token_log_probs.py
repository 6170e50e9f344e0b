"""token_log_probs: for each row the log probability of its class, the entropy and the logsumexp. The kernels are those
of cross_entropy, whose loss is minus the log probability. The same pass adds up the sum that the entropy needs, and
finds the class of the largest logit."""

import torch

from ..engine.row_plan import launch
from .cross_entropy import prepare
from .cross_entropy_backward import OPTIONS, check_stats
from .cross_entropy_backward import prepare as prepare_backward
from .logits import logits_numbers


def token_log_probs(*operands):
    return forward("token_log_probs", False, *operands)


def token_log_probs_argmax(*operands):
    return forward("token_log_probs_argmax", True, *operands)


def forward(name, argmax, input, target, mask=None, ignore_index=-100, temperature=1.0, softcap=0.0):
    results, plan, constants, options = prepare(
        input, target, None, mask, False, temperature, softcap, entropy=True, argmax=argmax
    )
    if results[0].numel():
        floats = 0.0, 0.0, ignore_index, *logits_numbers(temperature, softcap)
        launch(name, *plan, floats, constants, **options)
    return results


def token_log_probs_backward(
    grad, input, target, row_stats, mask=None, ignore_index=-100, temperature=1.0, softcap=0.0, partial=False
):
    dx = torch.empty_like(input)
    check_stats(row_stats, 3, input)
    if input.numel():
        grad = grad.contiguous()  # three numbers per row
        plan, constants = prepare_backward(
            grad[0], input, target, row_stats[0], None, mask, False, partial, dx, None, temperature=temperature,
            softcap=softcap, entropy=True,
        )  # fmt: skip
        floats = 0.0, 0.0, ignore_index, *logits_numbers(temperature, softcap)
        launch("token_log_probs_backward", *plan, floats, constants, **OPTIONS)
    return dx
