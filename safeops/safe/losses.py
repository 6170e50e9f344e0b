"""Handlers that call the safeops twins of torch's losses: with torch's argument names, positions, defaults, and
torch's divisor of a mean."""

import inspect
import sys

import torch
import torch.nn.functional as F

from safeops.debug.common.twins import LOSSES, TWINS
from safeops.ops.classification.ctc_loss import ctc_loss
from safeops.ops.losses._pointwise import PointwiseLoss
from safeops.ops.vectors.triplet_margin_with_distance_loss import triplet_margin_with_distance_loss

FUNCTIONS = {name: TWINS[name].public_function for name in LOSSES & TWINS.keys()} | {
    "ctc_loss": ctc_loss,
    "triplet_margin_with_distance_loss": triplet_margin_with_distance_loss,
}
NAMES = sorted(FUNCTIONS)


def loss(name):
    """The handler of F.<name>: the twin's result, or None where torch's own is to be called."""
    twin, takes = FUNCTIONS[name], _TAKEN.get(name)
    names = tuple(inspect.signature(getattr(F, name)).parameters)

    def handler(*args, **kwargs):
        options = dict(zip(names, args)) | kwargs
        size_average, reduce = options.pop("size_average", None), options.pop("reduce", None)
        if size_average is not None or reduce is not None:  # deprecated: torch warns
            return None
        if takes is not None and not takes(options) or not _of_one_shape(name, options):
            return None
        if name == "kl_div" and options.get("reduction", "mean") == "mean" and not torch.compiler.is_compiling():
            F.kl_div(torch.zeros(1), torch.zeros(1))  # makes torch warn of reduction="mean"
        return twin(**options)

    return handler


# Calls that the twin would compute or refuse differently. They go to torch's own function.


def _of_one_shape(name, options):
    """True if a pointwise loss's operands have one shape. torch broadcasts in some losses silently, in some with a
    warning, in some not at all."""
    if not isinstance(TWINS.get(name), PointwiseLoss):
        return True
    shapes = {options[key].shape for key in ("input", "input1", "input2", "target") if key in options}
    return len(shapes) == 1


def _weight_of_one_shape(options):
    """True if the weight has the input's shape: torch does not broadcast the weight here."""
    weight = options.get("weight")
    return weight is None or weight.shape == options["input"].shape


def _without_a_function(options):
    """True without distance_function. torch's own code runs the caller's function, inside the mode (presence.py)."""
    return options.get("distance_function") is None


def _smoothed_without_weights(options):
    """False for class weights with label smoothing. If a row's class has weight 0, torch keeps the row's smoothing term
    over the other classes; the twin masks the row out."""
    return options.get("weight") is None or not options.get("label_smoothing")


_TAKEN = {
    "cross_entropy": _smoothed_without_weights,
    "huber_loss": _weight_of_one_shape,
    "l1_loss": _weight_of_one_shape,
    "mse_loss": _weight_of_one_shape,
    "triplet_margin_with_distance_loss": _without_a_function,
}


def with_weight(rule):
    """The rule of F.l1_loss, which does not pass its weight to a function mode (torch 2.13): read it in its frame."""

    def completed(func, args, kwargs):
        frame = None if torch.compiler.is_compiling() else sys._getframe(1)
        while frame is not None and frame.f_code is not F.l1_loss.__code__:
            frame = frame.f_back
        if frame is not None and frame.f_locals["input"] is args[0]:
            kwargs = {**kwargs, "weight": frame.f_locals["weight"]}
        return rule(func, args, kwargs)

    return completed
