"""safe_mode as a mode: the calls it does not replace, how it is entered and left, and its report."""

import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._device import DeviceContext

import safeops

HIDDEN = torch.full((1, 2), -torch.inf)


def is_safe():
    return not HIDDEN.softmax(1).isnan().any()


def test_the_rest_is_torchs_bit_by_bit():
    x = torch.randn(4, 3, 8, requires_grad=True)
    mask = x.detach() > 0

    def calls():
        torch.manual_seed(1)
        half = x.detach().half()
        a = F.gelu(F.layer_norm(x @ x.mT @ x, (8,))), x / 3, x * 2, x[0], x[:, [0, 2]], x.sum(), x.mean(1), x.norm()
        b = torch.where(mask, x, 0), x.masked_fill(mask, 1), F.dropout(x), half.sum(1), x.pow(2).mean(), x.double()
        c = F.scaled_dot_product_attention(x, x, x), mask.sum(), x.std(), torch.exp(x).amax(), x.detach().long().sum()
        out = (*a, *b, *c)
        grads = torch.autograd.grad(sum(y.sum() for y in out if y.requires_grad), x)
        return *out, *grads

    expected = calls()
    with safeops.safe_mode() as report:
        result = calls()
    assert not report.replacements
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_modes_nest():
    with safeops.safe_mode() as outer:
        is_safe()
        with safeops.safe_mode() as inner:
            assert is_safe()
        assert is_safe()
    assert not is_safe()
    assert [sum(x.count for x in report.replacements) for report in (outer, inner)] == [3, 1]


def test_a_context_can_be_entered_again():
    region = safeops.safe_mode()
    for _ in range(2):
        with region as report, region:
            assert is_safe()
    assert not is_safe() and [x.count for x in report.replacements] == [2]


