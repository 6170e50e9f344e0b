"""Warn of a masked sum that is finite while its gradients are NaN: worse than a NaN loss, because nothing shows it.

An `exp` before the mask overflows at hidden elements; its gradient there is 0 * inf. Hooks on the nodes before such a
sum look for NaN in backward. Only on the CPU: on another device, the look at the hidden values would wait for it.
"""

import functools
import itertools
import warnings

import torch

from safeops.safe import notes
from safeops.safe.readable import is_readable
from safeops.safe.report import line_of

NODES = 8  # how many nodes before the sum are watched
REMARK = "finite, but the gradient behind the mask is NaN: mask first"


def watch(function, product, kept):
    """Watch the nodes before `product`. Call this before `function` reduces the product's kept elements."""
    if not torch.is_grad_enabled() or not product.requires_grad or not is_readable(product) or kept.all():
        return
    tell = functools.partial(_tell, function, notes.place(), set(notes.reports()))
    for node in _before(product.grad_fn):
        node.register_hook(tell)


def _before(node):
    """The nearest nodes before this one that compute something, breadth first."""
    nodes = [node]
    for node in nodes:  # nodes grows in the loop
        more = [x for x, _ in node.next_functions if x is not None and x.name() != "torch::autograd::AccumulateGrad"]
        nodes += [x for x in more if x not in nodes]
        if len(nodes) > NODES:
            break
    return itertools.islice(nodes, 1, NODES + 1)


def _tell(function, place, reports, grad_inputs, grad_outputs):
    """Hook of a node: warn, once for a line, if the node makes NaN from finite gradients."""
    if any(x is not None and x.isnan().any() for x in grad_inputs) and all(
        x is None or x.isfinite().all() for x in grad_outputs
    ):
        if notes.remark(function, REMARK, place, reports):
            where = ":".join(map(str, line_of(place)))
            warnings.warn(
                f"safe_mode: the {function} at {where} is {REMARK} (docs/functions.md#mask-first)", stacklevel=2
            )
