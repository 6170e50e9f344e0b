"""locate_errors names the op, line, module and operands of an error, and the line that modified a tensor."""

import json

import pytest
import torch

from safeops.debug import LocatedError, locate_errors


def test_written_result():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(LocatedError) as caught, locate_errors():
        y = x.exp()  # MADE
        z = y * 2
        y.clamp_(max=1.0)  # WRITTEN
        z.sum().backward()
    error = caught.value
    assert error.line.text.rstrip().endswith("# WRITTEN") and error.site.op == "clamp_"
    text = str(error)
    assert "clamp_ modified a tensor that backward needs, FloatTensor of shape [3]" in text
    assert "made by exp at" in text and "read before by mul at" in text and "without the underscore" in text
    assert "modified by an inplace operation" in str(error.__cause__)


def test_written_operand_through_a_view():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(LocatedError) as caught, locate_errors():
        y = x * 2
        z = y * y
        y[0] = 1  # WRITTEN
        z.sum().backward()
    assert caught.value.line.text.rstrip().endswith("# WRITTEN")


def test_the_right_one_of_many_writes():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(LocatedError) as caught, locate_errors():
        for _ in range(3):
            torch.zeros(3).add_(1)
        y = torch.sigmoid(x)
        y += 1  # WRITTEN
        torch.zeros(3).mul_(2)
        y.sum().backward()
    assert caught.value.line.text.rstrip().endswith("# WRITTEN")


def test_a_parameter_stepped_between_two_backwards():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with pytest.raises(LocatedError, match="a line that ran outside this context|modified a tensor") as caught:
        loss = model(torch.ones(1, 2)).sum()
        with torch.no_grad():
            model[1].weight.add_(1)  # before the context, so that its line is unknown
        with locate_errors(model):
            loss.backward()
    assert "modified by an inplace operation" in str(caught.value.__cause__)


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_steps_between_two_backwards(foreach):
    generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, foreach=foreach)
    with pytest.raises(LocatedError) as caught, locate_errors():
        for _ in range(2):
            score = critic(generator(torch.ones(1, 2))).sum()
            score.backward(retain_graph=True)
            optimizer.step()  # WRITTEN
            score.neg().backward()
    assert caught.value.line.text.rstrip().endswith("# WRITTEN"), str(caught.value)


def test_slices_written():
    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(LocatedError) as caught, locate_errors():
        y = x.tanh()
        y[0] = 0  # WRITTEN
        y[1] = 0  # WRITTEN
        y.sum().backward()
    assert caught.value.line.text.rstrip().endswith("# WRITTEN"), str(caught.value)


def test_parameters_that_have_no_shape_yet():
    model = torch.nn.LazyLinear(2)
    with locate_errors():
        assert model(torch.ones(1, 3)).shape == (1, 2)


def test_operands_on_two_devices():
    model = torch.nn.Linear(3, 3).to("meta")
    with pytest.raises(LocatedError) as caught, locate_errors(model):
        x = torch.ones(1, 3) * 2  # MADE
        model(x)
    text = str(caught.value)
    assert "parameter bias" in text and "parameter weight" in text and "was made by mul at" in text
    assert "on meta" in text and "on cpu" in text


def test_any_error_of_an_op_has_its_operands():
    class Bad(torch.nn.Module):
        def forward(self, x):
            return x @ torch.ones(2, 3)  # HERE

    model = torch.nn.Sequential(Bad())
    with pytest.raises(LocatedError) as caught, locate_errors(model):
        model(torch.ones(2, 3))
    assert caught.value.line.text.rstrip().endswith("# HERE") and caught.value.site.module == "0 (Bad)"
    assert caught.value.site.operands == ["float32 (2, 3) on cpu, stride (3, 1)"] * 2


def test_other_errors_pass():
    with pytest.raises(IndexError), locate_errors():
        torch.ones(3)[5]
    with pytest.raises(KeyError), locate_errors():
        {}["x"]
    with locate_errors():  # an exception that the code catches itself is not reported
        with pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
        torch.ones(3).sum()


def test_bad_arguments(tmp_path):
    with pytest.raises(TypeError, match="locate_errors: model must be a torch.nn.Module or None, got str"):
        locate_errors("model")
    (tmp_path / "state").write_text("nonsense")
    with pytest.raises(ValueError, match="holds no state of a bisection"):
        locate_errors(bisect=True, state=tmp_path / "state")


# ---- a device that reports errors late, simulated on the CPU: an op sets `broken`, and a later call raises


INDEX = torch.tensor([0, 1, 2])


class LateDevice:
    def __init__(self, monkeypatch):
        self.broken, self.waits = False, 0
        import importlib

        module = importlib.import_module("safeops.debug.errors.locate_errors")
        monkeypatch.setattr(module, "asynchronous", lambda device: True)
        monkeypatch.setattr(module, "synchronize", self.synchronize)

    def synchronize(self, device):
        self.waits += 1
        if self.broken:
            self.broken = False
            raise RuntimeError("CUDA error: device-side assert triggered\nand much more")


@pytest.fixture
def late(monkeypatch):
    return LateDevice(monkeypatch)


class Breaks(torch.autograd.Function):
    """Returns x unchanged, and breaks the simulated device."""

    @staticmethod
    def forward(ctx, x, device):
        device.broken = True
        return torch.gather(x, 0, INDEX)  # HERE

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def many_ops(late, n=300, at=217):
    x = torch.ones(3)
    for i in range(n):
        x = Breaks.apply(x, late) if i == at else x + 1  # LOOP
    return x


def test_an_error_of_the_device_appears_at_its_op(late):
    with pytest.raises(LocatedError, match="device-side assert triggered") as caught, locate_errors():
        many_ops(late)
    assert caught.value.line.text.rstrip().endswith("# HERE") and caught.value.site.op == "gather"
    assert "int64 (3,)" in str(caught.value) and "CUDA error" in str(caught.value.__cause__)
    assert late.waits > 200


def test_bisection_narrows_from_run_to_run(late, tmp_path):
    state, runs, waits = tmp_path / "state.json", 0, []
    while True:
        runs += 1
        late.waits = 0
        with pytest.raises(LocatedError) as caught, locate_errors(bisect=True, state=state):
            many_ops(late)
        waits.append(late.waits)
        if caught.value.site is not None:
            break
        assert any(site.op == "gather" for site in caught.value.candidates)
        assert json.loads(state.read_text())["high"] == caught.value.candidates[-1].ordinal
        assert "run it again to narrow" in str(caught.value)
    assert caught.value.site.op == "gather" and caught.value.line.text.rstrip().endswith("# HERE")
    assert runs <= 3 and max(waits) <= 17 and not state.exists()


def test_bisection_narrows_from_step_to_step(late, tmp_path):
    """If an error does not end the process, each further step must halve the list of ops that may have caused it."""
    results = []
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        try:
            with locate_errors(bisect=True, state=tmp_path / "state"):
                many_ops(late)
                optimizer.step()
        except LocatedError as error:
            results.append(len(error.candidates))
    assert results[0] > results[1] >= results[-1] == 1 or results[:2] == [64, 1], results


def test_a_clean_step_passes_and_waits_little(late, tmp_path):
    with locate_errors(bisect=True, state=tmp_path / "state"):
        many_ops(late, at=-1)
    assert late.waits <= 6 and not (tmp_path / "state").exists()
