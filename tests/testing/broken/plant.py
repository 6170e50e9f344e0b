"""The decorator that plants a defect, and ops with a given backward."""

import dataclasses

import torch

from tests.testing import toy
from tests.testing.toy import definition, subject

DEFECTS: dict[str, list] = {}
WEIGHTED = (toy.SAMPLES[1],)
ROUGH = (dataclasses.replace(toy.SAMPLES[0], smooth=False),)
in_transform = torch._C._are_functorch_transforms_active


def plant(check, *words, **changes):
    """Registers the decorated op as a defect that `check` must find, with these words in its failure."""

    def register(op):
        DEFECTS.setdefault(check, []).append((op.__name__, subject(op, **changes), words))
        return op

    return register


def function(backward, forward=None, **statics):
    """Returns an op with this backward: (ctx, grad) -> dx, where ctx.saved_tensors is (x, mask)."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask, reduction):
            ctx.save_for_backward(x, mask)
            return (forward or definition)(x.detach(), mask, reduction=reduction)

        @staticmethod
        def backward(ctx, grad):
            return backward(ctx, grad).to(ctx.saved_tensors[0].dtype), None, None

    for name, value in statics.items():
        setattr(Broken, name, staticmethod(value))
    return lambda x, mask, weight=None, reduction="sum", empty="zero": Broken.apply(x, mask, reduction)
