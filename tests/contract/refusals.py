"""The records' bad calls, as tests make them: on any device, by any raw ops."""

import contextlib
import copy

import pytest
import torch
from torch.utils._pytree import tree_map_only

import safeops
from safeops.core.autograd import autograd_function
from safeops.core.op import registry
from safeops.core.private_torch import schema
from safeops.testing import Sample, Subject
from safeops.testing.execution import check_errors
from tests.contract.common import DEVICE, case
from tests.ops import RECORDS
from tests.ops.bad_calls import BadIndex

BAD_CALLS = {name: record.bad_calls for name, record in RECORDS.items() if not isinstance(record.bad_calls, str)}


def assert_refused(op, bad, looks=DEVICE == "cpu"):
    """Asserts that the call is refused with and without a gradient to record, and that the error names the function.

    looks: class indices are checked; if not, a call with a wrong one must pass."""

    def named(*args, **kwargs):
        try:
            op(*args, **kwargs)
        except Exception as error:
            assert str(error).startswith(f"{bad.words[0]}: "), error
            raise

    def recorded(*args, **kwargs):
        floating = lambda x: x.requires_grad_() if x.is_floating_point() else x  # noqa: E731
        args, kwargs = tree_map_only(torch.Tensor, lambda x: floating(x.detach().clone()), (args, kwargs))
        return named(*args, **kwargs)

    for call in (named, recorded):
        if isinstance(bad, BadIndex) and not looks:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), (bad.args, bad.kwargs))
            call(*args, **kwargs)
        else:
            check_errors(Subject(call, None, (), errors=[bad], device=DEVICE), Sample())


@contextlib.contextmanager
def kernels(forwards):
    """Inside the context, public ops call other raw forward ops. forwards: {public op's name: raw op to call}."""
    with pytest.MonkeyPatch.context() as patch:
        for name, forward in forwards.items():
            op = copy.copy(registry[name])
            op.forward = forward
            recorded = autograd_function(op).apply if op.differentiable else forward
            patch.setattr(registry[name], "eager", [(forward, False), (recorded, False)])
        yield


def assert_all_refused(ops, names):
    """Asserts that `ops`, whose raw ops have the same names, refuse the ops' bad calls. They do not check indices."""
    raw = {name: schema(registry[name].forward).name.removeprefix("safeops::") for name in names}
    with kernels({name: getattr(ops, raw[name]) for name in names}):
        for name in names:
            for i, bad in enumerate(BAD_CALLS[name]):
                with case(name, i, *bad.words):
                    assert_refused(getattr(safeops, name), bad, looks=False)


STRANGE = {
    "of integers": torch.Tensor.long,
    "of bools": torch.Tensor.bool,
    "of complex numbers": lambda x: x + 0j,
    "of one more dimension": lambda x: x[None],
    "of its first alone": lambda x: x[:1],
    "twice as long": lambda x: torch.cat([x, x], -1),
    "of nothing": lambda x: x[:0],
}


def strange_calls(call):
    """Yields (name of the change, a good call with one operand changed): some ops accept it, others refuse it."""
    for key, x in call.items():
        if isinstance(x, torch.Tensor) and x.dim():
            for what, change in STRANGE.items():
                yield f"{key} {what}", {**call, key: change(x)}


def refusal(function, call):
    """The error as text, or None if the call passes."""
    try:
        function(**call)
    except (TypeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
