"""masked_softmax: the softmax of the kept elements of each row."""

from safeops.core.foreign import refuse
from safeops.ops.classification._softmax import MaskedSoftmax

_masked_softmax = MaskedSoftmax("masked_softmax", log=False)


@_masked_softmax.public()
def masked_softmax(input, mask=None, dim=-1, *extra, **unknown):
    """exp(x) / sum exp(x) over the kept elements of each row along `dim`; 0 at the masked ones.

    It replaces `x.masked_fill(~mask, -inf).softmax(dim)`, which turns a fully masked row into NaN. (A fill with -1e9
    raises in half, and gives the masked elements of such a row a share.)

    Masked-out elements do not exist: their values change no result and no gradient, and their own gradient is 0. A
    fully masked row is 0, with gradient 0. A kept NaN or +inf turns the kept part of its row, and nothing else, into
    NaN. Half is computed in fp32 and rounded once.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([[1.0, torch.nan, 1.0], [2.0, 3.0, 4.0]])
        >>> safeops.masked_softmax(x, torch.tensor([[True, False, True], [False, False, False]]))
        tensor([[0.5000, 0.0000, 0.5000],
                [0.0000, 0.0000, 0.0000]])
    """
    if extra or unknown:
        refuse(masked_softmax, extra, unknown)
    return _masked_softmax.call(input, mask, dim)
