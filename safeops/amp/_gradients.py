"""The gradients that grad_norm and clip_grad_norm_ are about, and their norm."""

import torch

from safeops import _check, _multi_tensor
from safeops._dtypes import FLOATING, compute_dtype


def gradients(function, parameters):
    """{name: gradient} of what has one, each gradient once: an index in the iterable, or the name in a module."""
    if isinstance(parameters, torch.nn.Module):
        named = parameters.named_parameters()
    elif isinstance(parameters, torch.Tensor):
        named = [("parameters", parameters)]
    else:
        try:
            named = ((f"parameters[{i}]", p) for i, p in enumerate(parameters))
        except TypeError:
            raise TypeError(
                f"{function}: parameters must be a module, a tensor or an iterable of tensors, got "
                f"{type(parameters).__name__}"
            ) from None
    found, seen = {}, set()
    for name, p in named:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{function}: {name} must be a tensor, got {type(p).__name__}")
        grad = p.grad
        if grad is None:
            if not (p.requires_grad or isinstance(p, torch.nn.Parameter)):
                raise TypeError(
                    f"{function}: {name} has no gradient and requires none: pass the parameters, not their gradients"
                )
        elif id(grad) not in seen:
            _usable(function, name, grad)
            seen.add(id(grad))
            found[name] = grad
    return found


def _usable(function, name, grad):
    kind = f"of type {type(grad).__name__}" if type(grad) is not torch.Tensor else f"{grad.layout}"
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        # DTensor's shards are not the whole gradient, and a sparse tensor may have an element in several parts
        raise TypeError(f"{function}: the gradient of {name} must be a plain dense tensor, got one {kind}")
    if grad.dtype not in FLOATING:
        raise TypeError(f"{function}: the gradient of {name} must be floating point, got {grad.dtype}")


def order(function, norm_type):
    if norm_type == "inf":
        norm_type = float("inf")
    _check.number(function, "norm_type", norm_type, above=0)
    return float(norm_type)


def total_norm(found, ord):
    """The norm of all gradients in fp64, on the device of the first; and those of each device."""
    groups = {}
    for grad in found.values():
        groups.setdefault(grad.device, []).append(grad)
    norms = [_multi_tensor.norm(group, ord) for group in groups.values()]
    first = norms[0]
    if len(norms) > 1:
        first = _multi_tensor.norm_definition([n.to(first.device) for n in norms], ord)
    return first, groups


def narrowed(norm, found):
    """As it is returned: fp32, or fp64 if a gradient is."""
    return norm.to(compute_dtype(*(grad.dtype for grad in found.values())))
