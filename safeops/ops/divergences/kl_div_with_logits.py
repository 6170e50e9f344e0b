"""kl_div_with_logits: the Kullback-Leibler divergence of two rows of logits."""

from safeops.core.foreign import refuse
from safeops.ops.divergences._divergence import ARGUMENTS, Divergence, divergence, kl

_kl_div_with_logits = Divergence("kl_div_with_logits", "KLDivWithLogitsLoss", kl)


@_kl_div_with_logits.public(
    '(Tensor input, Tensor? target=None, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero", float temperature=1.0, Tensor? target_values=None, '
    'Tensor? target_indices=None, str tail="bucket", Tensor[]? support=None, '
    "Tensor? support_threshold=None) -> Tensor",
    arguments=ARGUMENTS,
)
def kl_div_with_logits(
    input, target=None, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    temperature=1.0, target_values=None, target_indices=None, tail="bucket", support=None,
    support_threshold=None, **unknown,
):  # fmt: skip
    """sum_c p_c log(p_c / q_c) with p = softmax(target / T), q = softmax(input / T); the mean over the kept rows.

    Kullback and Leibler, "On Information and Sufficiency", 1951; the loss of distillation (Hinton, Vinyals and Dean,
    "Distilling the Knowledge in a Neural Network", 2015).

    As `F.kl_div` of the two log-softmaxes, but these are not stored: both operands are read once, in any layout and
    dtype, and it is computed in fp32.

    A class of -inf has the probability 0, and 0 log 0 is 0. So classes that pad a vocabulary may be -inf in both
    operands, or in the target. A class that is -inf in the input alone makes the divergence inf. +inf, NaN and a row of
    nothing but -inf give NaN.

    Args:
        input: (..., C) floating tensor, the logits of q.
        target: (..., C) floating tensor of `input`'s shape, the logits of p. Differentiable.
        {arguments}

    Example:
        >>> input, target = torch.zeros(2, 3), torch.tensor([[1.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]])
        >>> safeops.kl_div_with_logits(input, target, mask=torch.tensor([True, False]))
        tensor(0.5164)
    """
    if extra or unknown:
        refuse(kl_div_with_logits, extra, unknown)
    best, restriction = (target_values, target_indices, tail), (support, support_threshold)
    options = mask, weight, reduction, denominator, empty, temperature, best, restriction
    return divergence(_kl_div_with_logits.name, _kl_div_with_logits, input, target, *options)
