"""Defects of masks and layouts."""

import torch
from torch.autograd import forward_ad

from safeops.testing import Sample
from tests.testing.broken.plant import WEIGHTED, function, in_transform, plant
from tests.testing.toy import KEEP, X, definition, wide


# Masks ---------------------------------------------------------------------------------------------------------------
@plant("masked_garbage", "changed by nan under the mask")
def multiplies_by_the_mask(x, mask, **_):
    return (x.to(wide(x)) * mask).square().sum() / 2


@plant("masked_garbage", "gradient of")
def selects_after_the_arithmetic(x, mask, **_):  # the value is right, the gradient is 0 * inf
    return torch.where(mask, x.to(wide(x)).square() / 2, 0).sum()


@plant("masked_upstream", "upstream nan", samples=[Sample((X, KEEP), {"reduction": "none"}, mask=1)])
def backward_multiplies_by_the_mask(x, mask, **options):
    return function(lambda ctx, g: g * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0], 0))(x, mask, **options)


@plant("masked_garbage_transforms", "vmap", "under the mask")
def multiplies_by_the_mask_under_vmap(x, mask, **options):
    mapped = (
        torch._C._functorch.is_batchedtensor(mask) or torch._C._functorch.is_gradtrackingtensor(x) and in_transform()
    )
    return (
        multiplies_by_the_mask(x, mask) if mapped and forward_ad._current_level < 0 else definition(x, mask, **options)
    )


@plant("weight_zero", "where weight is 0", samples=WEIGHTED)
def multiplies_by_the_weight(x, mask, weight=None, **_):
    return torch.where(mask, x.to(wide(x)), 0).square() / 2 * weight.to(wide(x))


@plant("kept_nonfinite", "NaN in the wrong places")
def swallows_nan(x, mask, **options):
    return definition(torch.fmax(x, torch.full_like(x, -torch.finfo(x.dtype).max)), mask, **options)


@plant("kept_upstream", "nan for the first upstream gradient", "want nan")
def swallows_a_nan_gradient(x, mask, **options):
    return function(lambda ctx, g: g.nan_to_num(0) * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0], 0))(
        x, mask, **options
    )


@plant("nothing_kept", "detached")
def fresh_zero_when_nothing_is_kept(x, mask, **options):
    return definition(x, mask, **options) if mask.any() else torch.zeros((), dtype=wide(x))


@plant("nothing_kept", "empty='nan'")
def ignores_empty(x, mask, empty="zero", **options):
    return definition(x, mask, **options)


# Layouts -------------------------------------------------------------------------------------------------------------
@plant("layouts", "transposed operands")
def reads_as_if_contiguous(x, mask, **options):
    return definition(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()), mask, **options)


@plant("upstream_layouts", "upstream gradient", samples=WEIGHTED)
def reads_the_upstream_gradient_as_if_contiguous(x, mask, weight=None, **options):
    def backward(ctx, grad):
        flat = torch.as_strided(grad, grad.shape, torch.empty(grad.shape).stride())
        return flat * ctx.saved_tensors[0] * torch.where(ctx.saved_tensors[1], weight, 0)

    return function(backward, lambda *a, **k: definition(*a, **k, weight=weight))(x, mask, **options)


@plant("sizes", "empty")
def mean_times_count(x, mask, **_):
    terms = definition(x, mask, reduction="none")
    return terms.mean() * terms.numel()