def test_an_exception_leaves_nothing():
    clip = torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents
    with pytest.raises(ZeroDivisionError), safeops.safe_mode():
        assert torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents is not clip
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), safeops.safe_mode():
        F.mse_loss(torch.ones(2), torch.ones(3))
    assert not is_safe() and torch.nn.utils.clip_grad_norm_.__closure__[0].cell_contents is clip
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_mode_is_of_its_thread():
    results, begun, ended = {}, threading.Barrier(3), threading.Barrier(3)

    @safeops.safe_mode
    def inside():
        begun.wait()
        results[threading.get_ident()] = [is_safe() for _ in range(200)]
        ended.wait()

    threads = [threading.Thread(target=inside) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    assert not is_safe(), "two other threads are in the mode"
    ended.wait()
    for thread in threads:
        thread.join()
    assert list(map(all, results.values())) == [True, True]
    assert [x.count for x in inside.report.replacements] == [400]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_a_thread", [False, True])
def test_what_is_checkpointed_is_computed_alike_again(reentrant, in_a_thread):
    from torch.utils.checkpoint import checkpoint  # as scripts import it

    linear, mask = torch.nn.Linear(4, 4), torch.tensor([True, False, True, True])

    def function(x, m):
        y = linear(x).masked_fill(~mask, -torch.inf)
        y = torch.cat([y, torch.full((1, 4), -torch.inf)]).softmax(1)  # the last row is all -inf
        return (y * m).sum() + y.half().sum() + torch.where(mask, y / (y + 1), 0.0).sum() + y[:, mask].sum()

    def run(wrap):
        x = torch.arange(8.0).reshape(2, 4).requires_grad_()
        loss = wrap(x, mask.float()) * 2
        if in_a_thread:  # as on a GPU, where backward runs in another thread
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        return loss.detach(), x.grad

    with safeops.safe_mode() as plain:
        expected = run(function)
    with safeops.safe_mode() as report:
        result = run(lambda *args: checkpoint(function, *args, use_reentrant=reentrant))
        assert is_safe()
    assert expected[1].isfinite().all() and result[1] is not None
    for a, b in zip(result, expected):
        torch.testing.assert_close(a, b)
    counts = [[x.count for x in r.replacements if x.function == "softmax"] for r in (plain, report)]
    assert counts == [[1], [1, 1]] and not is_safe()  # the second count is is_safe's; recomputing adds none


def test_clipping_is_of_its_thread():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    norms = []

    def clip():
        weight.grad = torch.full((4,), 60000.0, dtype=torch.float16)
        norms.append(torch.nn.utils.clip_grad_norm_([weight], 1.0).isfinite().item())

    with safeops.safe_mode():
        thread = threading.Thread(target=clip)
        thread.start()
        thread.join()
        clip()
    assert norms == [False, True]


@pytest.mark.parametrize("decorator", [safeops.safe_mode, safeops.safe_mode()])
def test_the_decorator(decorator):
    def step(x, *, dim=1):
        """A step."""
        return x.softmax(dim)

    safe = decorator(step)
    assert torch.equal(safe(HIDDEN, dim=-1), torch.zeros(1, 2)) and not is_safe()
    assert inspect.signature(safe) == inspect.signature(step) and safe.__doc__ == "A step."
    assert safe.report.replacements[-1].function == "softmax"


def generator():
    yield


async def coroutine():
    pass


class Task:
    async def __call__(self):
        pass


@pytest.mark.parametrize("bad", [3, dict, torch.nn.Linear(2, 2), generator, coroutine, Task()])
def test_what_is_no_function_is_refused(bad):
    with pytest.raises(TypeError, match="^safe_mode: function must"):
        safeops.safe_mode(bad)


def test_the_report_names_the_line():
    x, y = torch.randn(4), torch.randn(4)
    with safeops.safe_mode() as report:
        here = inspect.currentframe().f_lineno
        for _ in range(3):
            F.mse_loss(x, y)
        torch.nn.L1Loss()(x, y)
        first = str(report)  # a report can be read before the mode ends
    assert [tuple(x) for x in report.replacements] == [
        ("mse_loss", "mse_loss", __file__, here + 2, 3),
        ("l1_loss", "l1_loss", __file__, here + 3, 1),
    ]
    assert str(report) == first
    lines = first.splitlines()
    assert lines[0] == "safe_mode: 4 calls replaced in 2 lines"
    assert lines[2].split() == ["3", "mse_loss", "mse_loss", f"{__file__}:{here + 2}"]


def test_an_empty_report():
    with safeops.safe_mode() as report:
        torch.ones(2).add(1)
    assert str(report) == "safe_mode: nothing was replaced"


def test_what_safeops_computes_with_is_its_own():
    """safeops functions call torch's softmax, sums and divisions themselves; these calls must not be replaced."""
    x = torch.randn(3, 4, dtype=torch.float16)
    calls = [
        lambda: torch.func.vmap(safeops.masked_softmax)(x),
        lambda: safeops.cross_entropy(x.double(), torch.tensor([0, 1, 2])),
        lambda: torch.func.grad(lambda x: safeops.masked_sum(x * 1))(x),
        lambda: safeops.apply_where(x > 0, x, torch.log, fill_value=0),
    ]
    expected = [call() for call in calls]
    with safeops.safe_mode() as report:
        assert all(torch.equal(call(), y) for call, y in zip(calls, expected))
    assert not report.replacements


def test_other_modes_work_with_it():
    with safeops.safe_mode() as report, safeops.debug.audit() as audit, DeviceContext("cpu"):
        assert is_safe() and torch.zeros(3).sum() == 0
        (torch.ones(2, dtype=torch.float16) * 6e4).sum()
    assert [x.function for x in report.replacements] == ["softmax", "sum"]
    assert "half-overflow" not in {finding.code for finding in audit.findings}
    with safeops.debug.audit(), safeops.safe_mode():
        assert is_safe()


def test_transforms():
    x = torch.stack([HIDDEN[0], torch.tensor([1.0, 2.0])])
    with safeops.safe_mode():
        rows = torch.func.vmap(lambda row: row.softmax(0))(x)
        slope = torch.func.grad(lambda x: F.mse_loss(x.softmax(1), torch.zeros(2, 2)))(x)
    assert rows[0].eq(0).all() and torch.allclose(rows[1], x[1].softmax(0)) and slope.isfinite().all()


class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise MemoryError


def test_an_optimizer_runs_out_of_the_mode():
    """The mode is off in an optimizer's step, whose thousands of calls need no replacement, but on in its closure,
    which computes the loss."""
    weight = torch.nn.Parameter(torch.zeros(2))
    seen = []

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(is_safe())
            if closure is not None:
                closure()

    zero_grad = torch.optim.Optimizer.zero_grad
    optimizer = Optimizer([weight])
    with safeops.safe_mode():
        for closure in (None, lambda: seen.append(is_safe())):
            optimizer.step(closure)
            assert is_safe()
        weight.grad = torch.ones(2)
        optimizer.zero_grad()
        assert weight.grad is None and is_safe()
        with safeops.debug.audit():  # another mode, entered later
            optimizer.step()
        assert is_safe()
    optimizer.step()
    assert seen == [False, True, True, True, False] and torch.optim.Optimizer.zero_grad is zero_grad


def test_a_step_that_raises_leaves_the_mode_as_it_was():
    optimizer = Failing([torch.nn.Parameter(torch.zeros(2))])
    with safeops.safe_mode():
        for _ in range(2):
            with pytest.raises(MemoryError):
                optimizer.step()
            assert is_safe()
    with safeops.safe_mode():
        with pytest.raises(MemoryError) as kept:
            try:
                optimizer.step()
            except MemoryError:
                assert is_safe(), "in the except block"
                raise
        assert is_safe() and kept.value is not None, "while the exception lives"
    with pytest.raises(MemoryError), safeops.safe_mode():
        optimizer.step()
    assert not is_safe() and torch.overrides._get_current_function_mode_stack() == []


def test_hooks_of_a_step_are_in_the_mode():
    """Hooks of optimizer.step run in the mode, and may keep their arguments."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, kept = torch.optim.SGD([weight]), []
    optimizer.register_step_pre_hook(lambda *args: kept.append((args, is_safe())))
    optimizer.register_step_post_hook(lambda *args: kept.append((args, is_safe())))
    step = torch.optim.SGD.step.__closure__[0].cell_contents
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)  # a scheduler wraps the instance's step
    with safeops.safe_mode():
        for _ in range(2):
            optimizer.step()
            scheduler.step()
        assert is_safe() and torch.optim.SGD.step.__closure__[0].cell_contents is not step
    assert [safe for _, safe in kept] == [True] * 4
    assert torch.optim.SGD.step.__closure__[0].cell_contents is step
