"""Divergences over the classes of a support: both distributions are restricted to them, and renormalised."""

import torch

from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.core.symbolic import as_operand
from safeops.ops.classification import _support
from safeops.ops.classification._entries import Entries


def validate(name, restriction, shape, **of):
    """`_support.validate` of ops/classification. restriction: (support, support_threshold)."""
    if restriction[0] is not None and of["target"] is None:
        raise TypeError(f"{name}: support does not go with target_values and target_indices")
    return _support.validate(name, *restriction, shape, **of)


def entries_of(name, support, keep, rows, size):
    """The entries of a support in CSR form. rows: the rows' shape; keep: bool, it broadcasts to them, or None: all."""
    keep = torch.ones(rows, dtype=torch.bool, device=support[0].device) if keep is None else keep.expand(rows)
    return Entries(name, support, keep, size)


def of_entries(terms, entries, input, target, temperature, beta):
    """The divergence of each row, (count,). input, target: the logits of the entries, 0 where one does not exist.
    terms: a class's term, a function of _divergence.py."""
    compute = compute_dtype(input.dtype, target.dtype)
    temperature = as_operand(temperature, input)
    v, u = (entries.log_softmax(wide_on_cpu(x.to(compute)) / temperature)[0] for x in (input, target))
    loss = entries.total(terms(u, v, u.exp(), v.exp(), beta))
    return torch.where(entries.keep, loss, 0).to(compute)


def with_classes(name, support, keep, rows):
    """`keep` without the rows whose bool support (*rows, C) has no class."""
    keep = torch.ones(rows, dtype=torch.bool, device=support.device) if keep is None else keep.expand(rows)
    return _support.with_classes(name, support, keep)
