"""The names of a model's modules, the same with and without DDP, FSDP, checkpointing and torch.compile around them."""

import torch

# Class of a wrapper -> the attribute with the module inside. They are known by name: importing them is slow.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def unwrapped(module):
    """The module inside all wrappers."""
    while (inner := inside(module)) is not None:
        module = inner
    return module


def inside(module):
    """The module inside a wrapper, or None if this is no wrapper."""
    attribute = _WRAPPERS.get(type(module).__name__)
    return attribute and module._modules.get(attribute)


def is_compiled(module):
    return type(module).__name__ == "OptimizedModule"


def named_modules(model, prefix=""):
    """Yields (name, module, is_wrapper), parents first. A wrapper has the name of what it wraps. A shared module comes
    once, under its first name, as in torch's named_modules."""
    seen = set()

    def walk(module, name):
        if id(module) in seen:
            return
        seen.add(id(module))
        inner = inside(module)
        yield name, module, inner is not None
        if inner is not None:
            yield from walk(inner, name)
            return
        for child_name, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{name}.{child_name}" if name else child_name)

    yield from walk(model, prefix)


def model_of(function):
    """The module that a callable is, or is a method of; None if it is another function."""
    if isinstance(function, torch.nn.Module):
        return function
    function = getattr(function, "_torchdynamo_orig_callable", function)  # a compiled function's
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None
