"""The record of a loss that is a function of each row's negative log-likelihood nll = -log softmax(input)[target].

The kernels of cross_entropy compute nll from one read of the logits. All later steps have one number per row.
"""

import copy

from safeops.core import loss_reduction, sums
from safeops.core.dtypes import compute_dtype
from safeops.core.op import Composed
from safeops.ops.classification._classification import (
    ARGUMENTS,
    class_dim,
    rows_of,
    validate_index,
    validate_reduction,
    validate_weight,
    weighed,
    without_weight_0,
)
from safeops.ops.classification.cross_entropy import _cross_entropy
from safeops.ops.classification.nll_loss import _nll_loss

# The docstrings' text on input, target and row_weight; ARGUMENTS follows it
OPERANDS = """\
        input: (N, C), (C,) or (N, C, d1, ...) floating tensor of logits; a class of -inf does not exist.
        target: class indices in [0, C), int64, int32 or uint8, of shape (N,), () or (N, d1, ...).
        row_weight: floating tensor, broadcastable to the rows' shape. It multiplies each row's loss, and the mean
            divides by its sum (times the class weights). A row of weight 0 is masked out. Differentiable.
"""


class NLLFunction(Composed):
    """The record. value(nll, *parameters) returns the losses, of nll's shape (N, d1, ...), in torch ops."""

    def __init__(self, name, module, value, *parameters):
        """parameters: instances of `losses._pointwise.Parameter`, in the order of `value`'s arguments."""
        example = "torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])"
        super().__init__(
            name,
            _cross_entropy,
            *sums.ALL,
            module=module,
            buffers=("weight",),
            example=example,
            validate_options=self.check_options,
        )
        self.value, self.parameters = value, parameters
        self.operands = copy.copy(_nll_loss)  # validates the operands, which have nll_loss's shapes and dtypes
        self.operands.name = name

    def validate_buffer(self, name, key, x):
        validate_weight(name, x)

    def check_options(self, name, reduction, empty, *options):
        """Check the options of a module's constructor, in the order of the function's signature."""
        *numbers, ignore_index = options
        loss_reduction.validate_options(name, reduction, empty)
        for parameter, number in zip(self.parameters, numbers):
            parameter.check(name, number)
        validate_index(name, ignore_index)

    def public(self):
        numbers = "".join(f"float {x.name}={x.default}, " for x in self.parameters)
        schema = (
            f"(Tensor input, Tensor target, Tensor? weight=None, *, {numbers}Tensor? mask=None, "
            'str reduction="mean", int ignore_index=-100, Tensor? row_weight=None, Tensor? denominator=None, '
            'str empty="zero") -> Tensor'
        )
        return super().public(schema, arguments=OPERANDS + ARGUMENTS)

    def call(self, input, target, weight, mask, reduction, ignore_index, row_weight, denominator, empty, *numbers):
        name = self.name
        validate_reduction(name, input, reduction, denominator, empty)
        for parameter, number in zip(self.parameters, numbers):
            parameter.check(name, number)
        self.operands.validate(input, target, weight, mask, ignore_index)
        if row_weight is not None:
            mask = without_weight_0(name, row_weight, mask, input)
        weights = None
        if weight is not None:
            compute = compute_dtype(input.dtype, weight.dtype)
            _, mask, weights = rows_of(input.shape[class_dim(input)], target, weight, mask, ignore_index, compute)
        nll, keep, _ = _cross_entropy.call(input, target, None, mask, ignore_index, 0.0, 0.0, 1.0, None)
        loss = products = self.value(nll, *numbers)
        if weights is not None:
            products = loss * weights
        if row_weight is not None:
            products, weights = weighed(products, keep, weights, row_weight)
        return loss_reduction.reduce(name, products, keep, weights, reduction, denominator, empty).to(loss.dtype)
