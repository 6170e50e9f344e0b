"""Selection by index: the record of safe_gather and safe_index_select."""

from safeops.core import check
from safeops.core.op import Op
from safeops.ops.selection._selection import MOVABLE, as_double, check_fill, check_index, check_movable


class Indexed(Op):
    """The record of a selection by index. gathers: True if `index` has an entry for each element of the result; False
    if it is a vector along `dim`. validate_index(input, dim, index): raises if the dim or the shapes do not fit."""

    owner = "C++/CUDA"
    linear = 1

    def __init__(self, name, forward, backward, definition, validate_index, gathers):
        self.validate_index, self.gathers = validate_index, gathers
        super().__init__(name, forward, backward, definition)

    def prepare(self, input, dim, index, fill_value):
        takes = input.dtype in MOVABLE
        if dim.__class__ is int and fill_value.__class__ is int and fill_value == 0:
            return takes, (input, index, dim)
        self.validate(input, dim, index, fill_value)
        double = as_double(fill_value)
        return takes and double is not None, (input, index, dim, fill_value if double is None else double)

    def validate(self, input, dim, index, fill_value):
        check_movable(self.name, "input", input)
        check_index(self.name, index)
        self.validate_index(input, dim, index)
        check.same_device(self.name, "input", input, index=index)
        check_fill(self.name, fill_value, input.dtype)

    def gradients(self, grad, needs, operands, results):
        if grad.is_complex():
            return self.composite_gradients(grad, needs, operands, results)
        return (self.backward(grad, operands.index, operands.dim, operands.input.shape),)
