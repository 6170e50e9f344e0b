"""masked_logsumexp: the logarithm of the sum of the exponentials of the kept elements."""

import torch

from safeops.core import check, sums
from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import EXP, Statistic, reciprocal


def _define(k, parameter):
    top = k.largest(k.x)
    infinite = (k.x == top) & (top == float("inf"))  # k.x - top is set to 0 there: inf - inf is NaN
    top = torch.where(top == -float("inf"), 0, top)
    total = k.sum(k.weighted(k.select(torch.where(infinite, 0, k.x - top).exp(), 0)))
    total = total * torch.where(total < 0, float("nan"), 1)  # log and gradient: NaN
    nothing = total == 0  # every kept element is -inf
    scale = torch.where(nothing, 1, total.reciprocal())
    # +inf elements got no gradient, by the 0 above. So their weighted mean, which is +inf, replaces top in the value.
    w = torch.where(infinite, 1 if k.weight is None else k.weight.detach(), 0)
    mean = k.sum(torch.where(infinite, k.x, 0) * w) * scale.detach()
    top_or_mean = torch.where(top == float("inf"), mean, top)
    value = torch.where(nothing, float("-inf"), top_or_mean + torch.where(nothing, 1, total).log())
    return value, torch.where(nothing, 0, top), scale


def _part(value, origin, scale, parameter):
    return {"x": torch.where(value == -float("inf"), value, origin), "weight": reciprocal(scale)}


class LogSumExp(Statistic):
    empties = (*check.EMPTY, "-inf")
    arguments = Statistic.arguments.replace('"nan" gives NaN', '"nan" NaN, "-inf" -inf')

    def with_empty_sums(self, input, mask, dim, keepdim, weight, dtype):
        """The result for empty="-inf": -inf, with gradient 0, where nothing is kept."""
        value = self.call(input, mask, dim, keepdim, weight, dtype, "zero")
        exists = sums.count(input, mask, dim, keepdim=keepdim, weight=weight) > 0
        return torch.where(exists, value, float("-inf"))


_masked_logsumexp = LogSumExp("masked_logsumexp", _define, EXP, part=_part)


@_masked_logsumexp.public()
def masked_logsumexp(
    input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown,
):  # fmt: skip
    """log(sum(weight * exp(input))) over the kept elements.

    It replaces `torch.logsumexp(x.masked_fill(~mask, -inf), dim)`, which is -inf, with a NaN gradient, where nothing is
    kept. No exponential overflows: the largest kept element is subtracted first. Where every kept element is -inf the
    result is -inf, with gradient 0.

    Where nothing is kept, `empty` gives the result: by default 0, not -inf, so that a mean over the rows stays finite.
    If the loss has other terms, mask those rows out of it, too; or pass `empty="-inf"`, the logarithm of the true sum
    0, with gradient 0.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([200.0, 200.0, torch.nan])
        >>> safeops.masked_logsumexp(x, x.isfinite())
        tensor(200.6931)
    """
    if extra or unknown:
        refuse(masked_logsumexp, extra, unknown)
    if isinstance(empty, str) and empty == "-inf":
        return _masked_logsumexp.with_empty_sums(input, mask, dim, keepdim, weight, dtype)
    return _masked_logsumexp.call(input, mask, dim, keepdim, weight, dtype, empty)
