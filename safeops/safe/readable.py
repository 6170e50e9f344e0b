"""Values that can be asked for: then torch's own function is called wherever its result is right."""

import torch

from safeops.core.private_torch import dispatch_modes, transforms_active


def is_readable(x):
    """True if a value of x is there at once: a GPU is waited for, and in a trace or a transform there is none."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) is not torch.Tensor:
        return False
    return not (transforms_active() or dispatch_modes())
