"""The command line: what it prints, what it needs, how it exits."""

import json
import operator
import subprocess
import sys

import pytest

import safeops
from safeops import cli
from safeops.core import failures

OPS = {
    "huber_loss", "l1_loss", "masked_fill", "masked_mean", "masked_sum", "mse_loss", "safe_div", "smooth_l1_loss"
}  # fmt: skip


def exit_code(*argv):
    """The exit status that a shell sees: argparse raises SystemExit, commands return a number."""
    try:
        return cli.main(list(argv))
    except SystemExit as leaving:
        return leaving.code


def test_no_arguments_print_help(capsys):
    assert exit_code() == 0
    out = capsys.readouterr().out
    assert "usage: safeops" in out and "demo" in out and "doctor" in out


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"safeops {safeops.__version__}\n"


@pytest.mark.parametrize("argv", [("nope",), ("doctor", "--nope"), ("demo", "--steps", "0"), ("demo", "--steps", "x")])
def test_bad_arguments_exit_2(argv, capsys):
    assert exit_code(*argv) == 2
    assert "usage: safeops" in capsys.readouterr().err


def test_doctor_shows_every_op(capsys):
    assert exit_code("doctor") == 0
    out = capsys.readouterr().out
    shown = {line.split()[0] for line in out.splitlines() if line}
    assert OPS <= shown
    assert f"torch           {__import__('torch').__version__}" in out
    (composed,) = [line.split() for line in out.splitlines() if line.startswith("lpips_distance ")]
    assert composed == ["lpips_distance", "kernel", "its", "parts'"], "made of others, and not without a kernel"


def test_doctor_says_how_much_has_failed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path))
    for number in (0, 1):
        cli.main(["doctor"])
        assert f"failures        {number} recorded in {tmp_path}/failed.json\n" in capsys.readouterr().out
        failures.save({("mse_loss", None): "value: wrong"}, "a GPU", "2026-01-02")
    (tmp_path / "failed.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match="failed.json is not used"):
        cli.main(["doctor"])


def test_doctor_json_agrees_with_the_routes(capsys):
    from safeops.core.op import registry

    assert exit_code("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert OPS <= {op["name"] for op in report["ops"]}
    users = {"debug.trace": "health"}
    for op in report["ops"]:
        operator.attrgetter(op["name"])(safeops)  # the listed name exists, so a user can call it
        op_record = registry[users.get(op["name"], op["name"])]
        assert op["cpu"] == ("kernel" if op_record.cpu else "composite")
    built = report["extensions"]["_C"] == "loaded"
    assert (report["cpu"]["kernels"] is not None) == built


# Modules that a torch-only installation lacks: None in sys.modules hides them from import and find_spec.
TORCH_ONLY = """
import sys
for name in ("numpy", "rich", "matplotlib", "skimage", "typer", "tqdm", "triton", "libcst", "pytest", "PIL"):
    sys.modules[name] = None
sys.argv = ["safeops", *{argv!r}]
import warnings; warnings.simplefilter("ignore")
import runpy; runpy.run_module("safeops", run_name="__main__", alter_sys=False)
"""


def torch_only(*argv):
    code = TORCH_ONLY.format(argv=list(argv))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_doctor_needs_torch_alone():
    done = torch_only("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["triton"] is None
    assert all(op["cuda_kernel"] != "Triton" for op in report["ops"])


def test_demo_names_the_missing_packages_and_the_extra():
    done = torch_only("demo")
    assert done.returncode == 2
    assert "numpy, scikit-image, matplotlib, rich" in done.stderr and 'pip install "safeops[demo]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_names_the_one_missing_package(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert exit_code("demo") == 2
    assert "needs matplotlib: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("place, reason", [("", "it is a folder"), ("nowhere/demo.png", "No such file or directory")])
def test_demo_refuses_an_unwritable_out_before_it_trains(place, reason, tmp_path, capsys):
    out = str(tmp_path / place)
    assert exit_code("demo", "--out", out) == 2
    assert capsys.readouterr().err == f"safeops demo: cannot write --out {out}: {reason}\n"
    assert list(tmp_path.iterdir()) == []


def test_demo_refuses_a_device_that_is_not_there(tmp_path, capsys):
    assert exit_code("demo", "--device", "xpu:7", "--out", str(tmp_path / "demo.png")) == 2
    assert "device 'xpu:7' cannot be used" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -c 'import sys; from safeops.cli import main; sys.exit(main())' doctor"
    # The reader closes the pipe before the first line is written.
    run = subprocess.run(["bash", "-c", f"(sleep 0.1; {command}) | true"], capture_output=True, text=True)
    assert run.stderr == ""
