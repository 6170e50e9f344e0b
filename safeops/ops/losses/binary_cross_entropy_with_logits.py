"""binary_cross_entropy_with_logits: y log(1 + e^-x) + (1 - y) log(1 + e^x) of logits x."""

from safeops.core.definitions import product, softplus
from safeops.core.domain import any_number, factor, probability
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import TernaryLoss


def value(x, y, pos_weight):
    hit = y if pos_weight is None else y * pos_weight
    return product(1 - y, softplus(x)) + product(hit, softplus(-x))


_binary_cross_entropy_with_logits = TernaryLoss(
    "binary_cross_entropy_with_logits",
    "BCEWithLogitsLoss",
    value,
    names=("input", "target", "pos_weight"),
    domain=(any_number, probability, factor),
    optional=True,
    by_count=True,
    buffers=("pos_weight",),
)


@_binary_cross_entropy_with_logits.public(operands="")
def binary_cross_entropy_with_logits(
    input, target, weight=None, *extra, mask=None, reduction="mean", denominator=None, empty="zero", pos_weight=None,
    **unknown,
):  # fmt: skip
    """Binary cross entropy of logits: w y log(1 + e^-x) + (1 - y) log(1 + e^x), w = pos_weight; the mean over the kept.

    An infinite logit whose target matches has loss 0 and gradient 0.

    Args:
        input: floating tensor of logits x.
        target: floating tensor of `input`'s shape, from 0 to 1; broadcast with a warning. Differentiable.
        pos_weight: floating tensor w, broadcastable with `input`: the weight of positive targets. Differentiable.
        {arguments}

    Example:
        >>> x = torch.tensor([0.0, torch.inf])
        >>> safeops.binary_cross_entropy_with_logits(x, torch.ones(2), pos_weight=torch.tensor(2.0), reduction="none")
        tensor([1.3863, 0.0000])
    """
    if extra or unknown:
        refuse(binary_cross_entropy_with_logits, extra, unknown)
    return _binary_cross_entropy_with_logits.call(
        input, target, pos_weight, mask, weight, reduction, denominator, empty
    )
