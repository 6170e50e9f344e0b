"""Type checkers see the arguments and the result of each public function, also behind decorators."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import safeops
from tests.callers import calls

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("type_stubs", ROOT / "scripts" / "type_stubs.py")
type_stubs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(type_stubs)

FUNCTIONS = [f"safeops.{name}" for name in safeops.__all__ if inspect.isfunction(getattr(safeops, name))]
FUNCTIONS += [f"safeops.nn.{name}" for name, x in vars(safeops.nn).items() if inspect.isclass(x) and name[0] != "_"]
FUNCTIONS += [f"safeops.debug.{name}" for name in ("trace", "audit", "no_sync")]
FUNCTIONS += [f"safeops.distributed.{name}" for name in safeops.distributed.__all__]
# Functions with an argument of any type: any function, options of any op, or a process group.
TAKE_ANYTHING = {"safeops.fp32_region", "safeops.safe_mode", "safeops.warmup"}
TAKE_ANYTHING |= {name for name in FUNCTIONS if ".debug." in name or ".distributed." in name}
CALLS = """
from typing import assert_type
import torch
from torch import Tensor
import safeops

x = torch.ones(3)
assert_type(safeops.mse_loss(x, x, mask=x > 0, denominator=3), Tensor)
assert_type(safeops.nn.MSELoss(reduction="sum")(x, x, weight=x), Tensor)
assert_type(safeops.kl_div(x, x, reduction="batchmean", empty="nan"), Tensor)
assert_type(safeops.masked_compact(x, x > 0, capacity=3).values, Tensor)
assert_type(safeops.token_log_probs(x, x).entropy, Tensor)
assert_type(safeops.token_log_probs(x, x, with_argmax=True).argmax, Tensor)
assert_type(safeops.token_log_probs(x, x, support=(x, x), outside="mask").outside, Tensor)
assert_type(safeops.cross_entropy(x, x, mask=x > 0), Tensor)
assert_type(safeops.cross_entropy(x, x, support=x, support_threshold=x).outside, Tensor)
assert_type(safeops.nn.CrossEntropyLoss(outside="mask")(x, x, support=x > 0).loss, Tensor)
assert_type(safeops.head_loss(torch.nn.Tanh(), x, x, loss="tv", mask=x > 0), Tensor)
assert_type(safeops.head_loss(lambda hidden: hidden * 2, x, x, loss="token_log_probs").entropy, Tensor)
assert_type(safeops.combine_losses({"a": x, "b": (x, 2.0)}).names, tuple[str, ...])
assert_type(safeops.to_device({"x": x}, "cpu"), dict[str, Tensor])
assert_type(safeops.distributed.global_count([x]), Tensor)
assert_type(safeops.distributed.shift_labels(x, ignore_index=0), Tensor)

@safeops.fp32_region
def region(a: int) -> str: return ""

@safeops.fp32_region()
def called_region(a: int) -> str: return ""

@safeops.safe_mode
def mode(a: int) -> str: return ""

assert_type((region(1), called_region(1), mode(1)), tuple[str, str, str])
"""
WRONG = """
safeops.mse_loss(x, x, maks=x > 0)
safeops.nn.MSELoss(delta=1)
safeops.mse_loss(x, x, reduction="average")
safeops.mse_loss(x, x, reduction="batchmean")
safeops.nn.MSELoss(empty="none")
safeops.ssim(x, x, padding="full")
safeops.combine_losses({"a": x}, nonfinite="ignore")
safeops.huber_loss(x, x, "mean", x)
safeops.clip_grad_norm_([x], 1.0, foreach=True)
region("a")
"""


def run(command, **options):
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, **options)


def mypy(folder, *files):
    """Runs mypy. Returns ([(line, error)], [revealed type])."""
    out = run(["mypy", "--check-untyped-defs", "--cache-dir", folder / "cache", *files]).stdout
    return re.findall(r":(\d+): error: (.*)", out), re.findall(r'note: Revealed type is "(.*)"', out)


def pyright(folder, *files):
    config = {"include": [str(file) for file in files], "strict": [], "reportOptionalMemberAccess": False}
    config |= {"reportPossiblyUnbound": False, "reportPrivateImportUsage": False}  # from torch and __doc__
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    results = run(["pyright", "--project", folder, "--pythonpath", sys.executable, "--outputjson"])
    rows = json.loads(results.stdout)["generalDiagnostics"]
    errors = [(row["range"]["start"]["line"] + 1, row["message"]) for row in rows if row["severity"] == "error"]
    return errors, [row["message"] for row in rows if row["severity"] == "information"]


@pytest.mark.parametrize("path", type_stubs.texts(), ids=lambda path: path.name)
def test_types_are_those_of_the_signatures(path):
    assert path.read_text() == type_stubs.texts()[path], "a signature has changed: make types"


CHOICES = [
    (name, key)
    for name in calls.CALLS
    for key in inspect.signature(getattr(safeops, name)).parameters
    if key in type_stubs.CHOICES and key not in calls.tensors(name)
]


@pytest.mark.parametrize("name, key", CHOICES)
def test_the_strings_of_a_type_are_those_that_the_function_takes(name, key):
    with pytest.raises(ValueError, match=f"^{name}: {key} must be one of ") as error:
        calls.call(name, **{key: "?"})
    choices = str(error.value).partition("one of ")[2].rpartition(", got")[0].replace("'", '"')
    stubs = re.findall(rf"^def {name}\((.*?)\) ->", type_stubs.functions(), re.DOTALL | re.MULTILINE)
    assert stubs and all(f"{key}: Literal[{choices}]" in " ".join(stub.split()) for stub in stubs)


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
class TestCheckers:
    def test_examples(self, checker, tmp_path):
        assert checker(tmp_path, *(ROOT / "examples").glob("*.py"))[0] == []

    def test_calls(self, checker, tmp_path):
        """The type checker must accept all right calls, and report each wrong one."""
        (tmp_path / "calls.py").write_text(CALLS + WRONG)
        errors, _ = checker(tmp_path, tmp_path / "calls.py")
        begin, count = CALLS.count("\n") + 2, WRONG.count("\n") - 1
        assert sorted({int(line) for line, _ in errors}) == list(range(begin, begin + count)), errors

    def test_every_function_has_its_types(self, checker, tmp_path):
        lines = [f"reveal_type({name})\n" for name in FUNCTIONS]
        (tmp_path / "functions.py").write_text("import safeops\n" + "".join(lines))
        errors, revealed = checker(tmp_path, tmp_path / "functions.py")
        assert errors == [] and len(revealed) == len(FUNCTIONS)
        untyped = [x for x, text in zip(FUNCTIONS, revealed) if re.search(r"(->|\w:) (Any|Unknown)\b", text)]
        assert set(untyped) <= TAKE_ANYTHING
