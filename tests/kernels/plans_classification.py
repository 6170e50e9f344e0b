"""Makes plans (kernel, constants and launch options, from meta tensors) of cross_entropy, nll_loss, multi_margin_loss
and box_iou_loss, forward and backward. test_triton_build.py compiles them."""

import re

import torch
from safeops.kernels.classification import cross_entropy as ce
from safeops.kernels.classification import cross_entropy_backward as ce_backward
from safeops.kernels.classification import multi_margin_loss as margin
from safeops.kernels.classification import nll_loss as nll
from safeops.kernels.engine import row_plan as row
from safeops.kernels.vectors import box_iou_loss as box

from tests.kernels.plans_statistics import BF16, F32, F64, meta

OFTEN = re.compile(  # names of the plans that are compiled for other architectures than sm_90, too
    r"aligned cross_entropy( shares few long| smoothing images|_backward images)? bfloat16|"
    r"aligned multi_margin(_backward few long)? bfloat16|"
    r"aligned (cross_entropy|multi_margin)(_backward)? odd long( shares)? bfloat16|"
    r"general (cross_entropy|multi_margin)(_backward)? odd bfloat16|general box(_backward)? bfloat16"
)
I64 = torch.int64


def tensors(x, probabilities, weight):
    rows = x.shape[:1] + x.shape[2:]
    target = torch.empty_like(x) if probabilities else meta(rows, I64)
    return target, meta((x.shape[1],), F32) if weight else None, meta(rows, torch.bool), rows


def forward(x, probabilities=False, weight=False, smooth=False, **options):
    target, w, mask, _ = tensors(x, probabilities, weight)
    _, plan, constants, options = ce.prepare(x, target, w, mask, smooth, **options)
    return row.plan(*plan, constants, **options)


def backward(
    x, probabilities=False, weight=False, smooth=False, partial=False, need_target=False, mean=False, **options
):
    target, w, mask, rows = tensors(x, probabilities, weight)
    grad, dq = meta((), F32).expand(rows), torch.empty_like(target) if need_target else None
    denominator = meta((), F64) if mean else None
    plan, constants = ce_backward.prepare(
        grad, x, target, meta(rows, F64), w, mask, smooth, partial, torch.empty_like(x), dq, denominator, **options
    )
    return row.plan(*plan, constants, **ce_backward.OPTIONS)


def picked(x, weight=True, mean=None):
    target, w, mask, _ = tensors(x, False, weight)
    _, plan, constants = nll.prepare(x, target, w, mask, mean)
    return row.plan(*plan, constants, phases=row.PICK)


def picked_backward(x, weight=True):
    target, w, mask, rows = tensors(x, False, weight)
    plan, constants = ce_backward.prepare(meta(rows, F32), None, target, None, w, mask, False, False, x, None)
    return row.plan(*plan, constants, **ce_backward.OPTIONS)


def margins(x, p=1, gradient=False, mean=None, weight=False):
    """Returns multi_margin_loss's plan for scores x (..., C). gradient: that of the backward."""
    target, w, mask, rows = tensors(x.movedim(-1, 1), False, weight)
    grad = meta((), F32).expand(rows) if gradient else None
    _, plan, constants = margin.prepare(x, target, w, mask if weight else None, p, mean, grad=grad)
    return row.plan(*plan, constants, **margin.OPTIONS)


def boxes(x, kind=3, gradient=False, mean=None, masked=False):
    """Returns box_iou_loss's plan for boxes x (..., 4). gradient: that of the backward."""
    rows = x.shape[:-1]
    upstream = {"grad": meta((), F32).expand(rows), "needed": (True, True)} if gradient else {}
    _, plan, constants = box.prepare(x, x, meta(rows, torch.bool) if masked else None, kind, mean, **upstream)
    return row.plan(*plan, constants, **box.OPTIONS)


