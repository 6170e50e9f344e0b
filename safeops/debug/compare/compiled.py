"""Have compiled functions compiled once more, so that modules' hooks are in their graphs, and have the old code back.

Dynamo reads hooks when it compiles, and no guard looks at them later. So something that guards do look at is changed
meanwhile, which changes nothing else: `warn_only`, as long as deterministic algorithms are off.
"""

import sys
import warnings

import torch

# Each block of a model that is compiled block by block has probes of its own, and needs code of its own.
_LIMIT = 4096
_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


def enter(stack):
    """Have code compiled anew until `stack`, an ExitStack, is closed."""
    if torch.are_deterministic_algorithms_enabled():
        _reset()
        stack.callback(_reset)
    else:
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False, warn_only=not warn_only)
        stack.callback(torch.use_deterministic_algorithms, False, warn_only=warn_only)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", _GLOBAL_HOOKS)


def configure(stack):
    """The settings with which code is compiled meanwhile. Returns False if nothing can be compiled so far: Dynamo takes
    seconds to import, and a script that compiles nothing need not wait for it."""
    if "torch._dynamo" not in sys.modules:
        return False
    import torch._inductor.config as inductor

    dynamo = sys.modules["torch._dynamo"].config
    limits = {name: _LIMIT for name in ("recompile_limit", "accumulated_recompile_limit")}
    stack.enter_context(dynamo.patch(skip_nnmodule_hook_guards=False, **limits))
    stack.enter_context(inductor.patch(fallback_random=True))  # eager's random numbers
    return True


def _reset():
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
