"""A function with a name of torch's computes what torch's does: torch's OpInfo samples, in four dtypes.

The truth is torch's function in fp64. Values and gradients are compared where the truth is finite, second derivatives
in fp64; torch's error inputs must be refused by name. docs/twins.md lists all other differences.
"""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import safeops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
PLAIN = {info.name.rpartition(".")[2]: info for info in reversed(op_db) if not info.name.startswith("masked.")}
TWINS = {name: info for name, info in PLAIN.items() if name in safeops.__all__}
# Losses with a kink, where half values can lie exactly: our slope is 0 there, torch's that of the steep side.
KNEES = {"hinge_embedding_loss", "margin_ranking_loss"}
DEPRECATED = {"size_average", "reduce"}


def tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    items = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
    return [t for item in items for t in tensors(item)]


def widened(x):
    """Returns a copy of the nested arguments in fp64; its leaves require gradients where the original's do."""
    if isinstance(x, torch.Tensor):
        return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
    if isinstance(x, dict):
        return {key: widened(item) for key, item in x.items()}
    return type(x)(map(widened, x)) if isinstance(x, (tuple, list)) else x


def derivatives(function, call, second=False):
    """Returns (value, gradients, second derivatives) of a call. Upstream gradients are the same for every dtype."""
    args, kwargs = call
    leaves = [x for x in tensors(call) if x.is_floating_point() and x.requires_grad]
    value = function(*args, **kwargs)
    if not leaves or not value.requires_grad:
        return value.detach(), [], []
    g = torch.Generator().manual_seed(0)
    upstream = torch.randn(value.shape, dtype=torch.float64, generator=g).to(value.dtype)
    grads = torch.autograd.grad(value, leaves, upstream, allow_unused=True, create_graph=second)
    again = []
    live = [x for x in grads if x is not None and x.requires_grad]
    if second and live:
        upstream = [torch.randn(x.shape, dtype=torch.float64, generator=g).to(x.dtype) for x in live]
        again = torch.autograd.grad(live, leaves, upstream, allow_unused=True)
    return value.detach(), *([None if x is None else x.detach() for x in xs] for xs in (grads, again))


def compare(what, got, want, tolerance):
    """Asserts that got equals want where want is finite; None counts as a gradient of 0."""
    if got is None or want is None:
        other = want if got is None else got
        assert other is None or not torch.where(other.isfinite(), other, 0).any(), what
        return
    assert got.shape == want.shape, (what, got.shape, want.shape)
    if not got.is_floating_point():
        assert torch.equal(got, want), what
        return
    got, want = got.double(), want.double()
    finite = want.isfinite()
    largest = max(1.0, float(want[finite].abs().max())) if finite.any() else 1.0
    error = torch.where(finite, (got - want).abs(), 0)
    assert (error <= tolerance * (want.abs().nan_to_num() + largest)).all(), (what, float(error.max()), largest)


def samples(name, dtype):
    info = TWINS[name]
    for sample in info.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point):
        bias = sample.kwargs.get("linear_bias")
        rounded = bias is not None and dtype.itemsize == 2 and bias.abs().max() > 1 / TOLERANCE[dtype]
        if not DEPRECATED & sample.kwargs.keys() and not rounded:  # the bias rounds off the logits' digits
            yield info.op, ((sample.input, *sample.args), sample.kwargs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", sorted(TWINS))
@pytest.mark.filterwarnings("ignore")
def test_torchs_calls_have_torchs_values(name, dtype):
    torch.manual_seed(0)  # fixes the samples
    ours, count = getattr(safeops, name), 0
    for theirs, call in samples(name, dtype):
        second = dtype == torch.float64
        wide = widened(call)
        try:
            want = derivatives(theirs, wide, second)
        except RuntimeError as error:
            if "derivative for" not in str(error) and "not implemented" not in str(error):
                raise
            second, want = False, derivatives(theirs, widened(call))  # torch lacks the second derivative
        got = derivatives(ours, call, second)
        shown = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in call[0]], call[1]
        compare((name, shown, "value"), got[0], want[0], TOLERANCE[dtype])
        if name in KNEES and dtype.itemsize == 2:
            got, want = got[:1], want[:1]
        for what, xs, ys in zip(("gradient", "second derivative"), got[1:], want[1:]):
            for i, (x, y) in enumerate(zip(xs, ys)):
                compare((name, shown, f"{what} {i}"), x, y, TOLERANCE[dtype])
        count += 1
    assert count, "no samples"


@pytest.mark.parametrize("name", sorted(TWINS))
@pytest.mark.filterwarnings("ignore")
def test_what_torch_refuses_is_refused(name):
    info = TWINS[name]
    for case in info.error_inputs("cpu") if info.error_inputs_func else ():
        sample = case.sample_input
        with pytest.raises((TypeError, ValueError, IndexError), match=f"^{name}"):
            getattr(safeops, name)(sample.input, *sample.args, **sample.kwargs)


def test_which_functions_of_torch_have_a_twin():
    """Every function of ours that has the name of a function of torch must be compared in this file."""
    theirs = {name for name in safeops.__all__ if hasattr(torch.nn.functional, name) or hasattr(torch, name)}
    assert theirs - {"nn", "distributed"} == set(TWINS)


def names_of(function):
    """Returns the argument names of a function of torch, from its signature or, for a builtin, from its schemas."""
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        packet = getattr(torch.ops.aten, function.__name__)
        schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
        return {x.name for schema in schemas for x in schema.arguments} - {"self"}


@pytest.mark.parametrize("name", [*sorted(TWINS), "clip_grad_norm_"])
def test_an_argument_of_torchs_that_is_refused_is_in_the_table(name):
    where = next(x for x in (torch.nn.functional, torch, torch.nn.utils) if hasattr(x, name))
    missing = names_of(getattr(where, name)) - inspect.signature(getattr(safeops, name)).parameters.keys()
    page = (Path(__file__).parents[2] / "docs" / "twins.md").read_text()
    rows = [line.split(" | ")[1] for line in page.splitlines() if re.match(rf"\| (all|.*`{name}`.*) \| ", line)]
    assert missing <= set(re.findall(r"`(\w+)=?", " ".join(rows)))
