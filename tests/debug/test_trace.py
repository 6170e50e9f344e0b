"""trace names the op, the phase, the module, the line and the cause of the first value that is not finite."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import safeops
from safeops.debug import NonFiniteError, trace


def traced(function, model=None):
    with trace(model, action="record") as tracer:
        function()
    return tracer


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


# ---- (what the step does, op, phase, kind, a part of why, a part of the replacement)
def log_of_zero(x):
    return (x * torch.log(x)).sum()  # HERE


def where_after_division(x):
    return torch.where(x > 0, 1 / x, 0).sum()  # HERE


def norm_by_hand(x):
    return (x * 0).pow(2).sum().sqrt()  # HERE


def zero_norm(x):
    y = x * 0
    return (y / y.norm()).sum()  # HERE


def half_square(x):
    return (x.half() * 200 * (x.half() * 200)).float().sum()  # HERE


def half_sum(x):
    return (x.half() + 60000).sum()  # HERE


def mask_by_multiplication(x):
    return ((x / torch.tensor([0.0, 1.0])) * torch.tensor([0.0, 1.0])).sum()  # HERE


def hidden_row(x):
    return x[None].masked_fill(torch.tensor(True), float("-inf")).softmax(-1).sum()  # HERE


def one_deviation(x):
    return x[:1].std()  # HERE


def acos_at_one(x):
    return torch.acos((x - 2).clamp(-1, 1) + 1).sum()  # HERE


def in_place(x):
    y = x * 1
    y.log_()  # HERE
    return y.sum()


def of_a_slice(x):
    y = torch.cat([x, torch.tensor([float("inf")])])
    return torch.log(y[:2]).mul(2).sum()  # HERE


def all_ignored(x):
    return F.cross_entropy(x[None], torch.tensor([-100]))  # HERE


def row_by_row(x):
    rows = torch.zeros(3, 2)
    for t in range(3):
        rows[t] = (x + 1) / (1 - t)  # HERE
    return (rows * 2).sum()


def a_nan_of_ones_own(x):
    return (x * torch.full((2,), float("nan"))).sum()  # HERE


CASES = [
    (log_of_zero, "log", "forward", "undefined", "log(0) is -inf", "safe_log"),
    (where_after_division, "reciprocal", "forward", "undefined", "reciprocal(0) is inf", "safe_reciprocal"),
    (norm_by_hand, "div", "backward", "undefined", "div(1, 0) is inf", "safe_sqrt"),
    (zero_norm, "div", "forward", "undefined", "div(0, 0) is nan", "safe_div"),
    (half_square, "mul", "forward", "overflow", "mul(400, 400) is 160000", "fp32"),
    (half_sum, "sum", "forward", "overflow", "(at most 60000), and its result does not fit float16", "masked_sum"),
    (mask_by_multiplication, "div", "forward", "undefined", "div(0, 0) is nan", "safe_div"),
    (hidden_row, "_softmax", "forward", "undefined", "2 -inf of 2 elements, from masked_fill", "masked_softmax"),
    (one_deviation, "std", "forward", "undefined", "not more elements", "masked_std"),
    (acos_at_one, "rsqrt", "backward", "undefined", "rsqrt(0) is inf", "safe_acos"),
    (in_place, "log_", "forward", "undefined", "log_ has no finite value for these operands", "safe_log"),
    (all_ignored, "nll_loss_forward", "forward", "undefined", "no finite value for these operands", ""),
    (of_a_slice, "log", "forward", "undefined", "log(0) is -inf", "safe_log"),
    (row_by_row, "div", "forward", "undefined", "div(1, 0) is inf", "safe_div"),
    (a_nan_of_ones_own, "full", "forward", "came in", "full wrote 2 NaN of 2 elements", "mask"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_the_cause_is_named(case):
    loss, op, phase, kind, why, instead = case
    x = leaf(0.0, 2.0)
    report = traced(lambda: loss(x).backward()).report
    assert (report.op, report.phase, report.kind) == (op, phase, kind), str(report)
    assert why in report.why and instead in (report.instead or ""), str(report)
    assert report.line.file == __file__ and report.line.text.rstrip().endswith("# HERE"), str(report)
    assert report.line.function == loss.__name__ and report.lines[1].function == "<lambda>"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("make, kinds, cells", [
    (lambda x: (x - 1).sqrt(), "1 NaN", ("1", "")),
    (lambda x: x.reciprocal(), "1 inf", ("", "1")),
    (lambda x: x.log(), "1 -inf", ("", "1")),
], ids=["NaN", "inf", "-inf"])  # fmt: skip
def test_a_value_that_is_alone_of_its_kind(make, kinds, cells, dtype):
    report = traced(lambda: make(leaf(2.0, 0.0, 3.0, dtype=dtype)).sum().backward()).report
    assert report.output.kinds() == f"{kinds} of 3 elements" and report.output.first == (1,)
    assert report.output.nonfinite == 1 and report.frames[-1].cells()[6:8] == cells
    assert report.kind == "undefined" and report.reached == "the loss"


def test_a_clean_step_has_no_report():
    x = leaf(1.0, 2.0)
    tracer = traced(lambda: (x * x.log()).sum().backward())
    assert tracer.report is None and tracer.steps == 1


def test_safeops_is_clean_where_the_usual_code_is_not():
    x, y = leaf(0.0, 2.0), torch.tensor([float("nan"), 1.0])
    mask = torch.tensor([False, True])
    assert traced(lambda: safeops.mse_loss(safeops.safe_log(x), y, mask=mask).backward()).report is None
    assert traced(lambda: F.mse_loss(torch.log(x), y).backward()).report is not None
    assert x.grad.isnan().any()


def test_what_reaches_nothing_is_no_finding():
    x = leaf(0.0, 2.0)

    def step():
        print_me = torch.log(x.detach())  # a metric: -inf, and nobody trains on it
        scores = x[None].masked_fill(torch.tensor([True, False]), float("-inf")).softmax(-1)
        (scores * x).sum().backward()
        return print_me

    assert traced(step).report is None


def test_what_is_logged_around_a_step_is_no_finding():
    w = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def steps():
        for _ in range(2):
            loss = w.square().sum()
            perplexity = (loss * 1000).exp()  # inf, attached to the graph, and nothing is trained on it
            loss.backward()
            optimizer.step()
            accuracy = torch.zeros(()) / torch.zeros(())  # of no element; behind the last step no backward follows
        return perplexity, accuracy

    assert traced(steps).reports == []
    with trace(action="record") as tracer:
        steps()
        w.detach().sub(w.detach()).log()
        assert tracer.check().reached == "a result"  # asked for


def test_without_a_backward_pass_every_last_result_counts():
    report = traced(lambda: torch.log(torch.zeros(3)) + 1).report
    assert report.op == "log" and report.reached == "a result"


def test_counts_of_operands_and_result():
    x = torch.tensor([[1.0, 2.0, -4.0], [1e-6, 3.0, 1e-9]], dtype=torch.float16)
    y = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float16)
    report = traced(lambda: x / y).report
    assert [str(operand.counts) for operand in report.inputs] == ["float16 (2, 3) on cpu", "float16 (3,) on cpu"]
    assert [operand.value for operand in report.inputs] == [2.0, 0.0]
    counts = report.inputs[0].counts
    assert (counts.largest, counts.subnormal, counts.zero) == (4, 1, 1)
    assert report.output.first == (0, 1) and report.output.kinds() == "2 inf of 6 elements"


def test_modules_by_name_and_by_class():
    class Bad(torch.nn.Module):
        def forward(self, x):
            return torch.log(x - x)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Bad()))
    step = lambda: model(torch.ones(1, 2)).sum().backward()  # noqa: E731
    assert traced(step, model).report.module == "1.0 (Bad)"
    assert traced(step).report.module == "Sequential.Sequential.Bad"
    # a module that raises does not stay on the stack
    broken = torch.nn.Sequential(torch.nn.Linear(3, 3), Bad())

    def after_an_error():
        with pytest.raises(RuntimeError):
            broken(torch.ones(1, 2))
        torch.log(torch.zeros(1))

    assert traced(after_an_error).report.module == ""


def test_the_first_of_two_and_the_table_before_it():
    x = leaf(0.0, 2.0)

    def step():
        a = x * 3
        b = torch.log(a)
        (b / (a * 0)).sum().backward()

    report = traced(step).report
    assert report.op == "log" and [frame.op for frame in report.frames] == ["mul", "log"]
    text = str(report)
    assert "what ran before" in text and "float32 2" in text and "test_trace.py" in text


# ---- what it does with a finding


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


def test_what_lay_in_memory_before_is_no_operand():
    x = leaf(0.0, 1.0)
    garbage = torch.full((2,), float("nan"))

    def step():
        torch.log(x.detach(), out=garbage)
        (x * garbage).sum().backward()

    assert traced(step).report.op == "log"
    garbage = torch.full((2,), float("nan"))

    def copy():
        garbage.copy_(torch.log(x.detach()))
        (x * garbage).sum().backward()

    assert traced(copy).report.op == "log"


def test_a_running_metric_is_no_finding_and_a_parameter_is():
    x, total = leaf(1.0, 2.0), torch.zeros(())

    def step():
        total.add_(torch.log(torch.zeros(())))
        (x * 2).sum().backward()

    assert traced(step).report is None

    def spoil():
        step()
        with torch.no_grad():
            x.sub_(torch.log(torch.zeros(2)))

    report = traced(spoil).report
    assert report.reached == "a parameter" and report.op == "log"


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
    """A fused optimizer is called all the same, with the scaled gradients and the word that they overflowed."""
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
    x = torch.tensor([1e-7], dtype=torch.float16, requires_grad=True)  # the gradient is 1e7, whatever the scale

    def step():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        scaler.scale(torch.log(x).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    report = traced(step).report
    assert report is not None and (report.kind, report.phase) == ("overflow", "backward")


def test_a_gradient_left_by_an_earlier_step():
    x = leaf(1.0, 2.0)
    x.grad = torch.tensor([float("inf"), 0.0])
    report = traced(lambda: (x * 2).sum().backward()).report
    assert report.kind == "came in" and "zero_grad" in report.instead


def test_what_runs_behind_the_last_step_is_none():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def run():
        for _ in range(3):
            (parameter * 2).sum().backward()
            optimizer.step()
        return parameter.detach().mean() + 1

    assert traced(run).steps == 3


def test_no_frames_are_shown_where_none_are_wanted():
    with trace(action="record", last=0) as tracer:
        torch.log(torch.ones(2) * 0)
    assert "what ran before" not in str(tracer.report)


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


def test_the_optimizer_is_watched():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)  # eps=1e-8 is 0 in half

    def step():
        (parameter * 0).sum().backward()
        optimizer.step()

    report = traced(step).report
    assert report.op.startswith(("addcdiv", "_foreach_addcdiv", "div", "_foreach_div")) and parameter.isnan().all()


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


# ---- ways of running


class Inner(torch.nn.Module):
    def forward(self, x):
        return torch.sqrt(x * 0)  # HERE


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Inner())

    def step():
        checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=reentrant).sum().backward()

    report = traced(step, model).report
    assert report.phase == "backward" and report.line.text.endswith("# HERE") and report.module == "1 (Inner)"


def test_a_recomputation_is_a_forward_pass():
    calls = []

    def forward(x):
        calls.append(1)
        return torch.log(x * (len(calls) < 2)) * x  # HERE

    def step():
        checkpoint(forward, leaf(1.0, 2.0), use_reentrant=False).sum().backward()

    report = traced(step).report
    assert len(calls) == 2 and report.op == "log" and report.phase == "forward"
    assert report.line.text.endswith("# HERE")


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x  # HERE


def test_a_custom_backward_has_a_line_of_its_own():
    report = traced(lambda: Reciprocal.apply(leaf(0.0, 1.0)).sum().backward()).report
    assert report.op == "div" and report.line.function == "backward" and report.line.text.endswith("# HERE")


def test_an_op_of_a_hook_is_advised_on_by_itself():
    x = leaf(1.0, 2.0)
    x.register_hook(lambda grad: grad / (grad - grad))  # HERE
    report = traced(lambda: (x * 2).sum().backward()).report
    assert report.line.text.endswith("# HERE") and "safe_div" in report.instead


def test_second_derivatives():
    def step():
        x = leaf(0.0, 1.0)
        (gradient,) = torch.autograd.grad(x.sin().pow(1.5).sum(), x, create_graph=True)
        gradient.sum().backward()

    report = traced(step).report
    assert report.phase == "backward" and "safe_pow" in report.instead


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), Inner()))
        report = traced(lambda: model(torch.ones(1, 2)).sum().backward(), model).report
        assert report.module == "module.1 (Inner)" and report.line.text.endswith("# HERE")
        clean = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert traced(lambda: clean(torch.ones(1, 2)).sum().backward(), clean).report is None
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_compiled_region_makes_came_in():
    f = torch.compile(lambda x: torch.log(x) * 2, backend="aot_eager")
    f(torch.ones(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo's, of trying to compile the recorder too
        report = traced(lambda: f(torch.zeros(4)) + 1).report
    assert report is not None and report.kind in ("came in", "undefined")


def test_parameters_that_have_no_shape_yet():
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), Inner())
    report = traced(lambda: model(torch.ones(1, 3)).sum().backward(), model).report
    assert report.module == "1 (Inner)" and model[0].weight.shape == (2, 3)


def test_complex_sparse_and_integer_tensors():
    def step():
        z = torch.fft.fft(torch.arange(4.0))
        (z / z.abs().mul(0).to(torch.complex64)).real.sum()
        torch.eye(3).to_sparse() @ torch.ones(3, 3)
        torch.arange(5) // 2

    report = traced(step).report
    assert report.op == "div" and report.output.dtype is torch.complex64


def test_inference_mode_and_nested_tensors():
    def step():
        with torch.inference_mode():
            y = torch.ones(3)
            y.mul_(0)
            torch.log(y)
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    for _ in range(2):
        assert traced(step).report.op == "log"


def test_functorch():
    assert traced(lambda: torch.func.vmap(torch.log)(torch.zeros(3, 2))).report.op == "log"
    gradient = traced(lambda: torch.func.grad(lambda v: (v * 0).sqrt().sum())(torch.ones(3))).report
    assert (gradient.op, gradient.kind) == ("div", "undefined")


def test_nan_that_came_in():
    data = torch.tensor([1.0, float("nan")])
    report = traced(lambda: (leaf(1.0, 2.0) * data).sum().backward()).report
    assert report.kind == "came in" and report.op == "mul" and "1 NaN of 2 elements" in report.why


def test_memory_written_behind_torchs_back_is_read_again():
    x = torch.ones(4)
    shared = x.numpy()

    def step():
        y = x + 1
        shared[0] = float("nan")
        return (x[1:] * 2).sum() + y.sum()

    assert traced(step).report is None


@pytest.mark.parametrize("copy", [torch.clone, lambda x: torch.empty(4).copy_(x), lambda x: torch.ones(4).add_(x)])
def test_what_a_collective_brings_is_not_blamed_on_who_copies_it(copy):
    bucket, received = torch.ones(4), leaf(1.0, 1.0, 1.0, 1.0)
    shared = bucket.numpy()  # stands for another rank, whose gradient arrives between two ops

    def step():
        bucket.mul_(2)
        shared[0] = float("nan")
        (received * copy(bucket)).sum().backward()

    report = traced(step).report
    assert report.kind == "came in" and "another rank" in report.why, str(report)


def test_a_second_thread_of_memory_reuse():
    """Freed memory that another tensor takes over is not mistaken for the old one."""

    def step():
        for i in range(50):
            y = torch.full((1000,), 1.0) + i
            del y
        return torch.log(torch.zeros(1000)).sum()

    assert traced(step).report.op == "log"


def test_one_transfer_a_step(monkeypatch):
    from safeops.debug import _record

    reads = []
    table = _record.Recorder.table
    monkeypatch.setattr(_record.Recorder, "table", lambda self: reads.append(1) or table(self))
    with trace() as tracer:
        for _ in range(3):
            (leaf(1.0, 2.0) * 2).sum().backward()
            tracer.check()
    assert len(reads) == 3
