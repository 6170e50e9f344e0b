"""For every rule the linter reports the bad example and not the good one, and in torch only the bad one fails."""

import contextlib
import io
import textwrap

import pytest
import torch

from safeops_lint.check import lint_source
from safeops_lint.rules import FAMILIES, RULES
from tests.lint.examples import EXAMPLES

HEADER = "import torch\nimport torch.nn.functional as F\nimport safeops\n\n\n"
NAN, INF = float("nan"), float("inf")


def script(text):
    return HEADER + textwrap.dedent(text).lstrip("\n")


def function(text):
    """Runs an example's source and returns the last function that it defines."""
    scope = {}
    exec(compile(script(text), "<example>", "exec"), scope)
    return [x for x in scope.values() if hasattr(x, "__code__")][-1]


HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}  # these ops wait for a GPU


def synchronises(fn, *args):
    """Returns True if fn runs an op that reads a value, or a size that depends on values, back to the host."""
    with torch.autograd.profiler.profile() as profile, contextlib.redirect_stdout(io.StringIO()):
        fn(*args)
    return bool(HOST & {event.name for event in profile.function_events})


def gradient(fn, *args):
    """Returns the gradient to the first argument. Asserts that the value is finite."""
    x = args[0].clone().requires_grad_()
    value = fn(x, *args[1:])
    value.sum().backward()
    assert value.isfinite().all()
    return x.grad


def half(*values):
    return torch.tensor(values, dtype=torch.float16)


X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, -1.0, 1.0])
MASK = torch.tensor([True, False, True])


def so101(bad, good):
    assert synchronises(bad, X, Y) and not synchronises(good, X, Y)
    assert bad(X, -Y.abs()).isnan() and good(X, -Y.abs()) == 0  # the mask keeps nothing
    assert bad(X, Y) == good(X, Y) == 2


def so102(bad, good):
    assert synchronises(bad, X, Y, X) and not synchronises(good, X, Y, X)
    assert bad(X, Y, X) == good(X, Y, X)


def so103(bad, good):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(bad, 3 * X, X)
    assert gradient(good, 3 * X, X)[2] == 0 and gradient(good, 3 * X, X)[0] != 0


def so104(bad, good):
    assert synchronises(bad, X, Y) and not synchronises(good, X, Y)
    torch.testing.assert_close(bad(X, Y), good(X, Y))


def so105(bad, good):
    target = torch.tensor([0.0, INF, 1.0])
    assert bad(X, target).isnan() and good(X, target) == 1.5


def so201(bad, good):
    assert bad(half(300, 300), half(0, 0)) == INF and good(half(300, 300), half(0, 0)) == 90000


def so202(bad, good):
    assert bad(X, ~MASK & MASK).isnan() and good(X, ~MASK & MASK) == 0
    assert bad(X, MASK) == good(X, MASK) == 2


def so204(bad, good):
    assert gradient(bad, X, X).isnan().all() and (gradient(good, X, X) == 0).all()


def so205(bad, good):
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    assert gradient(bad, x)[0].isnan().all() and (gradient(good, x)[0] == 0).all()
    assert bad(x) == good(x) == 2.5


def so206(bad, good):
    p = half(0, 1)
    assert bad(p) == INF and good(p).isfinite()


def so207(bad, good):
    scores, hidden = torch.zeros(2, 3), torch.tensor([[True, True, True], [False, True, False]])
    assert bad(scores, hidden)[0].isnan().all() and (good(scores, hidden)[0] == 0).all()
    assert (bad(scores, hidden)[1] == good(scores, hidden)[1]).all()
    with pytest.raises(RuntimeError, match="overflow"):
        scores.half().masked_fill(hidden, -1e9)


def so208(bad, good):
    b = torch.tensor([0.0, 2.0])
    assert bad(X[:2], b).isfinite() and gradient(lambda b: bad(X[:2], b), b)[0].isnan()
    assert gradient(lambda b: good(X[:2], b), b)[0] == 0 and good(X[:2], b) == bad(X[:2], b)


def so210(bad, good):
    p = torch.ones(1, 1, 300, 300, dtype=torch.float16)
    assert not bad(p, p) < 0.5 and good(p, p) < 1e-3
    x = p[..., :100, :100]
    assert bad(x, x) == pytest.approx(0.5, abs=1e-3)  # with fewer pixels the sums do not overflow


def so211(bad, good):
    assert bad(half(12)) == INF and good(half(12)) == 12
    torch.testing.assert_close(bad(X), good(X))


def so212(bad, good):
    x = 4096 + torch.tensor([0.5, -0.5]).repeat(500)
    assert abs(bad(x) - 0.25) > 0.1 and good(x) == 0.25
    torch.testing.assert_close(bad(X), good(X))


def so301(bad, good):
    assert synchronises(bad, X, MASK) and not synchronises(good, X, MASK)
    assert bad(X, MASK) == good(X, MASK)


def so302(bad, good):
    assert synchronises(bad, X, Y) and not synchronises(good, X, Y)


def so303(bad, good):
    assert synchronises(bad, X, MASK) and not synchronises(good, X, MASK)
    assert bad(X, ~MASK & MASK) == good(X, ~MASK & MASK) == 0


def so401(bad, good):
    model, x, target = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.full((4, 1), 8.0)
    assert bad(model, x, target).dtype == torch.float16 and (bad(model, x, target) * 65536) == INF
    assert good(model, x, target).dtype == torch.float32 and (good(model, x, target) * 65536).isfinite()


class _CudaAutocast(contextlib.ContextDecorator):
    """Switches on torch.autocast("cuda"), which torch itself switches off on a machine without a GPU."""

    def __init__(self, device):
        assert device == "cuda"

    def __enter__(self):
        torch.set_autocast_enabled("cuda", True)
        self.guard = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA)
        self.guard.__enter__()

    def __exit__(self, *error):
        self.guard.__exit__(*error)
        torch.set_autocast_enabled("cuda", False)


def so402(bad, good):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", _CudaAutocast)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            bad(lambda x: x, X, MASK.float())
        assert good(lambda x: x, X, MASK.float()).isfinite()


def so406(bad, good):
    moved = []
    for fn in (bad, good):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        before = model.weight.detach().clone()
        fn(model, 100 * X, X[:1], torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu"))
        moved.append((model.weight - before).norm().item())
    assert moved[1] == pytest.approx(1, rel=1e-2) and moved[0] == pytest.approx(1 / 65536, rel=1e-1)


@pytest.mark.parametrize("code", RULES)
def test_example_goes_wrong_and_its_replacement_does_not(code):
    check = globals()[code.lower()]
    check(*map(function, EXAMPLES[code]))


@pytest.mark.parametrize("code", RULES)
def test_linter_tells_the_examples_apart(code):
    bad, good = map(script, EXAMPLES[code])
    every = list(RULES.values())
    assert code in {f.code for f in lint_source(bad, rules=every)}
    assert code not in {f.code for f in lint_source(good, rules=every)}
    assert lint_source(good) == [], "what is recommended must be clean"


@pytest.mark.parametrize("code", RULES)
def test_every_rule_says_what_why_and_what_instead(code):
    rule = RULES[code]
    assert code[:3] in FAMILIES and rule.name == rule.name.lower() and " " not in rule.name
    for text in (rule.what, rule.why, rule.fix):
        assert len(text) > 20, f"{code} lacks a text"
