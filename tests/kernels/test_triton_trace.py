"""The stand-in for a tensor in a trace answers as the tensor does, and notes every answer that depends on sizes."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from safeops.kernels.engine.sized import Sized  # noqa: E402
from safeops.kernels.engine.tensors import broadcast_shape  # noqa: E402
from safeops.kernels.engine.trace import (  # noqa: E402
    AT_MOST,
    EQUAL,
    LESS,
    UNEQUAL,
    Symbol,
    Tape,
    active,
    number,
)

VIEWS = {
    "itself": lambda x: x,
    "a dimension first": lambda x: x.unsqueeze(0),
    "a dimension last": lambda x: x.unsqueeze(-1),
    "the last gone": lambda x: x.squeeze(x.dim() - 1) if x.dim() else x,
    "the last one first": lambda x: x.movedim(-1, 0) if x.dim() else x,
    "wider": lambda x: x.expand((3, *(5 if n == 1 else n for n in x.shape))),
    "new dimensions": lambda x: x[(None,) * 2 + (slice(None),) * x.dim() + (None,)],
    "one of many": lambda x: x[0] if x.dim() and x.shape[0] != 0 else x,
    "as empty": lambda x: torch.empty_like(x, dtype=torch.float64),
}


def tensors():
    chance = random.Random(5)
    for dims in range(5):
        for _ in range(12):
            x = torch.zeros([chance.choice([0, 1, 1, 2, 3, 4]) for _ in range(dims)])
            yield x
            yield x.permute(chance.sample(range(dims), dims))
            yield x[..., ::2] if dims else x
            yield x.unsqueeze(0).expand(2, *x.shape)
            yield x.unsqueeze(-1).expand(*x.shape, 3).permute(chance.sample(range(dims + 1), dims + 1))
            yield x.permute(chance.sample(range(dims), dims))[..., ::2] if dims else x


@pytest.mark.parametrize("name", VIEWS)
def test_it_answers_as_a_tensor_does(name):
    for x in tensors():
        expected, result = VIEWS[name](x), VIEWS[name](Tape().stand_in(x))
        assert tuple(map(number, result.shape)) == expected.shape, (x.shape, x.stride())
        assert tuple(map(number, result.stride())) == expected.stride(), (x.shape, x.stride())
        assert result.is_contiguous() == expected.is_contiguous()
        assert result.dim() == expected.dim() and number(result.numel()) == expected.numel()
        assert result.dtype == expected.dtype and result.device == expected.device
        assert result.element_size() == expected.element_size()


def test_it_begins_where_the_tensor_does():
    assert Tape().stand_in(torch.zeros(64)[1:]).data_ptr() % 16 == torch.zeros(64)[1:].data_ptr() % 16 == 4


def test_an_answer_is_noted():
    tape = Tape()
    a, b = tape.stand_in([12, 5])
    assert (a > b) and not (a <= b) and a != b and not (a == 3) and bool(a) and a % 4 == 0
    assert max(a, 1) is a and (-(-a // b)).value == 3 and (14 - a).value == 2 and (a - 0) is a and (1 * a) is a
    assert [1, 2, 3][Symbol(tape, b.place, 2)] == 3 and b.bit_length() == 3 and hash(a) == hash(12)
    noted = {code for code, *_ in tape.steps}
    assert {EQUAL, UNEQUAL, LESS, AT_MOST} <= noted
    (place,) = (at for step, at in tape.steps.items() if step[:2] == (0, 12))
    assert (EQUAL, a.place, place) in tape.steps  # hash(a) shows the number 12: noted as a == 12
    for other in (0.5, "5", None):
        with pytest.raises(TypeError):
            a + other


@pytest.mark.parametrize("code, compare", [("<", int.__lt__), ("<=", int.__le__), (">", int.__gt__), (">=", int.__ge__),
                                           ("==", int.__eq__), ("!=", int.__ne__)])  # fmt: skip
def test_what_is_noted_holds_where_the_answer_is_the_same(code, compare):
    holds = {EQUAL: int.__eq__, UNEQUAL: int.__ne__, LESS: int.__lt__, AT_MOST: int.__le__}
    for pair in itertools.product(range(-1, 2), repeat=2):
        tape = Tape()
        a, b = tape.stand_in(list(pair))
        answer = eval(f"a {code} b", {"a": a, "b": b})
        ((step, x, y),) = tape.steps
        for other in itertools.product(range(-1, 2), repeat=2):
            assert holds[step](other[x], other[y]) == (compare(*other) == answer), (pair, other)


def test_broadcast_shapes():
    shapes = [shape for dims in range(4) for shape in itertools.product((0, 1, 2, 3), repeat=dims)]
    for a, b in itertools.product(shapes, repeat=2):
        try:
            expected = tuple(torch.broadcast_shapes(a, b))
        except RuntimeError:
            with pytest.raises(ValueError, match="do not broadcast"):
                broadcast_shape(a, b)
        else:
            assert broadcast_shape(a, b) == expected, (a, b)


def test_no_trace_is_left_open():
    assert active.tape is None and Sized.contiguous((2, 3), torch.float32, torch.device("cpu")).stride() == (3, 1)
