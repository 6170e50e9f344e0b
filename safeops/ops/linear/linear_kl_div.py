"""linear_kl_div: the Kullback-Leibler divergence of a linear layer's logits, computed in chunks."""

from safeops.core.foreign import refuse
from safeops.ops.divergences.kl_div_with_logits import _kl_div_with_logits
from safeops.ops.linear._divergence import ARGUMENTS, LinearDivergence, linear_divergence

_linear_kl_div = LinearDivergence("linear_kl_div", "LinearKLDivLoss", _kl_div_with_logits)


@_linear_kl_div.public(
    "(Tensor input, Tensor linear_weight, Tensor? target=None, Tensor? target_weight=None, *, "
    'Tensor? linear_bias=None, Tensor? target_bias=None, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero", float temperature=1.0, '
    "ScalarType? logits_dtype=None, Tensor? target_values=None, Tensor? target_indices=None, "
    'str tail="bucket", Tensor[]? support=None, Tensor? support_threshold=None) -> Tensor',
    arguments=ARGUMENTS,
)
def linear_kl_div(
    input, linear_weight, target=None, target_weight=None, *extra, linear_bias=None, target_bias=None, mask=None,
    weight=None, reduction="mean", denominator=None, empty="zero", temperature=1.0, logits_dtype=None,
    target_values=None, target_indices=None, tail="bucket", support=None, support_threshold=None, **unknown,
):  # fmt: skip
    """`kl_div_with_logits` of the logits input @ linear_weight.T + linear_bias, computed in chunks.

    The teacher's logits are target @ target_weight.T + target_bias, or `target` if target_weight is None; or it is
    given by its best classes, `target_values` and `target_indices`.

    Eight million logits of each exist at a time, or an eighth of all, and half as many with
    logits_dtype=torch.float32. The backward computes the logits again. A gradient of the teacher's operands, second
    derivatives, functorch transforms and `torch.export` compute all logits at once, in fp32.

    Products are in the operands' dtype. Their sums, the softmax and the divergence are in fp32. Each gradient is
    rounded once, at the end.

    Args:
        {arguments}

    Example:
        >>> input, linear_weight = torch.eye(2), torch.zeros(3, 2)
        >>> target = torch.tensor([[1.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]])
        >>> safeops.linear_kl_div(input, linear_weight, target, None, mask=torch.tensor([True, False]))
        tensor(0.5164)
    """
    if extra or unknown:
        refuse(linear_kl_div, extra, unknown)
    best, restriction = (target_values, target_indices, tail), (support, support_threshold)
    options = mask, weight, reduction, denominator, empty, temperature, logits_dtype, best, restriction
    return linear_divergence(
        _linear_kl_div, input, linear_weight, target, target_weight, linear_bias, target_bias, *options
    )
