"""js_div_with_logits: the Jensen-Shannon divergence of two rows of logits."""

from safeops.core.foreign import refuse
from safeops.ops.divergences._divergence import ARGUMENTS, Divergence, divergence, js

_js_div_with_logits = Divergence("js_div_with_logits", "JSDivWithLogitsLoss", js)


@_js_div_with_logits.public(
    '(Tensor input, Tensor? target=None, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero", float temperature=1.0, float beta=0.5, Tensor? target_values=None, '
    'Tensor? target_indices=None, str tail="bucket", Tensor[]? support=None, '
    "Tensor? support_threshold=None) -> Tensor",
    arguments=ARGUMENTS,
)
def js_div_with_logits(
    input, target=None, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    temperature=1.0, beta=0.5, target_values=None, target_indices=None, tail="bucket", support=None,
    support_threshold=None, **unknown,
):  # fmt: skip
    """beta KL(p | m) + (1 - beta) KL(q | m) with the mixture m = beta p + (1 - beta) q; the mean over the kept rows.

    p = softmax(target / T), q = softmax(input / T). Lin, "Divergence Measures Based on the Shannon Entropy", 1991; with
    beta, the weight of the teacher, Agarwal et al., "On-Policy Distillation of Language Models", 2024.

    It is at most log 2, and exactly 0 for equal logits. Where either operand is -inf, or both, it has its limit.

    Args:
        input: (..., C) floating tensor, the logits of q.
        target: (..., C) floating tensor of `input`'s shape, the logits of p. Differentiable.
        beta: the target's share of the mixture, from 0.001 to 0.999. (Closer to 0 the divergence is beta KL(p | q),
            closer to 1 it is (1 - beta) KL(q | p).)
        {arguments}

    Example:
        >>> input, target = torch.zeros(2, 3), torch.tensor([[1.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]])
        >>> safeops.js_div_with_logits(input, target, mask=torch.tensor([True, False]))
        tensor(0.1553)
    """
    if extra or unknown:
        refuse(js_div_with_logits, extra, unknown)
    best, restriction = (target_values, target_indices, tail), (support, support_threshold)
    options = mask, weight, reduction, denominator, empty, temperature, best, restriction
    return divergence(_js_div_with_logits.name, _js_div_with_logits, input, target, *options, beta)
