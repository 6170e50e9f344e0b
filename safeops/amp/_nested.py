"""Tensors inside lists, tuples, dicts, namedtuples and dataclasses, whatever their nesting."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function, value):
    """`value` with `function(tensor)` in the place of each tensor; a container in which nothing changed is itself."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(function, value)
    if isinstance(value, Mapping):
        return _mapping(function, value)
    if isinstance(value, (list, tuple)):
        return _sequence(function, value)
    return value


def _sequence(function, old):
    new = [map_tensors(function, x) for x in old]
    if isinstance(old, PackedSequence):
        new[1] = old.batch_sizes  # lives on the CPU, wherever the data is
    if all(a is b for a, b in zip(old, new)):
        return old
    if type(old) is list:
        return new
    if isinstance(old, list):
        clone = copy.copy(old)
        clone[:] = new
        return clone
    return type(old)(*new) if hasattr(old, "_fields") else type(old)(new)  # a namedtuple takes its fields one by one


def _mapping(function, old):
    new = {key: map_tensors(function, x) for key, x in old.items()}
    if all(old[key] is x for key, x in new.items()):
        return old
    if type(old) is dict:
        return new
    if not isinstance(old, MutableMapping):
        return type(old)(new)
    clone = copy.copy(old)  # keeps a default factory, an order, attributes
    for key, x in new.items():
        clone[key] = x
    return clone


def _dataclass(function, old):
    new = {f.name: map_tensors(function, getattr(old, f.name)) for f in dataclasses.fields(old) if hasattr(old, f.name)}
    changed = {name: x for name, x in new.items() if x is not getattr(old, name)}
    if not changed:
        return old
    clone = copy.copy(old)  # not replace(): __init__ may compute, and fields may not be its arguments
    put = object.__setattr__ if old.__dataclass_params__.frozen else setattr
    for name, x in changed.items():
        put(clone, name, x)
    return clone
