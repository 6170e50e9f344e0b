"""A sum that is finite, since it left out what the mask hid, over gradients that are NaN: worse than a loss of NaN.

`exp` before the mask overflows where nothing is kept; its gradient there is 0 times inf. The nodes before such a sum
are watched in backward, on the CPU alone: elsewhere the look at what was left out would wait for the device.
"""

import functools
import itertools
import warnings

import torch

from safeops.safe import notes
from safeops.safe.readable import is_readable
from safeops.safe.report import line_of

NODES = 8  # this near to the sum
REMARK = "finite, but the gradient behind the mask is NaN: mask first"


def watch(function, product, kept):
    """Call before `function` reduces what is kept of a product."""
    if not torch.is_grad_enabled() or not product.requires_grad or not is_readable(product) or kept.all():
        return
    tell = functools.partial(_tell, function, notes.place(), set(notes.reports()))
    for node in _before(product.grad_fn):
        node.register_hook(tell)


def _before(node):
    """The nearest nodes before this one that compute something, breadth first."""
    nodes = [node]
    for node in nodes:  # which grows
        more = [x for x, _ in node.next_functions if x is not None and x.name() != "torch::autograd::AccumulateGrad"]
        nodes += [x for x in more if x not in nodes]
        if len(nodes) > NODES:
            break
    return itertools.islice(nodes, 1, NODES + 1)


def _tell(function, place, reports, grad_inputs, grad_outputs):
    """A hook of a node: is NaN born here?"""
    if any(x is not None and x.isnan().any() for x in grad_inputs) and all(
        x is None or x.isfinite().all() for x in grad_outputs
    ):
        if notes.remark(function, REMARK, place, reports):
            where = ":".join(map(str, line_of(place)))
            warnings.warn(
                f"safe_mode: the {function} at {where} is {REMARK} (docs/functions.md#mask-first)", stacklevel=2
            )
