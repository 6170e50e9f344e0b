"""Numbers that a trace knows as symbols: sizes in an exported program, options that differ from call to call."""

import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import safeops
from tests.callers.calls import CALLS, NUMBERS, call, tensors
from tests.contract.common import REPEATS, unless_first
from tests.ops.record import firsts

KEYS = [*NUMBERS, "capacity"]
# Options that a trace makes constants: p chooses between two formulas; poisson's eps is unused with log_input.
NO_NUMBERS = [("multi_margin_loss", "p"), ("poisson_nll_loss", "eps")]
PLACES = [
    (name, key) for name in CALLS for key in KEYS if key in CALLS[name] and name not in ("magnitude", "safe_atan2")
]
PLACES = [place for place in PLACES if place not in NO_NUMBERS]
VALUES = (0.25, 0.5, 1.5, 2.5, 3.25)


def outcome(function, name, keys, value):
    """Returns the call's values, and the gradients of all floating operands but those at `keys`."""
    operands = {k: x.clone() for k, x in tensors(name).items() if k not in keys}
    leaves = [x.requires_grad_() for x in operands.values() if x.is_floating_point()]
    results = function(value, operands)
    results = results if isinstance(results, tuple) else (results,)
    return [*results, *torch.autograd.grad(results[0].sum(), leaves, allow_unused=True)]


def assert_same(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5, equal_nan=True)  # kernel and composite round differently


def test_numbers_that_fp32_would_change_stay_double():
    """Compiled calls read doubles, as eager ones do: 2^24 + 1 is odd, 1e39 is not inf, and 1e-46 is not 0."""
    x = torch.tensor([-1.0, 2.0])
    for f, values in (
        (safeops.safe_pow, (3.0, 16777217.0, 1e300)),
        (safeops.xlogy, (3.0, 1e39, 1e-46)),
        (lambda x, n: safeops.safe_div(x * 1e30, n, eps=0.0), (3.0, 1e39, 1e-46)),
    ):
        compiled = torch.compile(f, dynamic=True, backend="aot_eager", fullgraph=True)
        for value in values:
            torch.testing.assert_close(compiled(x, value), f(x, value))


def test_a_changing_number_keeps_its_sign_of_zero():
    x, mask = torch.ones(3), torch.tensor([True, False, True])
    compiled = torch.compile(lambda x, n: safeops.masked_fill(x, mask, n), dynamic=True, backend="aot_eager")
    assert [compiled(x, n).signbit().tolist() for n in (0.5, -0.0)] == [[False] * 3, [True, False, True]]


# {name: a number computed from the size n}; KINDS below says which of them fit an argument.
OF_SIZE = {"n": lambda n: n, "n/4": lambda n: 0.25 * n, "1/n": lambda n: 1 / n, "-n/2": lambda n: -0.5 * n}
POSITIVE = ["n", "n/4", "1/n"]
# ord: not 1/n, whose sign, which chooses the formula, torch cannot prove. win_sigma: not small, or a window would weigh
# one pixel alone, with noise as variance.
KINDS = {"capacity": ["n"], "ord": ["n", "n/4", "-n/2"], "p": ["n", "n/4"], "win_sigma": ["n", "n/4"]}
POSITIVES = ("eps", "delta", "beta", "gamma", "margin", "smooth_nr", "smooth_dr", "softcap", "temperature", "z_loss")
KINDS |= dict.fromkeys((*POSITIVES, "data_range", "k1", "k2", "denominator"), POSITIVE)
SHARES = ("alpha", "label_smoothing", "quantile", "variance_focus")  # options between 0 and 1
SHARES += ("js_div_with_logits", "beta"), ("linear_js_div", "beta")
KINDS |= dict.fromkeys(SHARES, ["1/n"])
SIZES = [
    (name, key, kind)
    for name, key in PLACES
    for kind in list(KINDS.get((name, key)) or KINDS.get(key, OF_SIZE))[: None if name in firsts() else 1]
]
# Losses tested without options. (Not ms_ssim: its defaults need larger images than its call has.)
PLAIN = [size for size in SIZES if "target" in CALLS[size[0]] and size[1] != "denominator" and size[0] != "ms_ssim"]

CASES = [*((*size, False) for size in SIZES), *((*size, True) for size in PLAIN)]
LEAST = {(name, key): kind for name, key, kind in reversed(SIZES)}  # the one number that `make test-slow` tests


def size_case(name, key, kind, plain):
    marks = () if name in firsts() and kind == LEAST[name, key] else REPEATS
    return pytest.param(name, key, kind, plain, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("name, key, kind, plain", [size_case(*case) for case in CASES])
def test_a_size_as_number_exports(name, key, kind, plain, monkeypatch):
    """A program in which an option is a size must export. plain: with required arguments only, for which a loss has a
    kernel call of its own."""

    class Call(torch.nn.Module):
        def forward(self, sized, operands):
            return call(name, **{**operands, key: OF_SIZE[kind](sized.shape[0])})

    def run(module):
        return lambda size, operands: module(torch.zeros(size), operands)

    if plain:
        parameters = inspect.signature(getattr(safeops, name)).parameters
        wanted = [k for k, x in parameters.items() if x.default is x.empty or k in (key, "target", "target_weight")]
        monkeypatch.setitem(CALLS, name, {k: x for k, x in CALLS[name].items() if k in wanted})
    operands = {k: x for k, x in tensors(name).items() if k != key}
    shapes = ({0: torch.export.Dim("n")}, dict.fromkeys(operands))
    program = torch.export.export(Call(), (torch.zeros(6), operands), dynamic_shapes=shapes, strict=False)
    for size in (6, 3, 17):
        assert_same(outcome(run(program.module()), name, [key], size), outcome(run(Call()), name, [key], size))


# {op: options that change}. (Not ms_ssim: its graph is five times that of ssim.)
CHANGING = {name: [key for other, key in PLACES if other == name] for name, _ in PLACES if name != "ms_ssim"}
SETS = dict.fromkeys(SHARES, (0.125, 0.25, 0.5, 0.75, 0.875)) | {
    "capacity": (20, 12, 31, 17, 23),
    "fill_value": (*VALUES[:4], 0.0),
    "value": (*VALUES[:4], 0.0),
    "label_smoothing": (0.25, 0.5, 0.75, 0.125, 1.0),
    "win_sigma": (0.75, *VALUES[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", map(unless_first, CHANGING))
def test_numbers_that_change_are_compiled_once(name):
    """All options of a call change at once: an option that became a constant would compile the call anew each time. The
    backend is aot_eager because AOTAutograd, below Dynamo, is where options become constants."""
    torch._dynamo.reset()
    counter, keys = CompileCounterWithBackend("aot_eager"), CHANGING[name]

    def plain(values, operands):
        return call(name, **operands, **dict(zip(keys, values)))

    compiled = torch.compile(plain, backend=counter, dynamic=True, fullgraph=True)
    for values in zip(*(SETS.get((name, key)) or SETS.get(key, VALUES) for key in keys)):
        assert_same(outcome(compiled, name, keys, values), outcome(plain, name, keys, values))
    assert counter.frame_count <= 2