def cases():
    """Returns {name: plan} in bf16, and in fp64 where it differs. A name lists the branches of the kernel that the plan
    takes."""
    results = {}
    for dtype in (BF16, F64):
        name, x = str(dtype)[6:], meta((8192, 32000), dtype)
        results[f"aligned cross_entropy {name}"] = forward(x)
        results[f"aligned cross_entropy_backward {name}"] = backward(x)
    name, x, short, few = "bfloat16", meta((8192, 32000), BF16), meta((1 << 16, 1024), BF16), meta((128, 131072), BF16)
    images, across, odd = meta((64, 32, 4096), BF16), meta((8192, 4096), BF16, (1, 8192)), meta((511, 4095), BF16)
    words = meta((1 << 12, 50257), BF16)
    many, tall, huge = meta((1 << 12, 1 << 17), BF16), meta((2, 1 << 18, 64), BF16), meta((1 << 17, 1 << 16), BF16)
    for make, which in ((forward, "cross_entropy"), (backward, "cross_entropy_backward")):
        results[f"aligned {which} short {name}"] = make(short)
        results[f"aligned {which} of rows {name}"] = make(short[:2048], weight=True, smooth=True, mean=True)
        results[f"aligned {which} of few long rows {name}"] = make(few, mean=True)
        results[f"aligned {which} images {name}"] = make(images)
        results[f"aligned {which} wide {name}"] = make(huge)
        results[f"aligned {which} smoothing weight {name}"] = make(x, weight=True, smooth=True)
        results[f"aligned {which} shares images {name}"] = make(images, True, True, True)
        results[f"general {which} odd {name}"] = make(odd, weight=True, smooth=True)
        results[f"aligned {which} odd long {name}"] = make(words)
        results[f"aligned {which} odd long smoothing {name}"] = make(words, weight=True, smooth=True)
        results[f"aligned {which} odd long shares {name}"] = make(words, True, True, True)
    read, capped = {"entropy": True}, {"temperature": 0.5, "softcap": 30.0}
    for make, which in ((forward, ""), (backward, "_backward")):
        results[f"aligned token_log_probs{which} {name}"] = make(x, **read)
        results[f"aligned token_log_probs{which} capped {name}"] = make(x, **read, **capped)
        results[f"aligned token_log_probs{which} images {name}"] = make(images, **read, temperature=0.5)
        results[f"aligned token_log_probs{which} short {name}"] = make(short, **read)
        results[f"aligned token_log_probs{which} odd long {name}"] = make(words, **read, **capped)
        results[f"general token_log_probs{which} odd {name}"] = make(odd, **read, **capped)
        results[f"aligned cross_entropy{which} capped {name}"] = make(x, weight=True, smooth=True, **capped)
        results[f"aligned token_log_probs{which} double"] = make(meta((8192, 32000), F64), **read, **capped)
    argmax = read | {"argmax": True}
    for x_of, which in ((x, ""), (images, " images"), (short, " short"), (few, " few long"), (huge, " wide")):
        results[f"aligned token_log_probs argmax{which} {name}"] = forward(x_of, **argmax)
    results[f"aligned token_log_probs argmax odd long {name}"] = forward(words, **argmax, **capped)
    results[f"general token_log_probs argmax odd {name}"] = forward(odd, **argmax, **capped)
    results["aligned token_log_probs argmax double"] = forward(meta((8192, 32000), F64), **argmax, **capped)
    results[f"aligned token_log_probs few long {name}"] = forward(few, **read)
    results[f"aligned token_log_probs many long {name}"] = forward(many, **read, **capped)
    results[f"aligned cross_entropy few long {name}"] = forward(few)
    results[f"aligned cross_entropy few long columns {name}"] = forward(tall)
    results[f"aligned cross_entropy smoothing few long {name}"] = forward(few, weight=True, smooth=True)
    results[f"aligned cross_entropy smoothing images {name}"] = forward(images, weight=True, smooth=True)
    results[f"aligned cross_entropy shares few long columns {name}"] = forward(tall, True, True, True)
    results[f"aligned cross_entropy shares many long {name}"] = forward(many, True)
    results[f"aligned cross_entropy shares few long {name}"] = forward(few, True, True, True)
    results[f"general cross_entropy transposed {name}"] = forward(across, True, True, True)
    results[f"aligned cross_entropy_backward both {name}"] = backward(x, True, True, True, need_target=True)
    results[f"aligned cross_entropy_backward partial {name}"] = backward(x, smooth=True, partial=True)
    results[f"general nll_loss {name}"] = picked(x)
    results[f"general nll_loss images {name}"] = picked(images)
    results[f"general nll_loss of rows {name}"] = picked(short[:2048], mean=True)
    results[f"aligned nll_loss_backward {name}"] = picked_backward(x, weight=False)
    for gradient, which in ((False, "multi_margin"), (True, "multi_margin_backward")):
        for dtype in (BF16, F64):
            results[f"aligned {which} {str(dtype)[6:]}"] = margins(meta((8192, 32000), dtype), 2, gradient)
        results[f"aligned {which} short {name}"] = margins(short, 1, gradient)
        results[f"aligned {which} few long {name}"] = margins(few, 1, gradient)
        results[f"aligned {which} many long {name}"] = margins(many, 2, gradient)
        results[f"aligned {which} images {name}"] = margins(images.mT, 2, gradient)
        results[f"aligned {which} few long columns {name}"] = margins(tall.mT, 1, gradient)
        results[f"aligned {which} wide {name}"] = margins(huge, 1, gradient)
        results[f"general {which} transposed {name}"] = margins(across[:, 1:], 1, gradient)
        results[f"general {which} odd {name}"] = margins(odd, 2, gradient)
        results[f"aligned {which} odd long {name}"] = margins(words, 2, gradient)
        results[f"aligned {which} weight {name}"] = margins(short, 2, gradient, weight=True)
    for gradient, which in ((False, "box"), (True, "box_backward")):
        for dtype in (BF16, F32, F64):
            results[f"general {which} {str(dtype)[6:]}"] = boxes(meta((1 << 20, 4), dtype), 3, gradient)
        results[f"general {which} giou {name}"] = boxes(meta((1 << 20, 4), BF16), 1, gradient, masked=True)
        results[f"general {which} across {name}"] = boxes(meta((4, 1 << 20), BF16).mT, 2, gradient)
        results[f"general {which} odd {name}"] = boxes(meta((1 << 20, 5), BF16)[:, 1:], 0, gradient)
    results[f"general box of rows {name}"] = boxes(meta((1 << 20, 4), BF16), 3, mean=True)
    results[f"aligned multi_margin of rows {name}"] = margins(short, 1, mean=True)
    results[f"aligned multi_margin of few long rows {name}"] = margins(few, 1, mean=True)
    return results


def covered(plans):
    """Assert that there are plans of each kind: rows held whole, read in parts, and split among blocks; targets as
    indices and as probabilities, with smoothing and without; multi_margin_loss with p = 1 and p = 2."""
    seen = {
        (plan.kernel.fn.__name__, bool(plan.kinds.get("probabilities")), bool(plan.constants.get("SMOOTH")))
        for plan in plans
    }
    every = {(False, False), (False, True), (True, True)}
    for kernel in ("cross_entropy_kernel", "cross_entropy_backward_kernel"):
        assert {(kernel, *which) for which in every} <= seen
    cut = {
        (plan.constants["PIECES"], plan.values["splits"] > 1) for plan in plans if plan.kernel.fn is ce.CROSS_ENTROPY.fn
    }
    assert cut == {(False, False), (True, False), (True, True)}
    both = {(plan.constants["SQUARE"], plan.constants["WHOLE"], bool(plan.kinds["dx"])) for plan in plans
            if plan.kernel.fn is margin.MULTI_MARGIN.fn}  # fmt: skip
    assert {(square, False, dx) for square in (False, True) for dx in (False, True)} <= both
    assert {(False, True, False), (False, True, True)} <= both
