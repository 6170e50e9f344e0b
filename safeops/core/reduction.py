"""`Reduction`: the class of the records of all masked reductions, in `sums.py` and `safeops/ops/reductions`."""

import torch

from safeops.core import check
from safeops.core.definitions import count_kept, kept
from safeops.core.op import Op

INTS = frozenset((int,))


def output_shape(size, dim, keepdim):
    dims = check.dims("reduction", dim, len(size))
    if keepdim:
        return [1 if d in dims else n for d, n in enumerate(size)]
    return [n for d, n in enumerate(size) if d not in dims]


def validate(name, input, mask, weight, dim, keepdim):
    check.mask(name, mask, "input", input)
    check.weight(name, weight, "input", input)
    check.same_device(name, "input", input, mask=mask, weight=weight)
    check.dims(name, dim, input.dim())
    check.boolean_flag(name, "keepdim", keepdim)


def as_dims(name, dim):
    """dim as a tuple of ints, or None. A bool or a tensor raises: the dispatcher would accept it as an int."""
    if dim is None:
        return None
    dim = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)  # (a copy: a list may change before backward)
    return dim if INTS.issuperset(map(type, dim)) else check.integers(name, dim)


# The text that replaces {arguments} in each docstring of the family.
ARGUMENTS = """\
        input: floating tensor of any shape and strides.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        dim: int or tuple of ints; None (or an empty tuple) reduces all dims.
        keepdim: keep the reduced dims with size 1.
        weight: floating tensor, broadcastable to `input`; 0 means the same as masked out.
        dtype: output dtype. None: fp32 for fp16, bf16 and fp32 input, fp64 for fp64.
        empty: where nothing is kept: "zero" gives 0 (attached to the graph, zero gradients), "nan" gives NaN, "raise"
            raises ValueError before any work (the host waits for the device, so the call cannot be compiled whole).

    Returns:
        The results, of `input`'s shape without the reduced dims.

    Raises:
        TypeError: `input` or `weight` is not floating, `mask` is not bool, dtype is not floating.
        ValueError: `mask` or `weight` does not broadcast to `input`, devices differ, dim repeats, unknown `empty`.
        IndexError: dim out of range.
"""


class Reduction(Op):
    """The record of a masked reduction. keyword: the name of its parameter ("correction" or "ord"), if it has one."""

    constant = ("weight",)
    empties, arguments = check.EMPTY, ARGUMENTS

    def __init__(self, *record, keyword=None):
        self.keyword = keyword
        super().__init__(*record)

    def prepare(self, input, mask, dim, keepdim, weight, dtype, empty, *parameter):
        takes = len(parameter) == 0 or self.has_kernel(*parameter)  # (Dynamo cannot negate a tuple)
        if weight is None and dim is None and dtype is None and empty == "zero" and keepdim is False:
            # most calls; trailing defaults are left out, which is faster
            return takes, (input, mask, None, None, False, False, None, *parameter) if parameter else (input, mask)
        if empty == "raise":
            self._raise_first(input, mask, dim, keepdim, weight, dtype, empty, *parameter)
        takes = takes and empty in check.EMPTY and isinstance(keepdim, bool)
        takes = takes and (dtype is None or dtype.__class__ is torch.dtype)
        return takes, (input, mask, weight, as_dims(self.name, dim), keepdim, empty == "nan", dtype, *parameter)

    def has_kernel(self, parameter):
        # The dispatcher would accept a tensor as a number (and wait for its value), and True as 1.
        return isinstance(parameter, (int, float)) and not isinstance(parameter, bool)

    def validate(self, input, mask, dim, keepdim, weight, dtype, empty, *parameter):
        check.floating(self.name, "input", input, numbers=True)
        validate(self.name, input, mask, weight, dim, keepdim)
        check.output_dtype(self.name, dtype)
        check.choice(self.name, "empty", empty, self.empties)
        for value in parameter:
            check.number(self.name, self.keyword, value)

    def validate_operands(self, input, mask, weight, dim, keepdim, empty_nan, dtype, parameter=None):
        parameters = () if self.keyword is None else (parameter,)
        self.validate(input, mask, dim, keepdim, weight, dtype, "zero", *parameters)

    def _raise_first(self, input, mask, dim, keepdim, weight, dtype, empty, *parameter):
        """For empty="raise": raise for bad arguments, or where nothing is kept, before any work."""
        self.validate(input, mask, dim, keepdim, weight, dtype, empty, *parameter)
        # One synchronisation: the documented price of empty="raise".
        dims = check.dims(self.name, dim, input.dim())
        weight = None if weight is None else weight.detach()
        check.raise_if_empty(
            self.name, lambda: ~self._exists(input.detach(), mask, weight, dims, *parameter), input, dim
        )

    def _exists(self, input, mask, weight, dims, *parameter):
        """Bool, the results' shape: True where at least one element is kept."""
        return count_kept(kept(mask, weight), input, dims, False) > 0

    def public(self, *schemas, parameter=""):
        """parameter: schema text of the reduction's own parameter, such as "Scalar ord=2, "."""
        schema = (
            f"(Tensor input, Tensor? mask=None, int[1]? dim=None, *, {parameter}bool keepdim=False, "
            'Tensor? weight=None, ScalarType? dtype=None, str empty="zero") -> Tensor'
        )
        return super().public(*(schemas or (schema,)), arguments=self.arguments)
