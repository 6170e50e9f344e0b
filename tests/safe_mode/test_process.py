"""A whole process runs in safe mode: with `safeops run`, or with SAFEOPS_SAFE=1 if the script imports safeops."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch
{imports}
hidden = torch.full((1, 2), -torch.inf)
for _ in range(3):
    print(sys.argv[1:], __name__, hidden.softmax(1).tolist())
{end}
"""
SAFE, PLAIN = "['a', '--b'] __main__ [[0.0, 0.0]]", "['a', '--b'] __main__ [[nan, nan]]"


def python(tmp_path, *prefix, imports="", end="", safe=None):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(imports=imports, end=end))
    environment = {key: value for key, value in os.environ.items() if key != "SAFEOPS_SAFE"}
    environment |= {} if safe is None else {"SAFEOPS_SAFE": safe}
    command = [sys.executable, *prefix, str(script), "a", "--b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


RUN = "-m", "safeops", "run"


def reported(stderr):
    lines = stderr.splitlines()
    assert lines[-3] == "safe_mode: 3 calls replaced in 1 line", stderr
    assert lines[-1].split()[:3] == ["3", "softmax", "masked_softmax"] and lines[-1].endswith("train.py:6")
    return stderr.count("safe_mode:") == 1


def test_run(tmp_path):
    code, out, err = python(tmp_path, *RUN)
    assert code == 0 and out == [SAFE] * 3 and reported(err)


def test_run_a_module(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/prices.py").write_text("EACH = 2")
    (tmp_path / "package/train.py").write_text(SCRIPT.format(imports="from .prices import EACH", end="sys.exit(EACH)"))
    command = [sys.executable, *RUN, "-m", "package.train", "a", "--b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout.splitlines() == [SAFE] * 3 and reported(done.stderr)
    done = subprocess.run([*command[:5], "no.where"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2 and "No module named 'no'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_variable(tmp_path):
    code, out, err = python(tmp_path, imports="import safeops", safe="1")
    assert code == 0 and out == [SAFE] * 3 and reported(err)
    for safe in (None, "0", ""):
        code, out, err = python(tmp_path, imports="import safeops", safe=safe)
        assert (code, out, err) == (0, [PLAIN] * 3, "")


def test_both_report_once(tmp_path):
    code, out, err = python(tmp_path, *RUN, safe="1", imports="import safeops")
    assert code == 0 and out == [SAFE] * 3 and reported(err)


def test_another_value_is_refused(tmp_path):
    code, out, err = python(tmp_path, imports="import safeops", safe="yes")
    assert code == 1 and "ValueError: SAFEOPS_SAFE must be 0 or 1, got 'yes'" in err and not out


def test_the_scripts_end_is_its_own(tmp_path):
    code, out, err = python(tmp_path, *RUN, end="sys.exit(7)")
    assert code == 7 and reported(err)
    code, out, err = python(tmp_path, *RUN, end="torch.nn.functional.mse_loss(hidden, 3)")
    assert code == 1 and reported(err) and "train.py ended with the exception above" in err
    assert "safeops/safe" not in err.replace(os.sep, "/"), "what ran the script is not shown"


@pytest.mark.parametrize("name, why", [("nowhere.py", "no such file"), ("bad.py", "does not parse")])
def test_what_cannot_be_run(tmp_path, name, why, capsys):
    from safeops import cli

    (tmp_path / "bad.py").write_text("def")
    assert cli.main(["run", str(tmp_path / name)]) == 2
    assert why in capsys.readouterr().err
