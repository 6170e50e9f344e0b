"""How a launch follows from sizes. A launcher is run once more on symbols in place of sizes and strides, and what it
computes is written on a tape. From the tape the extension (csrc/launch) launches calls of other sizes.

A comparison has the result that it has for the sizes at hand, and the tape notes it: the tape holds for all sizes for
which every comparison comes out the same. Code that needs a symbol's number, such as a constant of a kernel, makes the
tape note that the symbol equals this number.
"""

import operator
import threading
from array import array

import torch

from .sized import Sized

# The operations of a tape's steps (csrc/launch/tape.h)
CONSTANT, ADD, SUBTRACT, MULTIPLY, DIVIDE, REMAINDER, EQUAL, UNEQUAL, LESS, AT_MOST = range(10)


class _Active(threading.local):
    tape = None


active = _Active()


class Tape:
    def __init__(self):
        self.sizes, self.steps, self.plans = 0, {}, []

    def stand_in(self, argument):
        """The stand-in for an argument of the raw op: a Sized for a tensor, symbols for a list of sizes."""
        if isinstance(argument, torch.Tensor):
            shape, steps = self.stand_in(list(argument.shape)), self.stand_in(list(argument.stride()))
            return Sized(tuple(shape), tuple(steps), argument.dtype, argument.device, argument.data_ptr() % 16)
        if isinstance(argument, list):
            first, self.sizes = self.sizes, self.sizes + len(argument)
            return [Symbol(self, first + i, value) for i, value in enumerate(argument)]
        return argument

    def place(self, x):
        """The index of a symbol or of a number among the tape's values."""
        return x.place if isinstance(x, Symbol) else self.step(CONSTANT, x)

    def step(self, code, a, b=0):
        return self.steps.setdefault((code, operator.index(a), b), self.sizes + len(self.steps))

    def value(self, code, function, a, b):
        return Symbol(self, self.step(code, self.place(a), self.place(b)), function(number(a), number(b)))

    def note(self, code, a, b):
        a, b = self.place(a), self.place(b)
        if a != b:
            self.step(code, a, b)

    def results(self, values):
        return array("q", map(self.place, values)).tobytes()


def number(x):
    return x.value if isinstance(x, Symbol) else x


def _arithmetic(code, function, neutral=None, commutes=False):
    """Returns the methods for `x op y` and `y op x`. `x op neutral` is x, without a step."""

    def forward(x, y):
        if not isinstance(y, (int, Symbol)):
            return NotImplemented
        return x if isinstance(y, int) and y == neutral else x.tape.value(code, function, x, y)

    def backward(x, y):
        if not isinstance(y, int):
            return NotImplemented
        return x if commutes and y == neutral else x.tape.value(code, function, y, x)

    return forward, backward


def _comparison(function, yes, no):
    """yes, no: the step to note where `x op y` is true, and where it is false: (code, whether x and y are swapped)."""

    def compare(x, y):
        if not isinstance(y, (int, Symbol)):
            return NotImplemented
        result = function(x.value, number(y))
        code, swapped = yes if result else no
        x.tape.note(code, *((y, x) if swapped else (x, y)))
        return result

    return compare


class Symbol:
    """A size, a stride, or a value computed from them. It is not an int: code cannot use its number unnoticed."""

    __slots__ = ("tape", "place", "value")

    def __init__(self, tape, place, value):
        self.tape, self.place, self.value = tape, place, value

    __add__, __radd__ = _arithmetic(ADD, operator.add, 0, True)
    __sub__, __rsub__ = _arithmetic(SUBTRACT, operator.sub, 0)
    __mul__, __rmul__ = _arithmetic(MULTIPLY, operator.mul, 1, True)
    __floordiv__, __rfloordiv__ = _arithmetic(DIVIDE, operator.floordiv, 1)
    __mod__, __rmod__ = _arithmetic(REMAINDER, operator.mod)
    __eq__ = _comparison(operator.eq, (EQUAL, False), (UNEQUAL, False))
    __ne__ = _comparison(operator.ne, (UNEQUAL, False), (EQUAL, False))
    __lt__ = _comparison(operator.lt, (LESS, False), (AT_MOST, True))
    __le__ = _comparison(operator.le, (AT_MOST, False), (LESS, True))
    __gt__ = _comparison(operator.gt, (LESS, True), (AT_MOST, False))
    __ge__ = _comparison(operator.ge, (AT_MOST, True), (LESS, False))

    def __neg__(self):
        return 0 - self

    def __bool__(self):
        return self != 0

    def __index__(self):
        self.tape.note(EQUAL, self, self.value)
        return self.value

    def __hash__(self):
        return hash(self.__index__())

    def bit_length(self):
        if self.value <= 0:
            return self.__index__().bit_length()
        bits = self.value.bit_length()
        self.tape.note(AT_MOST, 1 << bits - 1, self)
        self.tape.note(LESS, self, 1 << bits)
        return bits


def trace(launch, arguments, extension):
    """Run the launcher of the call just made on symbols, and pass the tape to the extension. If no tape can be made,
    such as where the launcher does more than launch, the tape is empty, and such calls stay with Python."""
    if torch.cuda.is_current_stream_capturing():  # a captured launch has buffers of its own
        return
    tape = active.tape = Tape()
    try:
        results = launch(*map(tape.stand_in, arguments))
        (plan,) = tape.plans
        hash(plan.variant())  # notes every number that is compiled into the kernel
        values = [*plan.grid, plan.apart, *plan.numbers]
        for x in results if isinstance(results, tuple) else (results,):
            values += *x.shape, *x.stride()
        places = tape.results(values)
        steps = array("q", [x for step in tape.steps for x in step])
    except Exception:
        extension.trace(0, b"", b"")
    else:
        extension.trace(tape.sizes, steps.tobytes(), places)
    finally:
        active.tape = None
