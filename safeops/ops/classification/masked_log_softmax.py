"""masked_log_softmax: the logarithm of the softmax of the kept elements of each row."""

from safeops.core.foreign import refuse
from safeops.ops.classification._softmax import MaskedSoftmax

_masked_log_softmax = MaskedSoftmax("masked_log_softmax", log=True)


@_masked_log_softmax.public()
def masked_log_softmax(input, mask=None, dim=-1, *extra, **unknown):
    """x - log sum exp(x) over the kept elements of each row along `dim`; -inf at the masked ones.

    Masked-out elements do not exist: neither their values nor the gradients that arrive there change any result or
    gradient, and their own gradient is 0. A fully masked row is -inf, with gradient 0. A kept NaN or +inf turns the
    kept part of its row, and nothing else, into NaN. Half is computed in fp32 and rounded once.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([[1.0, torch.nan, 1.0], [2.0, 3.0, 4.0]])
        >>> safeops.masked_log_softmax(x, torch.tensor([[True, False, True], [False, False, False]]))
        tensor([[-0.6931,    -inf, -0.6931],
                [   -inf,    -inf,    -inf]])
    """
    if extra or unknown:
        refuse(masked_log_softmax, extra, unknown)
    return _masked_log_softmax.call(input, mask, dim)
