"""torch.compile in safe mode gives one graph with the twins' values, and does not compile again at each entry."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.private_torch import counting_backend


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(scores, target, weight):
    p = scores.softmax(-1)
    p = p * (target > 0) + F.normalize(scores.nan_to_num(neginf=0.0)) * torch.where(target > 0, p / target, 0.0)
    huber = F.huber_loss(p, target, "sum", 0.5, weight)
    return huber + F.mse_loss(p, target, weight=weight) + F.l1_loss(p, target, weight=weight) + p.half().sum()


SCORES, TARGET, WEIGHT = torch.randn(4, 5), torch.rand(4, 5), torch.rand(4, 5)
SCORES[1] = -torch.inf


def test_one_graph():
    backend = counting_backend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with safeops.safe_mode() as eager:
        expected = step(SCORES, TARGET, WEIGHT)
    reports = []
    for _ in range(3):
        with safeops.safe_mode() as report:
            torch.testing.assert_close(compiled(SCORES, TARGET, WEIGHT), expected)
        reports.append(report)
        assert compiled(SCORES, TARGET, WEIGHT).isnan(), "outside it is torch's"
    assert backend.frame_count == 2
    noted = [{(x.function, x.twin, x.file, x.line) for x in report.replacements} for report in (eager, reports[0])]
    names = {"softmax", "normalize", "huber_loss", "mse_loss", "l1_loss", "sum"}
    assert noted[0] == noted[1] and {x.function for x in reports[0].replacements} == names
    assert {x.count for x in reports[0].replacements} == {1}
    assert not reports[1].replacements, "which was compiled before"
    assert all(x.line > inspect.getsourcelines(step)[1] for x in reports[0].replacements)


@pytest.mark.slow
def test_gradients_by_inductor():
    def loss(x):
        return F.cross_entropy(x, torch.full((3,), -100)) + x.softmax(-1).square().sum()

    x = torch.stack([torch.randn(4), torch.full((4,), -torch.inf), torch.randn(4)]).requires_grad_()
    with safeops.safe_mode():
        torch.compile(loss, fullgraph=True)(x).backward()
        (expected,) = torch.autograd.grad(loss(x), x)
    assert x.grad.isfinite().all()
    torch.testing.assert_close(x.grad, expected)


def test_pairs_of_calls_are_torchs():
    def pairs(x, b):
        return torch.where(b > 0, x / b, 0.0).sum() + (x * (b > 0)).sum()

    x, b = torch.randn(4), torch.tensor([1.0, 0.0, 2.0, 3.0])
    with safeops.safe_mode() as report:
        result = torch.compile(pairs, fullgraph=True, backend="aot_eager")(x, b)
    assert torch.allclose(result, pairs(x, b)) and not report.replacements


def test_what_a_twin_refuses_is_torchs():
    def refused(x):
        return F.l1_loss(x, torch.arange(4)) + F.mse_loss(x, x * 2, reduce=True)

    x = torch.randn(4)
    with safeops.safe_mode() as report:
        result = torch.compile(refused, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(result, refused(x)) and not report.replacements


def test_what_safeops_computes_with_is_its_own():
    def ours(x):
        return safeops.masked_softmax(x).sum() + safeops.cross_entropy(x, torch.zeros(4, dtype=torch.int64))

    with safeops.safe_mode() as report:
        result = torch.compile(ours, fullgraph=True, backend="aot_eager")(TARGET)
    assert torch.allclose(result, ours(TARGET)) and not report.replacements


def entered(x):
    with safeops.safe_mode():
        return x.softmax(-1)


def test_entered_while_tracing_is_refused():
    with pytest.raises(Exception, match="safe_mode: entered while torch.compile"):
        torch.compile(entered, fullgraph=True, backend="eager")(SCORES)
    with pytest.raises(RuntimeError, match="safe_mode: entered while torch.compile"):
        torch.compile(safeops.safe_mode(lambda x: x.softmax(-1)), fullgraph=True, backend="eager")(SCORES)
    with pytest.raises(RuntimeError, match="safe_mode: entered while"):
        torch.jit.trace(entered, SCORES)

    class Entered(torch.nn.Module):
        def forward(self, x):
            return entered(x)

    with pytest.raises(RuntimeError, match="safe_mode: entered while"):
        torch.export.export(Entered(), (SCORES,))
    assert SCORES.softmax(-1)[1].isnan().all(), "nothing is left behind"


def test_with_graph_breaks_it_is_entered_between_the_graphs():
    result = torch.compile(entered, backend="eager")(SCORES)
    assert torch.equal(result[1], torch.zeros(5)) and SCORES.softmax(-1)[1].isnan().all()
