"""Losses that are functions of a row's -log p: `nll_function` makes their records."""

import torch
import torch.nn.functional as F

from safeops.core.op import registry
from safeops.testing import Bad
from tests.ops.bad_calls import X, bad_parameters
from tests.ops.classification.cross_entropy import (
    CALL,
    SKIP,
    T,
    _last,
    _targets,
    bad_calls,
    cross_entropy,
    indices,
    record,
    row_terms,
    sample,
    samples_of_indices,
    samples_of_row_weights,
)
from tests.ops.operands import data, mask, weights
from tests.ops.record import ONE_OPERAND
from tests.ops.truth import reduce

MADE_OF_OTHERS = dict.fromkeys(("saved_bytes", "peak_memory"), "numbers of each row, which here has five classes")


def nll_function(name, element, steepest, values):
    """Makes the record of a loss that the library has as `NLLFunction`, which gives its parameters and their ranges.

    element     (nll, **parameters) -> the loss of each row, in plain differentiable torch.
    steepest    (**parameters) -> a bound of both |element(nll)| / nll and |slope|, for all nll.
    values      {parameter: values of further samples}: its least value, and one beyond the default.
    """
    op = registry[name]
    parameters = {x.name: x.default if x.sample is None else x.sample for x in op.parameters}

    def loss(
        input, target, weight=None, *, mask=None, reduction="mean", ignore_index=-100, row_weight=None,
        denominator=None, empty="zero", **parameters,
    ):  # fmt: skip
        nll = cross_entropy(input, target, mask=mask, ignore_index=ignore_index, reduction="none")
        if row_weight is not None:
            mask = row_weight != 0 if mask is None else mask & (row_weight != 0)
        _, keep, row_weights = _targets(target, _last(input).shape[-1], mask, weight, ignore_index)
        losses = element(torch.where(keep, nll, 0), **parameters)
        if row_weight is not None:
            row_weight = torch.where(keep, row_weight, 0)
            row_weights = row_weight if row_weights is None else row_weights * row_weight
        losses = torch.where(keep, losses if row_weights is None else losses * row_weights, 0)
        if reduction == "none":
            return losses
        return reduce(reduction == "mean", losses, keep, row_weights, None, False, empty, denominator)

    def as_users_write_it(input, target, weight=None, **options):
        numbers = {key: options.pop(key) for key in parameters if key in options}
        losses = element(F.cross_entropy(input, target, **options), **numbers)
        return losses if weight is None else losses * weight[target.clamp(min=0)]

    def terms(sample, outcome):
        value, grads = row_terms(sample, outcome)
        bound = steepest(**{key: sample.kwargs.get(key, x.default) for key, x in zip(parameters, op.parameters)})
        return value * bound, {key: x * bound for key, x in grads.items()}

    def further_values():
        t, m = indices(4, 1, classes=5), mask(4, 1)
        for key, numbers in values.items():
            for number in numbers:
                options = {"mask": m, key: number, "weight": weights(5), "reduction": "none"}
                yield sample(2 * data(4, 5, seed=4), t, options, name=f"{key} {number}, none, weighted")

    loss.__name__, loss.__module__ = name, __name__
    record(
        loss,
        as_users_write_it,
        [*samples_of_indices(), *further_values()],
        [
            *bad_calls(name),
            Bad((X, X.softmax(1)), {}, TypeError, (name, "target", "class indices", "torch.float32")),
            *bad_parameters(op, (X, T)),
        ],
        {**CALL, **parameters, "row_weight": torch.tensor([0.5, 1.0, 0.0, 1.0, 2.0])},
        ONE_OPERAND | MADE_OF_OTHERS,
        {"row weights": (samples_of_row_weights(), {"skip": SKIP | MADE_OF_OTHERS, "row_terms": terms})},
        terms=terms,
        gpu="made of other ops, whose kernels the GPU tests run",
        no_route="made of other ops: tests/contract/classification/test_nll_functions.py watches which",
    )


def _focal(nll, gamma=2.0):
    moves = (nll > 0) & (nll < torch.inf)
    missed = -torch.expm1(-torch.where(moves, nll, 1))
    return torch.where(moves, nll * missed**gamma, nll)


nll_function("softmax_focal_loss", _focal, lambda gamma: 1 + gamma, {"gamma": (0.0, 0.5, 3.0)})
