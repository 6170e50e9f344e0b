"""The gradients that grad_norm and clip_grad_norm_ are about, and their norm."""

import torch

from safeops import _check
from safeops._dtypes import FLOATING, compute_dtype
from safeops.ops.lists.grad_norm import norm, norm_definition


def gradients(function, parameters):
    """(keys, gradients) of what has one, each gradient once. A key is an index in the iterable, or a module's name."""
    if isinstance(parameters, torch.nn.Module):
        items = parameters.named_parameters()
    elif isinstance(parameters, torch.Tensor):
        items = ((0, parameters),)
    else:
        try:
            items = enumerate(parameters)
        except TypeError:
            raise TypeError(
                f"{function}: parameters must be a module, a tensor or an iterable of tensors, got "
                f"{type(parameters).__name__}"
            ) from None
    keys, found, seen = [], [], set()
    for key, p in items:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{function}: {named(key)} must be a tensor, got {type(p).__name__}")
        grad = p.grad
        if grad is None:
            if not (p.requires_grad or isinstance(p, torch.nn.Parameter)):
                raise TypeError(
                    f"{function}: {named(key)} has no gradient and requires none: pass the parameters, not their "
                    "gradients"
                )
        elif id(grad) not in seen:
            # DTensor's shards are not the whole gradient, and a sparse tensor may have an element in several parts
            if type(grad) is not torch.Tensor or grad.layout != torch.strided:
                kind = grad.layout if type(grad) is torch.Tensor else f"of type {type(grad).__name__}"
                raise TypeError(
                    f"{function}: the gradient of {named(key)} must be a plain dense tensor, got one {kind}"
                )
            seen.add(id(grad))
            keys.append(key)
            found.append(grad)
    if other := {grad.dtype for grad in found}.difference(FLOATING):
        key, dtype = next((key, grad.dtype) for key, grad in zip(keys, found) if grad.dtype in other)
        raise TypeError(f"{function}: the gradient of {named(key)} must be floating point, got {dtype}")
    return keys, found


def named(key):
    return f"parameters[{key}]" if isinstance(key, int) else key


def order(function, norm_type):
    if norm_type == "inf":
        norm_type = float("inf")
    _check.number(function, "norm_type", norm_type, above=0)
    return float(norm_type)


def total_norm(found, ord):
    """The norm of all gradients in fp64, on the device of the first; and the gradients of each device."""
    groups = {}
    for grad in found:
        groups.setdefault(grad.device, []).append(grad)
    norms = [norm(group, ord) for group in groups.values()]
    first = norms[0]
    if len(norms) > 1:
        first = norm_definition([n.to(first.device) for n in norms], ord)
    return first, groups


def narrowed(norm, found):
    """As it is returned: fp32, or fp64 if a gradient is."""
    return norm.to(compute_dtype(*{grad.dtype for grad in found}))
