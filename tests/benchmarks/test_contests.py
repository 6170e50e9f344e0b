"""benchmarks.rivals has all contests that were measured, and all contenders agree with the definition."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks.rivals import agreement, contest
from benchmarks.rivals.contest import OURS, Absent, Contest, library, pattern
from safeops.core.op import registry

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "NVIDIA-H100" / "rivals.md"
NAMES = contest.names()


def test_all_comparisons_of_the_results_are_there():
    measured = set(re.findall(r"^\| ([\w/]+) \| [^|]* \| (forward|total) \|", RESULTS.read_text(), re.MULTILINE))
    contests = {name: contest.build(name, "cpu", small=True) for name in NAMES if not of_loss_head(name)}
    assert measured == {
        (name, d) for name in contests for d in ("forward", "total") if d == "forward" or contests[name].backward
    }
    assert len(measured) == 81


def of_loss_head(name):
    """Returns True for divergences, token log probabilities, packed sequences and modules as heads, which have no
    published results yet."""
    return re.match(r"segment_|(linear_)?token_log_probs|\w+_div_with_logits|tv_with|linear_(\w+_div|tv)\b|head_", name)


def test_each_op_of_a_loss_head_has_a_contest():
    ops = [name for name in registry if of_loss_head(name)]
    assert len(ops) == 13 and {"linear_tv", "js_div_with_logits", "segment_max", "token_log_probs"} < {*ops}
    contested = {name.split("/")[0] for name in NAMES}
    assert not [name for name in (*ops, "linear_cross_entropy") if name not in contested]


def test_full_sizes_are_those_of_the_results():
    """The full shapes of contests that fit this machine's memory, and their bytes in MB, counted by hand, must be those
    of the published results."""
    assert contest.Operands("bf16", "cpu", small=False).size(8192, 128256) == (8192, 128256)
    images = contest.build("cross_entropy/bf16/images", "cpu", small=False)
    assert images.inputs[0].shape == (8, 21, 512, 512)
    assert [round(n / 1e6) for n in images.bytes] == [105, 298]
    ssim = contest.build("ssim/fp32", "cpu", small=False)
    assert ssim.inputs[0].shape == (8, 3, 512, 512) and [round(n / 1e6) for n in ssim.bytes] == [50, 126]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_we_and_the_rivals_that_are_here_agree_with_the_definition(name):
    entry = contest.build(name, "cpu", small=True)
    truth, dtype, judged = agreement.exact(entry), contest.dtype_of(name), []
    for who, rival in entry.contenders().items():
        if rival.cuda or rival.other:
            continue
        try:
            rivals_entry = contest.build(name, "cpu", small=True) if rival.overwrites else entry
            result = agreement.against(rivals_entry, rival, *truth)
        except Absent:
            continue
        assert agreement.agrees(result, dtype), (who, result)
        assert ("gradient" in result) == (rival.backward and entry.backward), who
        judged.append(who)
    assert judged[0] == OURS and (len(judged) > 1 or name.endswith("/cce"))


def wrong(value, gradient=1.0):
    """Returns the errors found in a rival of masked_mean with value and gradient off by these factors."""
    entry = contest.build("masked_mean/fp32", "cpu", small=True)

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * value

        @staticmethod
        def backward(ctx, dy):
            return dy * value * gradient

    rival = pattern(lambda x, m: Off.apply(entry.definition(x, m)))
    return agreement.against(entry, rival, *agreement.exact(entry))


def test_a_rival_that_is_off_does_not_agree():
    assert agreement.agrees(wrong(1.0), "fp32")
    assert not agreement.agrees(wrong(1.001), "fp32")
    off = wrong(1.0, gradient=1.001)
    assert off["value"] < 1e-5 and not agreement.agrees(off, "fp32")
    assert wrong(float("nan"))["value"] == float("inf")


def test_a_library_that_is_not_there_is_absent():
    with pytest.raises(Absent, match="no_such_library cannot be imported"):
        library("no_such_library.losses", "f", lambda f, x: f(x)).load()
    with pytest.raises(AttributeError):  # an installed library without the name: an error, not a rival that is absent
        library("math", "no_such_function", lambda f, x: f(x)).load()


def test_fla_is_taken_without_its_gluon_kernels(monkeypatch):
    """fla imports its Gluon kernels with any Triton that has Gluon, and fails with some; so they must be disabled."""
    package, backends, modules = (types.ModuleType(name) for name in ("fla", "fla.backends", "fla.modules"))
    backends.GluonBackend = type("GluonBackend", (), {"is_available": classmethod(lambda backend: True)})
    package.__path__, package.__spec__ = [], types.SimpleNamespace(name="fla")
    modules.FusedCrossEntropyLoss = lambda: lambda x, target: (x, backends.GluonBackend.is_available())
    for module in (package, backends, modules):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rival = contest.build("cross_entropy/bf16/32k", "cpu", small=True).contenders()["fla"]
    assert rival.load()(1, 2) == (1, False)


def test_ours_is_named_once():
    entry = Contest((), (), ours=abs, rivals={"a": abs}, definition=abs)
    assert list(entry.contenders()) == [OURS, "a"]
