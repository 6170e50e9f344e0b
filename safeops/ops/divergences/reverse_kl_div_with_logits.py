"""reverse_kl_div_with_logits: the Kullback-Leibler divergence with input and target exchanged."""

from safeops.core import sums
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.divergences._divergence import ARGUMENTS, EXAMPLE, divergence, validate_module
from safeops.ops.divergences.kl_div_with_logits import _kl_div_with_logits

_reverse_kl_div_with_logits = Composed(
    "reverse_kl_div_with_logits",
    _kl_div_with_logits,
    *sums.ALL,
    module="ReverseKLDivWithLogitsLoss",
    example=EXAMPLE,
    validate_options=validate_module,
)


@_reverse_kl_div_with_logits.public(
    '(Tensor input, Tensor? target=None, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero", float temperature=1.0, Tensor? target_values=None, '
    'Tensor? target_indices=None, str tail="bucket", Tensor[]? support=None, '
    "Tensor? support_threshold=None) -> Tensor",
    arguments=ARGUMENTS,
)
def reverse_kl_div_with_logits(
    input, target=None, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    temperature=1.0, target_values=None, target_indices=None, tail="bucket", support=None,
    support_threshold=None, **unknown,
):  # fmt: skip
    """sum_c q_c log(q_c / p_c) with q = softmax(input / T), p = softmax(target / T); the mean over the kept rows.

    `kl_div_with_logits` with its operands exchanged. This one seeks a mode of the target; `kl_div_with_logits` covers
    all of it (Gu et al., "MiniLLM: Knowledge Distillation of Large Language Models", 2024). A class that is -inf in the
    target alone makes it inf.

    Args:
        input: (..., C) floating tensor, the logits of q.
        target: (..., C) floating tensor of `input`'s shape, the logits of p. Differentiable.
        {arguments}

    Example:
        >>> input, target = torch.zeros(2, 3), torch.tensor([[1.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]])
        >>> safeops.reverse_kl_div_with_logits(input, target, mask=torch.tensor([True, False]))
        tensor(inf)
    """
    if extra or unknown:
        refuse(reverse_kl_div_with_logits, extra, unknown)
    best, restriction = (target_values, target_indices, tail), (support, support_threshold)
    options = mask, weight, reduction, denominator, empty, temperature, best, restriction
    return divergence(_reverse_kl_div_with_logits.name, _kl_div_with_logits, input, target, *options, swap=True)
