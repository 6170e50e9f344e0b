"""Tensors whose values can be read at once: for them safe mode calls torch's own function if its result is right."""

import torch

from safeops.core.private_torch import dispatch_modes, transforms_active


def is_readable(x):
    """True if x's values can be read at once. A GPU would be waited for; in a trace or a transform there are none."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) is not torch.Tensor:
        return False
    return not (transforms_active() or dispatch_modes())
