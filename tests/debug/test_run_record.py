"""`safeops run --record SCRIPT`: an unmodified script, whose step that is not finite is found, named and skipped."""

import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from safeops import cli

EXHAUSTIVE = pytest.mark.exhaustive
HEAD = """
import itertools
import torch
from torch.utils.data import DataLoader, TensorDataset

BAD = 3
torch.manual_seed(0)
x, y = torch.rand(24, 4) + 0.5, torch.rand(24, 1)
if BAD:
    x[4 * BAD - 2] = 0
data = TensorDataset(x, y)
loader, other = DataLoader(data, 4), DataLoader(TensorDataset(y), 4)
linear, norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
model = torch.nn.Sequential(linear, norm, torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)


def update(x, y):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean() + (model(x) * x.log()).mean()  # HERE
    loss.backward()
    optimizer.step()
    return loss


"""
END = """
print("weights of", sum(p.detach().double().sum() for p in model.state_dict().values()).item(), torch.rand(1).item())
"""
LOOPS = {
    "direct": "for x, y in loader:\n    update(x, y)",
    "one name": "for batch in loader:\n    update(*batch)",
    "in one line": "for x, y in loader: update(x, y)",
    "enumerate": "for i, (x, y) in enumerate(loader):\n    update(x, y)",
    "set anew": "for x, y in loader:\n    x, y = x.float() * 1, y.float()\n    update(x, y)",
    "enumerate, set anew": "for i, [x, y] in enumerate(loader, start=1):\n    x, y = x + 0, y + 0\n    update(x, y)",
    "one name, deleted": "for batch in loader:\n    x, y = batch\n    del batch\n    update(x, y)",
    "zip": "for (x, y), (z,) in zip(loader, other):\n    update(x, z)",
    "zip, set anew": "for (x, _), (y,), k in zip(loader, other, range(9)):\n    x, y = x * 1, y * 1\n    update(x, y)",
    "a named enumerate": "pairs = enumerate(loader)\nfor i, (x, y) in pairs:\n    x = x + 0\n    update(x, y)",
    "two epochs of one": "for epoch in range(2):\n    for x, y in loader:\n        update(x, y)",
    "in a function": """
def train(rate):
    seen = 0
    for x, y in loader:
        seen += len(x)
        update(x, y * rate)
    return seen


train(2.0)""",
    "in a class": """
class Trainer:
    def __init__(self):
        self.loader = loader

    def __step(self, x, y):
        return update(x, y)

    def fit(self):
        for i, (x, y) in enumerate(self.loader):
            x = x.clone()
            self.__step(x, y)


Trainer().fit()""",
    "through a generator": """
def moved():
    for x, y in loader:
        yield x * 1, y


for x, y in moved():
    update(x, y)""",
    "a validation between": """
def validate():
    with torch.no_grad():
        return sum(model(x).sum() for x, y in loader)


for i, (x, y) in enumerate(loader):
    if i == 2:
        validate()
    update(x, y)""",
    "another loader's next": """
ys = iter(other)
for x, _ in loader:
    (y,) = next(ys)
    update(x, y)""",
    "accumulation": """
for i, (x, y) in enumerate(loader):
    ((model(x) - y) * x.log()).mean().backward()  # HERE
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()""",
}


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(source, *options, arguments=(), module=False):
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(tmp_path)
        script = ["-m", "train"] if module else [str(tmp_path / "train.py")]
        with warnings.catch_warnings(record=True) as run.warned:
            warnings.simplefilter("always")
            code = cli.main(["run", "--record", *options, *script, *arguments])
        sys.modules.pop("train", None)
        out, err = capfd.readouterr()
        return code, out, err

    return run


FAST = "in one line", "enumerate, set anew", "zip, set anew", "in a class", "another loader's next", "accumulation"


@pytest.mark.parametrize("loop", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in LOOPS])
def test_the_line_is_named_and_the_script_ends(run, loop, tmp_path):
    code, out, err = run(HEAD + LOOPS[loop] + END)
    assert code == 1 and "step 3: the loss is not finite: log has no finite value" in out and "# HERE" in out, out + err
    assert "safeops run: 1 of 3 steps not finite, kept from the weights" in out and not weights(out)
    assert "log(0) is -inf" in (tmp_path / "flight" / "step-3" / "report.txt").read_text()
    assert not [w for w in run.warned if "safeops" in str(w.message)]


def weights(out):
    return [line for line in out.splitlines() if line.startswith("weights of")]


