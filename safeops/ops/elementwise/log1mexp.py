"""log1mexp: log(1 - e^x) of a negative x."""

import math

import torch

from safeops.core.domain import log_probability
from safeops.core.dtypes import filled
from safeops.ops.elementwise._unary import Unary
from safeops.ops.elementwise.safe_log import log


def definition(x):
    """Mächler's two forms: log(-expm1(x)) near 0, where 1 - e^x loses digits; else log1p(-e^x), where e^x is small."""
    x = -x.abs()  # (`_unary.define` also passes BENIGN, which is positive)
    near = x > -math.log(2)
    # Select before the logarithms: the form that is not used may have an infinite slope, as log1p(-e^x) near 0.
    return torch.where(near, log(-torch.expm1(torch.where(near, x, -1))), torch.log1p(-torch.where(near, -1, x).exp()))


_log1mexp = Unary(
    "log1mexp",
    definition,
    absent=lambda x, eps: x > -eps,
    stand_in=lambda x, eps, fill_value: filled(x, (), eps).log(),
    domain=(log_probability,),
)

# ---- public function


@_log1mexp.public("(Tensor input) -> Tensor")
def log1mexp(input):
    """`log(1 - exp(input))` of a negative `input`: the logarithm of 1 - p, from the logarithm of p.

    Exact on both sides: where p is nearly 1 (`log(-expm1(x))`), and where it is nearly 0 (`log1p(-exp(x))`). A NaN
    shows in the result.

    Above -1.2e-38 (minus the smallest normal number of fp32, in which half is computed; for fp64 -2.2e-308), and so at
    0 and for positive numbers, the result is the logarithm of that number (-87.3 in fp32), with gradient 0.

    Args:
        input: floating (or integer) tensor, at most 0: a logarithm of probabilities.

    Returns:
        A tensor of `input`'s shape and dtype (of integers: the default dtype), at least fp32 under autocast.

    Raises:
        TypeError: `input` is not a real tensor.

    The formulas are those of M. Mächler, "Accurately Computing log(1 - exp(-|a|))" (2012).

    Example:
        >>> safeops.log1mexp(torch.tensor([-1e-10, -1.0, -40.0]))
        tensor([-2.3026e+01, -4.5868e-01, -4.2484e-18])
    """
    return _log1mexp.call(input)
