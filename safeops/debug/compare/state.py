"""Put back what a step changes: parameters, buffers, gradients and the states of random generators."""

import copy
import random
import sys

import torch


class State:
    """A copy of what the models hold and of the random states. `restore()` puts both back, as often as asked."""

    def __init__(self, models):
        modules = {id(m): m for model in models for m in model.modules()}.values()
        self.tensors = []  # (the dict that holds it, its name, the tensor, a copy of its values, its gradient)
        for module in modules:
            for held in (module._parameters, module._buffers):
                for name, x in held.items():
                    if x is not None:
                        self.tensors.append((held, name, x, x.detach().clone(), x.grad if x.is_leaf else None))
        self.random = random_states()

    def restore(self, gradients=False):
        """gradients: True to put the gradients back; else there are none, as at the begin of a step."""
        for held, name, x, values, gradient in self.tensors:
            held[name] = x
            if not _same(x, values):  # (a write would count as a change of a tensor that a graph holds)
                with torch.no_grad():
                    x.copy_(values)
            if x.is_leaf:
                x.grad = gradient if gradients else None
        set_random_states(self.random)

    def drew_random_numbers(self):
        return any(not _equal_states(x, self.random[name]) for name, x in random_states().items())


def random_states():
    states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states):
    random.setstate(states["python"])
    torch.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def copied(batch):
    """The batch with tensors of its own, also in lists, tuples and dicts; other objects are copied where they can."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, dict):
        result = copy.copy(batch)
        for name, x in batch.items():
            result[name] = copied(x)
        return result
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(copied, batch))
    if type(batch) in (tuple, list):
        return type(batch)(map(copied, batch))
    return batch


def _same(x, values):
    local = x.to_local() if hasattr(x, "to_local") else x
    values = values.to_local() if hasattr(values, "to_local") else values
    return torch.equal(local.detach(), values) or bool(((local == values) | (local.isnan() & values.isnan())).all())


def _equal_states(x, y):
    if isinstance(x, torch.Tensor):
        return torch.equal(x, y)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(_equal_states, x, y))
    return bool((x == y).all()) if hasattr(x, "all") else x == y
