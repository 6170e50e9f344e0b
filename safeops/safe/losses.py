"""torch's losses as calls of their twins: torch's names, positions and defaults, and its divisor of a mean."""

import inspect
import math
import sys

import torch
import torch.nn.functional as F

from safeops.debug._twins import LOSSES, TWINS

NAMES = sorted(LOSSES & TWINS.keys())


def loss(name):
    """The handler of F.<name>: the twin's result, or None where torch's own is to be called."""
    twin, adapt = TWINS[name].public_function, _ADAPTED.get(name)
    names = tuple(inspect.signature(getattr(F, name)).parameters)

    def handler(*args, **kwargs):
        options = dict(zip(names, args)) | kwargs
        size_average, reduce = options.pop("size_average", None), options.pop("reduce", None)
        if size_average is not None or reduce is not None:  # deprecated, and said so by torch
            return None
        if adapt is not None and not adapt(options):
            return None
        return twin(**options)

    return handler


# Each changes the options to the twin's, and says whether there is such a call.


def _mean_by_count(options):
    """torch's mean divides by the count of elements, also with weights."""
    weight = options.get("weight")
    if weight is not None and options.get("reduction", "mean") == "mean":
        shapes = (x.shape for x in (options["input"], options["target"], weight))
        options["denominator"] = math.prod(torch.broadcast_shapes(*shapes))
    return True


def _of_one_shape(options):
    """torch does not broadcast the target here."""
    return options["input"].shape == options["target"].shape and _mean_by_count(options)


def _weight_of_one_shape(options):
    """torch does not broadcast the weight here."""
    weight = options.get("weight")
    return weight is None or weight.shape == options["input"].shape


def _variance_of_each(options):
    """torch's variance may be a number, or one for each row."""
    return isinstance(options["var"], torch.Tensor) and options["var"].shape == options["input"].shape


_ADAPTED = {
    "binary_cross_entropy": _of_one_shape,
    "binary_cross_entropy_with_logits": _of_one_shape,
    "gaussian_nll_loss": _variance_of_each,
    "huber_loss": lambda options: _weight_of_one_shape(options) and _mean_by_count(options),
    "l1_loss": _weight_of_one_shape,
    "mse_loss": _weight_of_one_shape,
}


def with_weight(rule):
    """The rule of F.l1_loss, which does not tell a mode its weight (torch 2.13): that is in the frame that calls."""

    def completed(func, args, kwargs):
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)
        while frame is not None and frame.f_code is not F.l1_loss.__code__:
            frame = frame.f_back
        if frame is not None and frame.f_locals["input"] is args[0]:
            kwargs = {**kwargs, "weight": frame.f_locals["weight"]}
        return rule(func, args, kwargs)

    return completed
