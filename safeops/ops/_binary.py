"""The skeleton of the binary functions: one definition, one pair of raw ops, one Function, one call path.

An op of the family is `Binary(name, define)`: `define(a, b, eps, fill_value, dtype)` gives the result in `dtype` from
operands of the compute dtype. Dtypes, numbers as second operand and the sums over a broadcast are the skeleton's.
"""

import torch

from safeops import _check, _route
from safeops._check import NUMBER
from safeops._dtypes import FLOATING, LARGEST, SMALLEST, compute_dtype
from safeops._library import Op, declare_raw, like
from safeops._symbolic import scalar, symbolic
from safeops.ops._unary import output_dtype
from safeops.ops.masked_sum import reduce_to

# ---- op

_SCHEMA = "(Tensor input, Tensor other, float? eps=None, float fill_value=0.0, ScalarType? dtype=None) -> Tensor"
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor input, Tensor other, float? eps=None, bool need_input=True, bool need_other=True, "
    "ScalarType? input_dtype=None, ScalarType? other_dtype=None) -> (Tensor, Tensor)"
)


def _fake(input, other, eps=None, fill_value=0.0, dtype=None):
    return like(input, torch.broadcast_shapes(input.shape, other.shape), dtype or input.dtype)


def _fake_backward(grad, input, other, eps=None, need_input=True, need_other=True, input_dtype=None, other_dtype=None):
    shape = torch.broadcast_shapes(input.shape, other.shape)
    input_dtype, other_dtype = input_dtype or input.dtype, other_dtype or other.dtype
    return (
        like(input, shape, input_dtype) if need_input else input.new_empty(0, dtype=input_dtype),
        like(other, shape, other_dtype) if need_other else input.new_empty(0, dtype=other_dtype),
    )


# ---- autograd


def _function(raw, raw_backward, definition):
    class _Binary(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, other, eps=None, fill_value=0.0, dtype=None):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(input, other)
            ctx.arguments = (eps, fill_value, dtype)
            return raw(input, other, eps, fill_value, dtype)

        @staticmethod
        def backward(ctx, grad):
            nothing = (None,) * (len(ctx.needs_input_grad) - 2)
            if grad is None:
                return None, None, *nothing
            input, other = ctx.saved_tensors
            if _route.by_composite(grad):
                grads = _route.differentiable_backward(definition, (input, other, *ctx.arguments), grad)
                return grads[0], grads[1], *nothing
            need_input, need_other = ctx.needs_input_grad[:2]
            # A broadcast operand's gradient is summed: nothing is rounded to half before that sum.
            wide = compute_dtype(input.dtype, other.dtype, grad.dtype)
            da, db = raw_backward(
                grad,
                input,
                other,
                ctx.arguments[0],
                need_input,
                need_other,
                None if input.shape == grad.shape else wide,
                None if other.shape == grad.shape else wide,
            )
            return (
                reduce_to(da, input.shape, input.dtype) if need_input else None,
                reduce_to(db, other.shape, other.dtype) if need_other else None,
                *nothing,
            )

    return _Binary


# ---- call path


