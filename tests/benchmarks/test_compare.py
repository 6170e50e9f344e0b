"""`--compare` times two checkouts in one run, and reports slower and missing functions."""

import json
from pathlib import Path

import pytest

from benchmarks import compare
from tests.benchmarks.test_runner import run_briefly

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.xdist_group("benchmarks"), pytest.mark.slow]

# A stand-in for an old checkout: this safeops without safe_log, and with a masked_mean that sleeps.
STAND_IN = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("safeops", {root!r} + "/safeops/__init__.py", submodule_search_locations=[
    {root!r} + "/safeops"])
real, stand_in = importlib.util.module_from_spec(spec), sys.modules[__name__]
sys.modules[__name__] = real
spec.loader.exec_module(real)

def masked_mean(*arguments, fast=real.masked_mean, **options):
    time.sleep(5e-3)
    return fast(*arguments, **options)

real.masked_mean, real.__file__ = masked_mean, __file__
del real.safe_log
"""


def test_compare(tmp_path, capsys):
    """Compared with an old build that lacks safe_log and has a slow masked_mean, both must show in the results."""
    if not list((ROOT / "safeops").glob("_C.*so")):
        pytest.skip("no extension is built")
    package = tmp_path / "safeops"
    package.mkdir()
    (package / "_C.abi3.so").touch()  # only its existence is checked; the extension is imported from this checkout
    (package / "__init__.py").write_text(STAND_IN.format(root=str(ROOT)))
    arguments = ["--compare", str(tmp_path), "--json", str(tmp_path / "found.json"), "--ops", "masked_mean,safe_log"]
    assert run_briefly(*arguments) in (0, 1)
    result = json.loads((tmp_path / "found.json").read_text())
    assert {(r["op"], r["direction"]) for r in result["speed"]} == {("masked_mean", d) for d in ("forward", "backward")}
    (forward, _) = result["speed"]
    assert forward["old_ms"] > 5 and forward["ratio"] == forward["old_ms"] / forward["new_ms"] > 2
    assert [r["more_us"] < -4000 for r in result["small"]] == [True, True]
    assert all("safe_log" in line for line in result["absent"]) and len(result["absent"]) == 2
    assert "old/new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"ratio": 0.95, "quiet": 1.0}, "yes"),
        ({"ratio": 0.94, "quiet": 1.0}, "NO"),
        ({"ratio": 0.5, "quiet": 0.0}, "?"),
        ({"more_us": 0.3}, "yes"),
        ({"more_us": 0.31}, "NO"),
    ],
)
def test_limits_of_a_comparison(record, expected):
    assert compare.verdict(record) == expected
    assert len(compare.missed({"speed": [record], "small": []})) == (expected != "yes")


def test_compare_refuses_what_is_not_built(tmp_path):
    with pytest.raises(SystemExit, match="make setup"):
        run_briefly("--compare", str(tmp_path), "--json", "-", "--ops", "masked_sum")