def in_python(script, folder):
    """Run a script by itself, with as many threads as here: sums are split among them."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["another loader's next", pytest.param("a validation between", marks=EXHAUSTIVE)])
def test_a_finite_training_is_the_same_to_the_bit(run, loop, tmp_path):
    code, out, _ = run(HEAD.replace("BAD = 3", "BAD = 0") + LOOPS[loop] + END)
    assert code == 0 and "no NaN or inf reached a loss or a gradient in 6 steps" in out
    plain = in_python("train.py", tmp_path)
    assert weights(out) == weights(plain.stdout) != []


@pytest.mark.slow
@pytest.mark.parametrize("loop", [pytest.param("set anew", marks=EXHAUSTIVE), "another loader's next"])
def test_a_warning_goes_on_as_if_the_step_were_not_there(run, loop, tmp_path):
    """The replays must neither move the random numbers nor take other batches."""
    either = "update(x, y) if SKIP or x.any(1).all() else model(x) + model(x)"
    source = HEAD + LOOPS[loop].replace("update(x, y)", either)
    code, out, _ = run(source.replace("BAD = 3", "BAD, SKIP = 3, True") + END, "--action", "warn")
    assert code == 1 and out.count("# HERE") == 1 and "1 of 6 steps not finite" in out
    torn = source.replace("BAD = 3", "BAD, SKIP = 3, False") + END
    torn = torn.replace("model(x) + model(x)", "spare(x)").replace("def update", SPARE + "def update")
    (tmp_path / "plain.py").write_text(torn)
    plain = in_python("plain.py", tmp_path)
    assert weights(out) == weights(plain.stdout) != []


SPARE = '''def spare(x):
    """Draw the random numbers of a step, and leave BatchNorm's statistics."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model(x), model(x)
    model.load_state_dict(before)


