"""trace's findings at the end of a step name the step, the gradient or the optimizer that is at fault."""

import warnings

import pytest
import torch

import safeops
from safeops.debug import NonFiniteError, trace
from tests.debug.tracing import leaf, traced


def test_it_raises_at_the_end_of_the_step_and_names_the_step():
    parameter = torch.nn.Parameter(torch.tensor([4.0]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = 0
    with pytest.raises(NonFiniteError, match=r"step 3: .*log") as caught, trace() as tracer:
        for value in (1.0, 1.0, 0.0, 1.0):
            steps += 1
            optimizer.zero_grad()
            (parameter * torch.log(torch.tensor(value))).sum().backward()
            optimizer.step()
    assert steps == 3 and tracer.steps == 3 and caught.value.report is tracer.report
    assert parameter.isfinite().all(), "the update came first"
    assert NonFiniteError.__module__ == "safeops.debug"


def test_it_warns_or_only_records():
    with pytest.warns(UserWarning, match="log has no finite value"), trace(action="warn"):
        torch.log(torch.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traced(lambda: torch.log(torch.zeros(1))).report


def test_check_ends_a_step():
    with trace(action="record") as tracer:
        torch.log(torch.zeros(1))
        assert tracer.check().op == "log"
        torch.log(torch.ones(1))
        assert tracer.check() is None
        assert tracer.check() is None
    assert tracer.steps == 2 and len(tracer.reports) == 1


def test_an_exception_keeps_its_own_message():
    with pytest.warns(UserWarning, match="log has no finite value"), pytest.raises(KeyError, match="mine"), trace():
        torch.log(torch.zeros(1))
        raise KeyError("mine")


def test_nothing_stays_behind():
    import gc

    before = gc.get_freeze_count()
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    count = len(hooks)
    for _ in range(2):
        with pytest.raises(NonFiniteError), trace():
            torch.log(torch.zeros(1))
    assert len(hooks) == count and gc.get_freeze_count() == before
    assert torch.log(torch.zeros(1)).isinf()
    with trace() as tracer:
        pass
    with pytest.raises(RuntimeError, match="outside the context"):
        tracer.check()


def test_bad_arguments():
    with pytest.raises(TypeError, match="trace: model must be a torch.nn.Module or None, got function"):
        trace(lambda x: x)
    with pytest.raises(ValueError, match="trace: action must be one of .*, got 'stop'"):
        trace(action="stop")
    with pytest.raises(ValueError, match="trace: last must be an int of at least 0, got -1"):
        trace(last=-1)


def test_no_frames_are_shown_where_none_are_wanted():
    with trace(action="record", last=0) as tracer:
        torch.log(torch.ones(2) * 0)
    assert "what ran before" not in str(tracer.report)


def test_what_runs_behind_the_last_step_is_none():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def run():
        for _ in range(3):
            (parameter * 2).sum().backward()
            optimizer.step()
        return parameter.detach().mean() + 1

    assert traced(run).steps == 3


@pytest.mark.parametrize("watch", [lambda: trace(), lambda: safeops.debug.no_sync(cpu=True)])
def test_a_tool_does_not_hide_that_an_optimizer_wrote(watch):
    weight = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)
    with watch():
        loss = weight.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_transfer_a_step(monkeypatch):
    from safeops.debug.trace import record as _record

    reads = []
    table = _record.Recorder.table
    monkeypatch.setattr(_record.Recorder, "table", lambda self: reads.append(1) or table(self))
    with trace() as tracer:
        for _ in range(3):
            (leaf(1.0, 2.0) * 2).sum().backward()
            tracer.check()
    assert len(reads) == 3


# ---- mixed precision


def amp_step(model, x, loss, scaler, optimizer):
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", dtype=torch.float16):
        value = loss(model(x))
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()


def amp(loss, init_scale=65536.0, steps=1, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    optimizer = optimizer(model.parameters(), lr=1e-3, **options)
    x = torch.randn(16, 4)
    with trace(model, action="record") as tracer:
        for _ in range(steps):
            amp_step(model, x, loss, scaler, optimizer)
    return tracer, scaler


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_the_scaled_gradient_is_the_scalers(fused):
    """An overflow of scaled gradients must be no finding of a fused optimizer, which GradScaler calls also after an
    overflow, with the scaled gradients and a flag found_inf."""
    tracer, scaler = amp(lambda y: (y.float() * 100).square().sum(), steps=2, optimizer=torch.optim.AdamW, fused=fused)
    assert scaler.get_scale() < 65536 and tracer.report is None
    overflow = tracer.overflows[0]
    assert overflow.kind == "scaled overflow" and not overflow.bug and overflow.scale == 65536
    assert overflow.phase == "backward" and "GradScaler skips" in str(overflow)


def test_a_loss_that_was_nan_before_the_gradient_overflowed():
    data = torch.ones(16, 1)
    data[3] = float("nan")
    tracer, _ = amp(lambda y: (y.float() * 1e5 * data).square().sum())
    assert tracer.report.reached == "the loss" and tracer.report.kind == "came in" and tracer.report.op == "mul"


def test_an_overflow_beyond_what_the_scale_explains():
    x = torch.tensor([1e-7], dtype=torch.float16, requires_grad=True)  # the gradient, 1e7, overflows at any scale

    def step():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        scaler.scale(torch.log(x).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    report = traced(step).report
    assert report is not None and (report.kind, report.phase) == ("overflow", "backward")


def test_a_half_loss_is_told_what_to_do():
    tracer, _ = amp(lambda y: y.half().square().mean())
    assert tracer.report is None and "keep the loss in fp32" in tracer.overflows[0].instead


def test_an_overflow_that_no_scale_can_help():
    tracer, _ = amp(lambda y: (y.float() * 1e5).square().sum(), init_scale=1.0)
    assert tracer.report.kind == "overflow" and tracer.report.phase == "backward" and not tracer.overflows


def test_a_gradient_without_a_value_is_a_bug_under_a_scaler_too():
    tracer, _ = amp(lambda y: (y.float() * 0).square().sum().sqrt())
    assert tracer.report.kind == "undefined" and "safe_sqrt" in tracer.report.instead


def test_an_overflow_of_half_in_the_forward_pass():
    tracer, _ = amp(lambda y: (y * 0 + 30000).sum())
    assert (tracer.report.op, tracer.report.kind, tracer.report.scale) == ("sum", "overflow", 65536)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("size", [3, 70000])  # 70000: trace's own sums over it must not be in half
def test_the_optimizer_is_watched(size, foreach):
    parameter = torch.nn.Parameter(torch.ones(size, dtype=torch.float16))
    optimizer = torch.optim.Adam([parameter], lr=1e-3, foreach=foreach)  # eps=1e-8 is 0 in half

    def step():
        (parameter * 0).sum().backward()
        optimizer.step()

    report = traced(step).report
    assert report.op in ("addcdiv_", "_foreach_addcdiv_") and parameter.isnan().all()
    assert report.kind == "undefined" and "weights in float32 under autocast, or eps=1e-4" in report.instead


def test_an_update_belongs_to_its_step():
    """A NaN in the loss, which the optimizer then writes into the weights, is one finding, of one step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace(model, action="record") as tracer:
        for number in (1.0, float("nan"), 1.0):
            optimizer.zero_grad()
            model(torch.tensor([[number]])).sum().backward()
            optimizer.step()
    assert tracer.steps == 3 and [report.step for report in tracer.reports] == [2, 3]
    # A wrong update alone is reported in the step that ends with it.
    with trace(model, action="record") as tracer:
        torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
        optimizer.param_groups[0]["lr"] = float("inf")
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert tracer.steps == 1 and tracer.report.step == 1 and tracer.report.module == "SGD"
