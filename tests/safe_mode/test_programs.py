"""Random programs have equal results in safe mode and without it where torch's are finite. In safe mode the losses that
it promises to cure are finite."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import safeops
from tests.safe_mode.programs import ALL, COMPILED, CURES, PRELUDE, PURE, Program


def function(program):
    scope = {"torch": torch, "F": F}
    exec(program.source(), scope)
    return scope["program"]


def run(call, dtype, wide=None):
    """Runs a program. Returns (exception or None, which tensors require gradients, values). The values are the loss,
    the leaves' gradients, the tensors that the program made and their gradients, and the gradients that hooks saw.
    wide: the dtype to compute in, with leaves rounded to `dtype`."""
    torch.manual_seed(0)
    leaves = [torch.randn(4, 3, dtype=torch.float64).to(dtype).to(wide or dtype).requires_grad_() for _ in "ab"]
    m, seen = torch.rand(4, 3) > 0.4, []
    try:
        loss, made = call(*(x.clone() for x in leaves), m, lambda g: seen.append(g.clone()))
        needs = [loss.requires_grad, *(x.requires_grad for x in made)]
        values = [x.detach().clone() for x in made]
        loss.backward()
        kept = [x.grad if x.is_leaf or x.retains_grad else None for x in made]
        return None, needs, [loss.detach(), *(x.grad for x in leaves), *values, *kept, *seen]
    except Exception as error:
        return error, None, None


def difference(program, dtype, wrap=lambda call: call):
    """Describes in words how the mode changes a program's results; "" if it does not. Programs for which torch raises,
    and values that are not finite, are not compared."""
    call = function(program)
    error, needs, values = run(wrap(call), dtype)
    if error is not None:
        return ""
    with safeops.safe_mode():
        ours = run(wrap(call), dtype)
    if ours[0] is not None:
        return f"{type(ours[0]).__name__}: {ours[0]}"
    if ours[1] != needs or len(ours[2]) != len(values):
        return "other tensors require a gradient, or hooks have seen other gradients"
    rounding = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
    for i, (x, y) in enumerate(zip(ours[2], values)):
        if (x is None) != (y is None):
            return f"{i}: a gradient is {x} in place of {y}"
        if y is None or not y.isfinite().all():
            continue
        least = rounding[torch.bfloat16] if "autocast" in str(program) else rounding.get(dtype, 1e-4)
        tolerance = max(rounding.get(y.dtype, 0), least)
        if x.dtype != y.dtype and y.dtype not in rounding:
            return f"{i}: {x.dtype} in place of {y.dtype}"
        if not close(x, y, tolerance) and not (dtype in rounding and close(x, truth(call, dtype)[i], tolerance)):
            return f"{i}: {x} in place of {y}"
    return ""


def close(x, y, tolerance):
    return torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance * (1 + y.double().abs().max()))


def truth(call, dtype):
    """Returns the results in fp64, which the mode's may equal where torch's own results in half are wrong."""
    return run(call, dtype, torch.float64)[2]


DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16]


def compare(seeds, kinds=ALL, guards=True, dtypes=DTYPES, wrap=lambda call: call):
    wrong = []
    for seed in seeds:
        program, dtype = Program(seed, kinds, guards), dtypes[seed % len(dtypes)]
        if text := difference(program, dtype, wrap):
            wrong.append(f"seed {seed}, {dtype}: {text}\n{program}")
    assert not wrong, f"{len(wrong)} of {len(seeds)}, the shortest: {min(wrong, key=len)}"


def cured(seeds):
    count = 0
    for seed in seeds:
        program = Program(seed, (*PURE, CURES, CURES, CURES), False, PRELUDE)
        call, dtype = function(program), FP[seed % 2]
        error, _, torchs = run(call, dtype)
        with safeops.safe_mode() as report:
            ours, _, values = run(call, dtype)
        assert str(error) == str(ours), f"{error} {ours}\n{program}"
        if error is not None:  # the program has a view that torch refuses
            continue
        right, finite = (all(x is None or x.isfinite().all() for x in y[:3]) for y in (torchs, values))
        assert finite and (right or report.replacements), f"seed {seed}\n{program}"
        count += not right
    assert count > len(seeds) // 2, "torch's own is rarely finite"


FP = [torch.float32, torch.float64]


def checkpointed(call):
    return functools.partial(checkpoint, call, use_reentrant=False)


def compiled(call):
    """Compiles a program without Tensor.norm, for which Dynamo may raise in safe mode (torch 2.13, docs/limits.md)."""
    torch.compiler.reset()
    return torch.compile(call, backend="aot_eager")


@pytest.mark.filterwarnings("ignore")
class TestPrograms:
    def test_some(self):
        compare(range(200))

    def test_some_that_are_cured(self):
        cured(range(40))

    def test_some_checkpointed(self):
        compare(range(25), PURE, False, FP, checkpointed)

    @pytest.mark.slow
    def test_some_compiled(self):
        compare(range(5), COMPILED, False, FP, compiled)

    @pytest.mark.exhaustive
    @pytest.mark.slow
    def test_many(self):
        compare(range(5000))

    @pytest.mark.exhaustive
    @pytest.mark.slow
    def test_many_that_are_cured(self):
        cured(range(1000))

    @pytest.mark.exhaustive
    @pytest.mark.slow
    def test_many_checkpointed(self):
        compare(range(500), PURE, False, FP, checkpointed)

    @pytest.mark.exhaustive
    @pytest.mark.slow
    def test_many_compiled(self):
        compare(range(60), COMPILED, False, FP, compiled)
