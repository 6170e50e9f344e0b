"""Mend the gradient of a quotient that `torch.where` selects from: 0 at elements not selected, in place of 0 / 0.

The quotient and its hooks stay in the graph. A hook on the division's node sets the operands' gradients to 0 where the
quotient's gradient is 0.
"""

import torch

from safeops.core.private_torch import current_node, saved_dividend, saved_divisor


def mend(quotient):
    """If a division or a reciprocal made this tensor, hook its node to keep the gradients finite. True if so."""
    node = quotient.grad_fn
    if node is None:
        return False
    if node.name() == "MulBackward0" and node.next_functions[1][0] is None:  # number / b is number * (1 / b)
        node = node.next_functions[0][0]
    mended = _MENDED.get(node.name()) if node is not None else None
    if mended is not None:
        node.register_hook(mended)
    return mended is not None


# Hooks of a node, called with the gradients of its operands and of its result. They hold no node, for that would make a
# reference cycle.


def _of_division(grad_inputs, grad_outputs):
    (g,), (grad_a, grad_b) = grad_outputs, grad_inputs
    if g is None:
        return None
    silent = g == 0
    if not torch.is_grad_enabled() and all(x is None or x.shape == g.shape for x in grad_inputs):
        return tuple(x if x is None else torch.where(silent, 0, x) for x in grad_inputs)
    # Compute them again: a broadcast operand's gradient is already summed, and a second derivative would meet 0 / 0.
    node = current_node()
    b = torch.where(silent, 1, saved_divisor(node))
    if grad_b is not None:  # d(loss)/db = -g (a / b) / b
        grad_b = (
            (-g * (torch.where(silent, 0, saved_dividend(node)) / b / b)).sum_to_size(grad_b.shape).to(grad_b.dtype)
        )
    if grad_a is not None:  # d(loss)/da = g / b
        grad_a = (g / b).sum_to_size(grad_a.shape).to(grad_a.dtype)
    return grad_a, grad_b


def _of_reciprocal(grad_inputs, grad_outputs):
    (g,), (x,) = grad_outputs, grad_inputs
    return None if g is None or x is None else (torch.where(g == 0, 0, x),)


_MENDED = {"DivBackward0": _of_division, "ReciprocalBackward0": _of_reciprocal}