class Binary:
    """A binary function: declares the raw ops, and is the call path of the public function.

    other: what the second operand is called. number: whether it may be a number. safe: at least fp32 under autocast.
    """

    def __init__(self, name, define, *, other="other", number=True, safe=True):
        self.name, self.other, self.number, self.safe = name, other, number, safe

        def definition(input, other, eps=None, fill_value=0.0, dtype=None):
            if dtype is None:
                dtype = promoted(input, other)
            compute = compute_dtype(input.dtype, other.dtype, dtype)
            if eps is None:
                eps = torch.finfo(compute).tiny
            return define(input.to(compute), other.to(compute), eps, fill_value, dtype)

        raw = declare_raw(f"_{name}", _SCHEMA, fake=_fake, composite=definition)
        raw_backward = declare_raw(f"_{name}_backward", _SCHEMA_BACKWARD, fake=_fake_backward)
        function = _function(raw, raw_backward, definition)
        self.op = Op(name, (f"_{name}", f"_{name}_backward"), "C++/CUDA", raw, function, definition)

    def call(self, input, other, eps=None, fill_value=0.0, dtype=None):
        try:
            own = input.dtype  # (read once: a small call is a few dozen such reads)
            floating = own in FLOATING
            if floating and self.number and isinstance(other, NUMBER):
                dtype = self._output_dtype(input, own) if dtype is None else dtype
                other, eps = _number(other, input, dtype, eps)
            others = other.dtype if floating else None
            kernel = _route.kernel(self.op, input, other) if others in FLOATING else None
            if kernel is not None:
                if eps is not None or fill_value.__class__ is not float or kernel is self.op.traced:
                    self._validate(input, other, eps, fill_value, dtype)
                if dtype is None:
                    dtype = self._output_dtype(input, own if own == others else promoted(input, other))
                elif dtype.__class__ is not torch.dtype:  # the dispatcher would take a number for one
                    self._validate(input, other, eps, fill_value, dtype)
                arguments = (input, other)
                if eps is not None or fill_value != 0 or dtype != own or dtype != others:
                    arguments = (input, other, eps, fill_value, dtype)
                if torch.is_grad_enabled() and (input.requires_grad or other.requires_grad):
                    return kernel.apply(*arguments)
                return kernel.raw(*arguments)
        except Exception:
            _check.explain(self._validate, input, other, eps, fill_value, dtype)
            raise
        self._validate(input, other, eps, fill_value, dtype)
        if dtype is None:
            dtype = self._output_dtype(input, promoted(input, other))
        if not isinstance(other, torch.Tensor):
            other, eps = _number(other, input, dtype, eps)
        return self.op.composite(input, other, eps, fill_value, dtype)

    def _output_dtype(self, input, promoted):
        return output_dtype(input, promoted) if self.safe else promoted

    def _validate(self, input, other, eps, fill_value, dtype):
        _check.tensor(self.name, "input", input)
        if not (self.number and isinstance(other, NUMBER)):
            if self.number and not isinstance(other, torch.Tensor):
                kind = type(other).__name__
                raise TypeError(f"{self.name}: {self.other} must be a tensor or a number, got {kind}")
            _check.tensor(self.name, self.other, other)
            _check.broadcast(self.name, **{"input": input, self.other: other})
            _check.same_device(self.name, "input", input, **{self.other: other})
        else:
            _check.double(self.name, self.other, other)
        for name, x in (("input", input), (self.other, other)):
            if isinstance(x, torch.Tensor):
                _check.real(self.name, name, x)
        if eps is not None:
            _check.number(self.name, "eps", eps, minimum=0)
        _check.number(self.name, "fill_value", fill_value)
        _check.output_dtype(self.name, dtype)


def _number(number, input, dtype, eps):
    """(a number as a tensor of the compute dtype, eps): 1e-8 must not become 0 on its way through half.

    One that fp32 would make another number of, and not a less precise one, is read as the double it is.
    """
    compute = compute_dtype(input.dtype, dtype)
    if symbolic(number):  # whether fp32 would do is not to be asked
        eps = SMALLEST if eps is None and compute == torch.float32 else eps  # the floor of the input's compute dtype
        return scalar(number, torch.float64, input.device), eps
    number = float(number)
    if compute == torch.float32 and not _fits_single(number):
        compute = torch.float64
        eps = SMALLEST if eps is None else eps  # the floor stays the one of the input's compute dtype
    return torch.full((), number, dtype=compute, device=input.device), eps


def _fits_single(number):
    """False where fp32 has no number of this size, or one that is odd, even or whole and `number` is not."""
    if number == 0 or not abs(number) < float("inf"):
        return True
    if not SMALLEST <= abs(number) <= LARGEST:
        return False
    high = 536870913.0 * number  # Veltkamp's splitting, by 2^29 + 1: the 24 leading bits of 53
    short = high - (high - number)
    return short == number or (number % 1 != 0 != short % 1) or number % 2 == short % 2


def promoted(input, other):
    """torch.result_type of a true division; that function itself cannot be traced."""
    floats = [x for x in (input, other) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not floats:
        return torch.get_default_dtype()
    if len(floats) == 2 and (input.dim() == 0) != (other.dim() == 0):
        return (other if input.dim() == 0 else input).dtype  # a 0-dim tensor does not widen one with dimensions
    return torch.promote_types(floats[0].dtype, floats[-1].dtype)
