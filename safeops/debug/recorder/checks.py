"""The arguments of `recorder`."""

import torch

ACTIONS = ("raise", "warn", "record")


def optimizers(model, given):
    """The optimizers as a list, after a check that they update the model."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"recorder: model must be a torch.nn.Module, got {type(model).__name__}")
    result = [given] if isinstance(given, torch.optim.Optimizer) else given
    try:
        result = list(result)
    except TypeError:
        result = [given]
    if not result:
        raise ValueError("recorder: optimizer: an empty list")
    result = [_inner(x) for x in result]
    own = {id(p) for p in model.parameters()}
    for optimizer in result:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"recorder: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"recorder: optimizer: none of the parameters of {type(optimizer).__name__} is one of the model "
                f"({type(model).__name__})"
            )
    return result


def _inner(optimizer):
    """The optimizer that accelerate's or Lightning's wrapper steps: its hooks are those that run."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def options(scaler, steps, action, last):
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"recorder: scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"recorder: steps must be an int, at least 1, got {steps!r}")
    if action not in ACTIONS:
        raise ValueError(f"recorder: action must be one of {ACTIONS}, got {action!r}")
    if not isinstance(last, int) or last < 0:
        raise ValueError(f"recorder: last must be an int, at least 0, got {last!r}")


def parameters(model, optimizers):
    """The parameters of the model and of its optimizers, each once."""
    updated = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return [*{id(p): p for p in (*model.parameters(), *updated)}.values()]
