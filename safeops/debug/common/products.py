"""Which operands an op multiplies, and the value that multiplies each element: a 0 there does not mask a NaN."""

import torch

# op: index of its first factor among the arguments; the second factor follows it
_BY_ELEMENT = {"mul": 0, "addcmul": 1}
_MATRICES = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1, "addbmm": 1}  # also einsum's
_WEIGHTED = frozenset(["binary_cross_entropy", "binary_cross_entropy_with_logits"])  # (input, target, weight)
PRODUCTS = frozenset([*_BY_ELEMENT, *_MATRICES, *_WEIGHTED])


def factors(name, arguments):
    """Returns [(x, x as the op reads it, the values that multiply its elements, broadcastable to it)] for both factors.

    In a matrix product a[i, j] meets the row b[j, :]: b[j, 0] stands for it, which contributes to the first column of
    the result. Likewise a[0, j] stands for the column a[:, j] that b[j, k] meets."""
    name = name.rstrip("_")
    if name in _WEIGHTED:
        weight = arguments[2] if len(arguments) > 2 else None
        pairs = [(x, x, weight) for x in arguments[:2]]
    else:
        first = _BY_ELEMENT.get(name, _MATRICES.get(name))
        a, b = arguments[first : first + 2]
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return []
        if name in _BY_ELEMENT:
            shape = torch.broadcast_shapes(a.shape, b.shape)
            pairs = [(a, a.expand(shape), b), (b, b.expand(shape), a)]
        else:
            row = a.select(-2, 0) if a.dim() > 1 else a
            pairs = [
                (a, a, b.select(-1, 0).unsqueeze(-2) if b.dim() > 1 else b),
                (b, b, row.unsqueeze(-1) if b.dim() > 1 else row),
            ]
    return [pair for pair in pairs if isinstance(pair[2], torch.Tensor)]
