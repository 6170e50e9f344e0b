"""torch's losses as calls of their twins: torch's names, positions and defaults, and its divisor of a mean."""

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
        if size_average is not None or reduce is not None:  # deprecated, and said so by torch
            return None
        if takes is not None and not takes(options) or not _of_one_shape(name, options):
            return None
        if name == "kl_div" and options.get("reduction", "mean") == "mean" and not torch.compiler.is_compiling():
            F.kl_div(torch.zeros(1), torch.zeros(1))  # torch's own warning of this mean, in its words
        return twin(**options)

    return handler


# Calls whose twin would say something else: what torch refuses, torch is to refuse.


def _of_one_shape(name, options):
    """torch broadcasts the operands of some losses in silence, of others with a warning, and of some not at all."""
    if not isinstance(TWINS.get(name), PointwiseLoss) or name == "gaussian_nll_loss":
        return True
    shapes = {options[key].shape for key in ("input", "input1", "input2", "target") if key in options}
    return len(shapes) == 1


def _weight_of_one_shape(options):
    """torch does not broadcast the weight here."""
    weight = options.get("weight")
    return weight is None or weight.shape == options["input"].shape


def _without_a_function(options):
    """A function of the caller's is run inside the mode, by torch's own steps (presence.py)."""
    return options.get("distance_function") is None


def _smoothed_without_weights(options):
    """The twin masks a class of weight 0 out, of which torch's smoothed loss has the other classes' share."""
    return options.get("weight") is None or not options.get("label_smoothing")


_TAKEN = {
    "cross_entropy": _smoothed_without_weights,
    "huber_loss": _weight_of_one_shape,
    "l1_loss": _weight_of_one_shape,
    "mse_loss": _weight_of_one_shape,
    "triplet_margin_with_distance_loss": _without_a_function,
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
