"""A head depends on autocast and random numbers, too: backward restores them."""

import contextlib

import torch

from safeops.core.private_torch import is_autocast_available, saved_tensor_hooks


class Surroundings:
    """The state of autocast and of the random number generators at the begin of a call."""

    def __init__(self, device):
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if is_autocast_available(kind)]
        self.autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self.cache = torch.is_autocast_cache_enabled()
        self.device, self.cpu_state, self.state = device, torch.get_rng_state(), None
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self.state = torch.cuda.get_rng_state(device)
        if any(enabled for _, _, enabled in self.autocast):
            # A copy of a weight in half that was made before the call would be a tensor of another graph.
            torch.clear_autocast_cache()

    def rewind(self):
        """Set the generators to the begin of the call."""
        torch.set_rng_state(self.cpu_state)
        if self.state is not None:
            torch.cuda.set_rng_state(self.state, self.device)

    @contextlib.contextmanager
    def again(self):
        """Autocast as it was, and the same random numbers; the generators afterwards are as they were before."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([self.device] if self.state is not None else []))
            self.rewind()
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            yield


def own_saved_tensors():
    """A context for a graph that does not outlive it: hooks of saved tensors (a checkpoint, an offload to the CPU) are
    left out, which would recompute or move what is read at once."""
    if saved_tensor_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
