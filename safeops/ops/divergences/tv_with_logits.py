"""tv_with_logits: the total variation distance of two rows of logits."""

from safeops.core.foreign import refuse
from safeops.ops.divergences._divergence import ARGUMENTS, Divergence, divergence, tv

_tv_with_logits = Divergence("tv_with_logits", "TVWithLogitsLoss", tv)


@_tv_with_logits.public(
    '(Tensor input, Tensor? target=None, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero", float temperature=1.0, Tensor? target_values=None, '
    'Tensor? target_indices=None, str tail="bucket", Tensor[]? support=None, '
    "Tensor? support_threshold=None) -> Tensor",
    arguments=ARGUMENTS,
)
def tv_with_logits(
    input, target=None, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    temperature=1.0, target_values=None, target_indices=None, tail="bucket", support=None,
    support_threshold=None, **unknown,
):  # fmt: skip
    """sum_c |p_c - q_c| / 2 with p = softmax(target / T), q = softmax(input / T); the mean over the kept rows.

    The total variation distance, from 0 to 1. Where p_c = q_c, the slope is 0.

    Args:
        input: (..., C) floating tensor, the logits of q.
        target: (..., C) floating tensor of `input`'s shape, the logits of p. Differentiable.
        {arguments}

    Example:
        >>> input, target = torch.zeros(2, 3), torch.tensor([[1.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]])
        >>> safeops.tv_with_logits(input, target, mask=torch.tensor([True, False]))
        tensor(0.3977)
    """
    if extra or unknown:
        refuse(tv_with_logits, extra, unknown)
    best, restriction = (target_values, target_indices, tail), (support, support_threshold)
    options = mask, weight, reduction, denominator, empty, temperature, best, restriction
    return divergence(_tv_with_logits.name, _tv_with_logits, input, target, *options)
