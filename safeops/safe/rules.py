"""The table: which torch function calls which twin in safe mode. Every other function is torch's own."""

import torch
import torch.nn.functional as F

from safeops.core.private_torch import is_tracing
from safeops.safe import notes, origins, values
from safeops.safe.losses import NAMES, loss, with_weight

Tensor = torch.Tensor

# (torch's functions, the twin, its handler)
REPLACED = (
    *(((getattr(F, name),), name, loss(name)) for name in NAMES),
    ((torch.softmax, torch.special.softmax, F.softmax, Tensor.softmax), "masked_softmax", values.softmax),
    (
        (torch.log_softmax, torch.special.log_softmax, F.log_softmax, Tensor.log_softmax),
        "masked_log_softmax",
        values.log_softmax,
    ),
    ((F.normalize,), "normalize", values.unit_rows),
    ((torch.cosine_similarity,), "cosine_similarity", values.cosine),
    ((torch.masked_fill, Tensor.masked_fill), "masked_fill", values.fill),
    ((Tensor.masked_fill_,), "masked_fill", values.fill_),
    ((torch.where,), "apply_where", values.where),
    ((Tensor.where,), "apply_where", values.method_where),
    ((torch.sum, Tensor.sum), "masked_sum", values.sum),
    ((torch.mean, Tensor.mean), "masked_mean", values.mean),
    ((torch.norm, Tensor.norm), "safe_norm", values.norm),
    ((torch.linalg.norm,), "safe_norm", values.linalg_norm),
    ((torch.linalg.vector_norm,), "safe_norm", values.vector_norm),
)
# (torch's functions, the rule that remembers their results for `sum` and `mean`)
REMEMBERED = (
    ((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply), origins.product),
    ((Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double), origins.cast),
    ((torch.unsqueeze, Tensor.unsqueeze, Tensor.expand, Tensor.expand_as), origins.view),
    ((Tensor.__getitem__,), origins.read),
)
REFUSALS = TypeError, ValueError, IndexError, NotImplementedError


def _replaced(name, twin, handler):
    """A rule that calls the twin if it takes the arguments, else torch's function, which raises its own errors."""

    def rule(func, args, kwargs):
        if notes.called_by_safeops():
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and is_tracing():  # torch.jit checks for torch's own nodes
            notes.remark(name, "torch's own: torch.jit traces", notes.place(), notes.reports())
            return func(*args, **kwargs)
        try:
            result = handler(*args, **kwargs)
        except REFUSALS:
            result = None
        if result is None:
            return func(*args, **kwargs)
        notes.note(name, twin)
        return result

    return rule


RULES = {f: _replaced(f.__name__, twin, handler) for functions, twin, handler in REPLACED for f in functions}
RULES |= {f: rule for functions, rule in REMEMBERED for f in functions}
RULES[F.l1_loss] = with_weight(RULES[F.l1_loss])