'''

BY_HAND = """
batches = iter(loader)
for step in range(6):
    x, y = next(batches)
    update(x, y)
"""
GENERATED = """
def losses():
    for x, y in loader:
        yield update(x, y)


for loss in losses():
    loss.item()
"""
ELSEWHERE = """
def moved():
    for x, y in loader:
        yield x, y


for x, y in moved():
    x = x * 1
    update(x, y)
"""
NO_LOADER = """
for x, y in zip(x.split(4), y.split(4)):
    update(x, y)
"""


@pytest.mark.parametrize("loop, why", [
    (BY_HAND, "its batch was taken by next()"),
    pytest.param(GENERATED, "backward was not called in the body of the loop that took", marks=pytest.mark.slow),
    pytest.param(ELSEWHERE, "the body sets x of the loop's target anew, and a generator", marks=pytest.mark.slow),
    (NO_LOADER, "no DataLoader gave its batch"),
])  # fmt: skip
def test_a_step_that_cannot_run_again_says_why(run, loop, why):
    code, out, _ = run(HEAD + loop + END)
    assert code == 1 and "step 3: the loss or a gradient is not finite, and no replay shows where" in out
    assert f"the step cannot run again: {why}" in out and not weights(out)
    code, out, _ = run(HEAD + loop + END, "--action", "warn")
    assert code == 1 and "1 of 6 steps not finite" in out and "nan" not in weights(out)[0]
    assert ("steps end with the optimizer's updates" in out) == (loop is NO_LOADER)


def test_two_models_in_one_loop(run):
    code, out, _ = run(
        HEAD
        + """
critic = torch.nn.Linear(4, 1)
other_optimizer = torch.optim.SGD(critic.parameters(), 0.1)
for x, y in loader:
    other_optimizer.zero_grad()
    (critic(x).square() * x.log()).sum().backward()  # THERE
    other_optimizer.step()
    update(x, y)
"""
    )
    assert code == 1 and "# THERE" in out and "1 of 3 steps" in out


@pytest.mark.slow
def test_trainings_one_after_the_other_count_on(run):
    source = HEAD.replace("BAD = 3", "BAD = 0") + LOOPS["direct"] + HEAD.replace("model", "net") + LOOPS["direct"]
    code, out, _ = run(source)
    assert code == 1 and "step 9: the loss is not finite: log" in out and "1 of 9 steps" in out


@pytest.mark.slow
def test_a_loop_that_is_left_has_its_finding_told(run):
    source = HEAD + "for x, y in loader:\n    if not update(x, y).isfinite():\n        break\n"
    code, out, _ = run(source)
    assert code == 1 and "# HERE" in out and "1 of 3 steps" in out and "safeops_lint" not in out
    code, out, err = run(source.replace("break", "raise SystemExit(7)"))
    assert code == 1 and "# HERE" in out
    code, out, err = run(source.replace("break", "raise ValueError('spoiled')"))
    assert code == 1 and "# HERE" in out and "ValueError: spoiled" in err


SCALER = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
for x, y in zip(x.split(4), y.split(4)):
    optimizer.zero_grad()
    scaler.scale((model(x).half() - y).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_skips_of_a_scaler_are_no_finding(run):
    for loop in (SCALER, SCALER.replace("zip(x.split(4), y.split(4))", "loader")):
        code, out, err = run(HEAD.replace("BAD = 3", "BAD = 0") + loop.replace("**30", "**18") + END)
        assert code == 0 and "no NaN" in out or "no other" in out, out + err


def test_exit_codes(run, tmp_path):
    assert run("import sys\nsys.exit(5)")[0] == 5
    code, out, err = run("1 / 0")
    assert code == 3 and "ZeroDivisionError" in err
    code, _, err = run("this is no Python")
    assert code == 2 and "safeops run: " in err
    code, out, _ = run("import torch\ntorch.ones(1, requires_grad=True).log().sum().backward()")
    assert code == 0 and "in 0 steps" in out
    (tmp_path / "file").write_text("")
    code, _, err = run(HEAD, "--folder", str(tmp_path / "file" / "flight"))
    assert code == 2 and "recorder: folder: " in err
    assert cli.main(["run", "--steps", "3", str(tmp_path / "train.py")]) == 2


def test_a_module_its_arguments_and_the_options(run, tmp_path):
    source = HEAD + LOOPS["direct"] + "\nimport sys\nprint(__name__, sys.argv[1:])"
    options = "--action", "warn", "--folder", "there", "--steps", "3", "--save-weights"
    code, out, err = run(source, *options, module=True, arguments=["--lr", "1"])
    assert code == 1 and "# HERE" in out and "__main__ ['--lr', '1']" in out, out + err
    assert (tmp_path / "there" / "step-3" / "weights.pt").exists()


def test_it_leaves_torch_as_it_was(run):
    import torch

    def now():
        return torch.utils.data.DataLoader.__iter__, torch.optim.Optimizer.__init__, torch.autograd.backward

    before = now()
    run(HEAD + LOOPS["direct"])
    assert now() == before


def test_an_error_of_the_recording_is_not_the_scripts(run, monkeypatch):
    from safeops.debug.recorder import unedited

    monkeypatch.setattr(unedited, "model_of", lambda updated: 1 / 0)
    code, out, _ = run(HEAD.replace("BAD = 3", "BAD = 0") + LOOPS["direct"] + END)
    assert code == 0 and weights(out) and "the recording ended at step 0: ZeroDivisionError" in out


TORCHRUN = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
x = torch.rand(24, 4) + 0.5
if dist.get_rank() == 1:
    x[9] = 0
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for x, y in DataLoader(TensorDataset(x, torch.rand(24, 1)), 4):
    optimizer.zero_grad()
    ((model(x) - y) * x.log()).mean().backward()  # HERE
    optimizer.step()
total = sum(p.sum() for p in model.parameters())
assert total.isfinite()
print("weights of", dist.get_rank(), total.item())
"""
RUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("start", [[*RUN, "-m", "safeops"], ["-m", "safeops"]], ids=["inside it", "around it"])
def test_one_report_under_torchrun(tmp_path, start):
    (tmp_path / "train.py").write_text(TORCHRUN)
    inner = ["train.py"] if start[:2] == RUN[:2] else [*RUN, "train.py"]
    command = [sys.executable, *start, "run", "--record", "--action", "warn", "--folder", "there", *inner]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout.count("# HERE") == 1, run.stdout + run.stderr
    assert "step 3, rank 1: the loss is not finite" in run.stdout and run.stdout.count("1 of 6 steps not finite") == 1
    assert len({line.split()[-1] for line in weights(run.stdout)}) == 1 and len(weights(run.stdout)) == 2
    assert (tmp_path / "there" / "step-3" / "rank-1" / "report.txt").exists()


CHILDREN = """
import torch
from torch.utils.data import DataLoader, TensorDataset


def work():
    x = torch.rand(24, 4) + 0.5
    x[9] = 0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x, y in DataLoader(TensorDataset(x, torch.rand(24, 1)), 4, num_workers=1):
        ((model(x) - y) * x.log()).mean().backward()  # HERE
        optimizer.step()


if __name__ == "__main__":
    for method in ("fork", "spawn"):
        process = torch.multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
"""


@pytest.mark.slow
def test_the_processes_of_a_script_are_recorded(tmp_path):
    (tmp_path / "train.py").write_text(CHILDREN)
    command = [sys.executable, "-m", "safeops", "run", "--record", "train.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout.count("# HERE") == 2, run.stdout + run.stderr


ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(((model(x) - y) * x.log()).mean())  # HERE
    optimizer.step()
"""


@pytest.mark.slow  # it imports accelerate, which `make test-slow` installs
@pytest.mark.parametrize("bad", [3, 6])
def test_accelerates_loader_gives_its_batches_one_later(run, bad):
    code, out, err = run(HEAD.replace("BAD = 3", f"BAD = {bad}") + ACCELERATE)
    assert code == 1 and f"step {bad}: the loss is not finite: log" in out and "# HERE" in out, out + err


@pytest.mark.slow
def test_a_trainers_script_is_told_of_the_callback(run):
    code, out, err = run(
        HEAD
        + """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = model

    def training_step(self, batch, index):
        return ((self.network(batch[0]) - batch[1]) * batch[0].log()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
).fit(Module(), loader)
"""
    )
    assert code == 1 and "give its Trainer a safeops.integrations.lightning.SafeopsRecorder" in out, out + err
    assert "1 of 3 steps not finite" in out
