"""Ops that sketch a tensor inside a compiled graph. To the compiler they are copies whose insides it cannot see, so the
graph stays whole and no sketch is optimized away. They look for the capture that is at work when they run: compiled
code outlives the capture for which it was made."""

import torch

capture = None  # the Capture at work, or None


@torch.library.custom_op("safeops_debug::probe", mutates_args=())
def probe(x: torch.Tensor, key: str, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sketch a module's output. Returns a copy, and the number of the call, by which backward finds its entry."""
    call = -1
    if capture is not None:
        capture.compiled, call = True, capture.output(key, path, x)
    return x.clone(), torch.tensor(call, dtype=torch.int64, device="cpu")


@torch.library.custom_op("safeops_debug::probe_gradient", mutates_args=())
def probe_gradient(gradient: torch.Tensor, call: torch.Tensor, key: str, path: str) -> torch.Tensor:
    if capture is not None:
        capture.gradient(key, path, int(call), gradient)
    return gradient.clone()


@probe.register_fake
def _(x, key, path):
    return x.clone(), torch.empty((), dtype=torch.int64, device="cpu")


@probe_gradient.register_fake
def _(gradient, call, key, path):
    return gradient.clone()


def _setup_context(ctx, inputs, output):
    ctx.key, ctx.path = inputs[1:]
    ctx.save_for_backward(output[1])


def _backward(ctx, gradient, _):
    if gradient is None:
        return None, None, None
    return probe_gradient(gradient, *ctx.saved_tensors, ctx.key, ctx.path), None, None


probe.register_autograd(_backward, setup_context=_setup_context)


def probed(value, key, path=""):
    """A module's output with probes: tensors, and tuples, lists and dicts of them; other objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return torch.ops.safeops_debug.probe(value, key, path)[0] if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*[probed(x, key, f"{path}.{name}") for name, x in zip(value._fields, value)])
    if type(value) in (tuple, list):
        return type(value)([probed(x, key, f"{path}[{i}]") for i, x in enumerate(value)])
    if type(value) is dict:
        return {name: probed(x, key, f"{path}[{name!r}]") for name, x in value.items()}
    return value
