"""Map the tensors inside lists, tuples, dicts, namedtuples, dataclasses and distributions, in any nesting."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping

import torch
from torch.distributions import Distribution, Transform
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function, value):
    """Replace each tensor in `value` by `function(tensor)`. A container in which nothing changed is returned itself."""
    changed = _changed(function, value)
    return value if changed is None else changed


def _changed(function, value):
    """The new value, or None if nothing changed. (Dynamo of torch 2.11 cannot compare two lists by `is`.)"""
    if isinstance(value, torch.Tensor):
        new = function(value)
        return None if new is value else new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(function, value)
    if isinstance(value, (Distribution, Transform)):
        return _distribution(function, value)
    if isinstance(value, Mapping):
        return _mapping(function, value)
    if isinstance(value, (list, tuple)):
        return _sequence(function, value)
    return None


def _changes(function, items):
    """The entries of a mapping that have changed."""
    changed = {key: _changed(function, x) for key, x in items.items()}
    return {key: x for key, x in changed.items() if x is not None}


def _sequence(function, old):
    changed = [_changed(function, x) for x in old]
    if isinstance(old, PackedSequence):
        changed[1] = None  # batch_sizes lives on the CPU, wherever the data is
    if all(x is None for x in changed):
        return None
    new = [x if y is None else y for x, y in zip(old, changed)]
    if type(old) is list:
        return new
    if isinstance(old, list):
        clone = copy.copy(old)
        clone[:] = new
        return clone
    return type(old)(*new) if hasattr(old, "_fields") else type(old)(new)  # a namedtuple takes its fields one by one


def _mapping(function, old):
    changed = _changes(function, old)
    if not changed:
        return None
    if type(old) is dict or not isinstance(old, MutableMapping):
        return type(old)({**old, **changed})
    clone = copy.copy(old)  # keeps a default factory, an order, attributes
    for key, x in changed.items():
        clone[key] = x
    return clone


def _distribution(function, old):
    changed = _changes(function, vars(old))
    if not changed:
        return None
    clone = copy.copy(old)
    vars(clone).update(changed)
    return clone


def _dataclass(function, old):
    fields = [f.name for f in dataclasses.fields(old) if hasattr(old, f.name)]
    changed = _changes(function, {name: getattr(old, name) for name in fields})
    if not changed:
        return None
    clone = copy.copy(old)  # not replace(): __init__ may compute, and fields may not be its arguments
    put = object.__setattr__ if old.__dataclass_params__.frozen else setattr
    for name, x in changed.items():
        put(clone, name, x)
    return clone
