"""Have compiled functions compiled once more, so that modules' hooks are in their graphs, and have the old code back.

Dynamo reads hooks when it compiles, and no guard looks at them later. So something that guards do look at is changed
meanwhile, which changes nothing else: `warn_only`, as long as deterministic algorithms are off. Each block of a model
that is compiled block by block has probes of its own, and needs code of its own.
"""

import warnings

import torch

from safeops.core.private_torch import compile_with_hooks as configure  # noqa: F401
from safeops.core.private_torch import forget_compiled_code

_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


def enter(stack):
    """Have code compiled anew until `stack`, an ExitStack, is closed."""
    if torch.are_deterministic_algorithms_enabled():
        forget_compiled_code()
        stack.callback(forget_compiled_code)
    else:
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False, warn_only=not warn_only)
        stack.callback(torch.use_deterministic_algorithms, False, warn_only=warn_only)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", _GLOBAL_HOOKS)
