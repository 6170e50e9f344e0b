"""The debugging tools on a GPU count on the device without waiting for it, and report an error at the op that made
it."""

import subprocess
import sys

import pytest
import torch

import safeops
from safeops.debug import SynchronizationError, audit, no_sync, trace
from safeops.testing import no_synchronisation

pytestmark = pytest.mark.gpu


def test_trace_names_the_op_and_its_operands():
    x = torch.tensor([0.0, 2.0], device="cuda", requires_grad=True)
    with trace(action="record") as tracer:
        (x * torch.log(x)).sum().backward()
    report = tracer.report
    assert (report.op, report.kind, report.phase) == ("log", "undefined", "forward")
    assert report.why == "log(0) is -inf: there is no finite value for it" and report.line.file == __file__


def test_trace_names_the_line_of_a_backward_op():
    x = torch.tensor([0.0, 0.0], device="cuda", requires_grad=True)
    with trace(action="record") as tracer:
        x.pow(2).sum().sqrt().backward()  # HERE
    report = tracer.report
    assert report.phase == "backward" and report.kind == "undefined" and report.line.text.endswith("# HERE")


def test_trace_waits_for_nothing_before_the_step_ends():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
    x = torch.randn(32, 64, device="cuda")
    with trace(model, action="record") as tracer:
        with no_synchronisation("cuda"), torch.autocast("cuda", dtype=torch.float16):
            (model(x).float() / 0).square().sum().backward()
        assert tracer.check().op == "div"


def test_an_overflow_that_the_scaler_handles():
    model = torch.nn.Linear(8, 1).cuda()
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with trace(model, action="record") as tracer:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(torch.randn(16, 8, device="cuda")).float() * 100).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert tracer.report is None and tracer.overflows[0].kind == "scaled overflow"


def test_no_sync():
    x = torch.ones(8, device="cuda")
    for wait in (
        lambda: x.sum().item(),
        lambda: x[x > 0],
        lambda: x.cpu(),
        lambda: str(x),
        lambda: torch.cuda.synchronize(),
    ):
        with pytest.raises(SynchronizationError), no_sync():
            wait()
    with no_sync():
        safeops.masked_mean(x, x > 0)
        x.clone()[x > 0] = 0
    assert torch.cuda.get_sync_debug_mode() == 0


def test_audit_sees_copies_between_devices():
    x = torch.ones(2)
    with audit(select=["device-copy"]) as result:
        x.cuda().cpu()
    assert [finding.detail for finding in result.findings] == [
        "float32 (2,) on cpu to cuda:0",
        "float32 (2,) on cuda:0 to cpu",
    ]


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_audit_sees_classes_that_do_not_exist(name):
    x, target = torch.zeros(3, 4, device="cuda"), torch.tensor([0, -100, 4], device="cuda")
    with audit(select=["index-range"]) as result:
        getattr(safeops, name)(x, target)
    assert [finding.detail for finding in result.findings] == ["1 of 3 are not in [0, 4), the first is 4"]


def test_an_index_out_of_range_is_raised_at_its_op():
    """An index out of range raises its error at the op that got it. The test has its own process, since a device assert
    ends the CUDA context."""
    program = (
        "import torch, safeops\n"
        "x = torch.arange(3.0, device='cuda')\n"
        "i = torch.tensor([0, 7], device='cuda')\n"
        "with safeops.debug.locate_errors():\n"
        "    y = x + 1\n"
        "    z = y.gather(0, i)  # HERE\n"
        "    print(z.sum() + 1)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "LocatedError" in run.stderr, run.stderr
    assert "by gather" in run.stderr and "<string>:6" in run.stderr, run.stderr
