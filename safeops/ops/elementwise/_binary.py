"""Shared by the binary functions.

An op of the family is `Binary(name, define)`: `define(a, b, eps, fill_value, dtype)` computes the result in `dtype`
from operands of the compute dtype. The family handles dtypes, and numbers as second operand.
"""

import torch

from safeops.core import check
from safeops.core.check import NUMBER
from safeops.core.dtypes import FLOATING, LARGEST, SMALLEST, WIDE, compute_dtype
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.core.sums import sum_to
from safeops.core.symbolic import scalar, symbolic
from safeops.ops.elementwise._unary import output_dtype

# ---- op

# number: the second operand if `other` is None; it is used in the compute dtype.
_SCHEMA = (
    "(Tensor input, Tensor? other, float? eps=None, float fill_value=0.0, ScalarType? dtype=None, "
    "float? number=None) -> Tensor"
)
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor input, Tensor? other, float? eps=None, bool need_input=True, bool need_other=True, "
    "ScalarType? input_dtype=None, ScalarType? other_dtype=None, float? number=None) -> (Tensor, Tensor)"
)


def _shape(input, other):
    return input.shape if other is None else torch.broadcast_shapes(input.shape, other.shape)


def _fake(input, other, eps, fill_value, dtype, number):
    return like(input, _shape(input, other), dtype or input.dtype)


def _fake_backward(grad, input, other, eps, need_input, need_other, input_dtype, other_dtype, number):
    shape, second = _shape(input, other), input if other is None else other
    input_dtype, other_dtype = input_dtype or input.dtype, other_dtype or second.dtype
    return (
        like(input, shape, input_dtype) if need_input else input.new_empty(0, dtype=input_dtype),
        like(other, shape, other_dtype) if need_other else second.new_empty(0, dtype=other_dtype),
    )


# ---- record


class Binary(Op):
    """The record of a binary function.

    other: the second operand's name in the public function. number: True if the second operand may be a number. safe:
    True if the result is at least fp32 under autocast.
    """

    owner = "C++/CUDA"
    shards = "elementwise"
    differentiable = ("input", "other")
    sum_to = staticmethod(sum_to)

    def __init__(self, name, define, *, other="other", number=True, safe=True, domain=None):
        def definition(input, other, eps=None, fill_value=0.0, dtype=None, number=None):
            if other is None:
                dtype = dtype or input.dtype
                other = scalar(number, compute_dtype(input.dtype, dtype), input.device)
            if dtype is None:
                dtype = promoted(input, other)
            compute = compute_dtype(input.dtype, other.dtype, dtype)
            if eps is None:
                eps = torch.finfo(compute).tiny
            return define(input.to(compute), other.to(compute), eps, fill_value, dtype)

        self.other, self.number, self.safe, self.domain = other, number, safe, domain
        forward = declare_raw(f"_{name}", _SCHEMA, fake=_fake, composite=definition)
        backward = declare_raw(f"_{name}_backward", _SCHEMA_BACKWARD, fake=_fake_backward)
        super().__init__(name, forward, backward, definition)

    def prepare(self, input, other, eps=None, fill_value=0.0, dtype=None):
        input_dtype = input.dtype  # (read once: such reads are most of a small call's time)
        usual = fill_value.__class__ is float and check.usual_floor(eps)
        if not usual or (dtype is not None and type(dtype) is not torch.dtype):
            self.validate(input, other, eps, fill_value, dtype)
        if self.number and isinstance(other, NUMBER):
            if dtype is None:
                dtype = self._output_dtype(input, input_dtype if input_dtype in FLOATING else promoted(input, other))
            other, eps, number = _number(other, input, dtype, eps)
            if other is None:
                return input_dtype in FLOATING, (input, None, eps, fill_value, dtype, number)
        others = other.dtype
        if usual and fill_value == 0 and input_dtype == others and input_dtype in WIDE and dtype in (None, input_dtype):
            return True, (input, other) if eps is None else (input, other, eps)  # most calls
        if dtype is None:
            dtype = self._output_dtype(
                input, input_dtype if input_dtype == others and input_dtype in FLOATING else promoted(input, other)
            )
        return input_dtype in FLOATING and others in FLOATING, (input, other, eps, fill_value, dtype)

    def validate(self, input, other, eps=None, fill_value=0.0, dtype=None):
        check.tensor(self.name, "input", input)
        if not (self.number and isinstance(other, NUMBER)):
            if self.number and not isinstance(other, torch.Tensor):
                kind = type(other).__name__
                raise TypeError(f"{self.name}: {self.other} must be a tensor or a number, got {kind}")
            check.tensor(self.name, self.other, other)
            check.broadcast(self.name, **{"input": input, self.other: other})
            check.same_device(self.name, "input", input, **{self.other: other})
        else:
            check.double(self.name, self.other, other)
        for name, x in (("input", input), (self.other, other)):
            if isinstance(x, torch.Tensor):
                check.real(self.name, name, x)
        if eps is not None:
            check.number(self.name, "eps", eps, minimum=0)
        check.number(self.name, "fill_value", fill_value)
        check.output_dtype(self.name, dtype)

    def gradients(self, grad, needs, operands, results):
        input, other, number = operands.input, operands.other, operands.number
        if other is None:
            return self.backward(grad, input, None, operands.eps, needs[0], False, None, None, number)
        # A broadcast operand's gradient is summed to its shape later: it stays wide, and is rounded after the sum.
        wide = compute_dtype(input.dtype, other.dtype, grad.dtype)
        dtypes = (None if x.shape == grad.shape else wide for x in (input, other))
        return self.backward(grad, input, other, operands.eps, *needs[:2], *dtypes)

    def _output_dtype(self, input, promoted):
        return output_dtype(input, promoted) if self.safe else promoted


def _number(number, input, dtype, eps):
    """Returns (0-dim fp64 tensor or None, eps, float or None): the second operand as a tensor or as a number.

    It becomes a tensor, and the computation fp64, if it is symbolic, or if the computation was in fp32, which does not
    hold it (`_fits_single`)."""
    compute = compute_dtype(input.dtype, dtype)
    unknown = symbolic(number)  # its value must not be read
    if not unknown:
        number = float(number)
        if compute == torch.float64 or _fits_single(number):
            return None, eps, number
    if compute == torch.float32:
        eps = SMALLEST if eps is None else eps  # the floor stays that of input's compute dtype
    return scalar(number, torch.float64, input.device), eps, None


def _fits_single(number):
    """False if fp32 has no number of this size, or if rounding to fp32 makes a fraction whole or an odd number even."""
    if number == 0 or not abs(number) < float("inf"):
        return True
    if not SMALLEST <= abs(number) <= LARGEST:
        return False
    high = 536870913.0 * number  # Veltkamp's splitting with the factor 2^29 + 1 keeps 24 of 53 bits
    short = high - (high - number)
    return short == number or (number % 1 != 0 != short % 1) or number % 2 == short % 2


def promoted(input, other):
    """The dtype that torch gives input / other. (torch.result_type cannot be traced.)"""
    floats = [x for x in (input, other) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not floats:
        return torch.get_default_dtype()
    if len(floats) == 2 and (input.dim() == 0) != (other.dim() == 0):
        return (other if input.dim() == 0 else input).dtype  # a 0-dim tensor does not widen one with dimensions
    return torch.promote_types(floats[0].dtype, floats[-1].dtype)
