"""`safeops trace SCRIPT` and `safeops audit SCRIPT`: an unmodified script, its report, its exit code."""

import subprocess
import sys
import textwrap

import pytest
import torch

from safeops import cli


@pytest.fixture
def run(tmp_path, capfd):
    def run(tool, source, *arguments, name="train.py", encoding="utf-8"):
        script = tmp_path / name
        script.write_bytes(textwrap.dedent(source).encode(encoding))
        code = cli.main([tool, str(script), *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


NAN = """
import torch

x = torch.zeros(3, requires_grad=True)
torch.sqrt(x).sum().backward()
print("the end")
"""
CLEAN = """
import sys
import torch

x = torch.ones(3, requires_grad=True)
torch.sqrt(x).sum().backward()
print(__name__, sys.argv[1:], x.grad.shape)
"""


def test_a_finding_is_exit_code_1(run):
    code, out, _ = run("trace", NAN)
    assert code == 1 and "the end" in out and "train.py:5 in <module> (the forward op)" in out and "safe_sqrt" in out
    code, out, _ = run("audit", NAN)
    assert code == 1 and "domain" in out and "train.py:5" in out and "runpy" not in out


TIMES_MASK = """
import torch

mask = torch.tensor([1.0, 0.0, 1.0])
x = torch.ones(3, requires_grad=True)
target = torch.tensor([1.0, float("nan"), 2.0])
error = (x - target).abs()
loss = (error * mask).sum() / mask.sum()
loss.backward()
"""


@pytest.mark.parametrize("mask", ["torch.tensor([1.0, 0.0, 1.0])", "torch.tensor([True, False, True])"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_a_mask_let_through_is_named_at_the_product(run, mask, value):
    source = TIMES_MASK.replace("torch.tensor([1.0, 0.0, 1.0])", mask).replace('"nan"', f'"{value}"')
    for tool in ("trace", "audit"):
        code, out, _ = run(tool, source)
        assert code == 1 and "train.py:8" in out and "safeops.masked_fill" in out
        assert f"{value.replace('nan', 'NaN')} * 0 is NaN" in out or "times-mask" in out
        assert "train.py:7" not in out or tool == "audit" or "what ran before" in out.split("train.py:7")[0]


def test_a_product_that_lets_nothing_through_is_not_blamed(run):
    source = TIMES_MASK.replace("[1.0, 0.0, 1.0])\nx", "[0.0, 1.0, 1.0])\nx")
    code, out, _ = run("trace", source)
    assert code == 1 and "* 0 is NaN" not in out and "train.py:7" in out


def test_waits_come_last_and_are_no_failure(run):
    source = "import torch\nx = torch.ones(3)\nx[x > 0].sum().item()\n"
    code, out, _ = run("audit", source)
    assert code == 0 and "boolean-index" in out and "sync-read" in out
    code, out, _ = run("audit", source + "torch.log(torch.zeros(2))\n")
    assert code == 1 and out.index("domain") < out.index("boolean-index")


def test_strict_counts_waits(tmp_path, capfd):
    script = tmp_path / "wait.py"
    script.write_text("import torch\ntorch.ones(3).sum().item()\n")
    assert cli.main(["audit", str(script)]) == 0 and cli.main(["audit", "--strict", str(script)]) == 1
    assert "sync-read" in capfd.readouterr().out


FILL = "import torch\ntorch.zeros(2).half().masked_fill(torch.tensor([True, False]), -1e9)\n"
WRITE = """
import torch

x = torch.ones(3, requires_grad=True)
y = torch.relu(x)
y[y > 0] = 0
y.sum().backward()
"""


IN_PLACE = "import torch\ntorch.zeros(2).half().fill_(-1e9)\n"
FULL = "import torch\ntorch.full((2,), fill_value=-1e6, dtype=torch.half)\n"
SAVED = "import torch\nd = torch.ones(2, requires_grad=True).exp()\nd /= 3\nd.sum().backward()\n"


@pytest.mark.parametrize("source, instead", [
    (FILL, "which saturates"),
    (IN_PLACE, "which saturates"),
    (FULL, "instead: a dtype that holds the number (float32), or"),
    (FULL, "torch.finfo(dtype).max (.min for a negative number)"),
    (WRITE, "x = safeops.masked_fill(x, mask"),
    (SAVED, "a new tensor: x = x / 3 for x /= 3,"),
])  # fmt: skip
def test_an_error_gets_the_replacement_too(run, source, instead):
    code, _, err = run("trace", source)
    assert code == 3 and instead in err.splitlines()[-1] and "--locate" in err


@pytest.mark.parametrize("source, instead", [
    (FILL, "safeops.masked_fill(x, mask, value), which saturates"),
    (IN_PLACE, "safeops.masked_fill(x, mask, value), which saturates"),
    (FULL, "torch.finfo(dtype).max (.min for a negative number)"),
])  # fmt: skip
def test_locate_gives_the_same_replacement(tmp_path, capfd, source, instead):
    (script := tmp_path / "train.py").write_text(source)
    assert cli.main(["trace", "--locate", str(script)]) == 3
    assert instead in capfd.readouterr().err.splitlines()[-1]


def test_locate_names_the_write(tmp_path, capfd):
    script = tmp_path / "write.py"
    script.write_text(WRITE)
    assert cli.main(["trace", "--locate", str(script)]) == 3
    err = capfd.readouterr().err
    assert "modified a tensor that backward needs" in err and "write.py:6" in err and "--locate" not in err


def test_locate_writes_the_line_anew(tmp_path, capfd):
    (script := tmp_path / "saved.py").write_text(SAVED)
    assert cli.main(["trace", "--locate", str(script)]) == 3
    err = capfd.readouterr().err
    assert "instead: d = d / 3, which makes a new tensor" in err and err.count("instead:") == 1


def test_advice_is_that_of_the_function_called(run):
    source = """
        import torch
        import torch.nn.functional as F

        x = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
        loss = F.normalize(x, dim=1).sum()
        loss.backward()
        """
    code, out, _ = run("trace", source)
    assert code == 1 and "safeops.normalize(x, dim=...)" in out and "safe_div" not in out


@pytest.mark.parametrize("how", [
    "", "init.orthogonal_(model.weight)", "init.sparse_(model.weight, 0.5)", "init.trunc_normal_(model.weight)",
    "init.dirac_(torch.nn.Conv1d(3, 3, 1).weight)", "init.eye_(model.weight)", "model.weight.data.normal_()",
])  # fmt: skip
def test_initial_values_are_not_what_ran_before(run, how):
    source = f"""
        import torch
        from torch.nn import init

        model = torch.nn.Linear(3, 1)
        {how}
        loss = torch.log(model(torch.zeros(1, 3)) * 0).sum()
        loss.backward()
        """
    code, out, _ = run("trace", source)
    assert code == 1 and "what ran before:" in out
    rows = [line.split()[1] for line in out.split("what ran before:")[1].splitlines()[2:]]
    assert rows == ["addmm", "mul", "log"]


def test_a_clean_script_is_0_and_gets_its_arguments(run):
    code, out, _ = run("trace", CLEAN, "--lr", "1")
    assert code == 0 and "__main__ ['--lr', '1']" in out and "no NaN or inf reached" in out
    code, out, _ = run("audit", CLEAN)
    assert code == 0 and "none of the patterns happened" in out


def test_the_run_stops_where_training_went_wrong(run):
    code, out, _ = run(
        "trace",
        """
        import torch

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            print("step", step)
            kept = torch.tensor(float(step != 2))
            (model(torch.ones(1, 2)) * kept / kept).sum().backward()
            optimizer.step()
        """,
    )
    assert code == 1 and "\nstep 2\n" in out and "\nstep 3\n" not in out and "is nan: there is no finite value" in out


def test_a_crash_keeps_its_own_traceback(run):
    code, out, err = run("trace", "def f():\n    raise ValueError('mine')\n\nf()\n")
    assert code == 3 and err.startswith("Traceback") and "ValueError: mine" in err and "train.py" in err
    assert "safeops/debug" not in err and "runpy" not in err and "ended with the exception above" in err
    code, out, err = run("audit", NAN + "raise SystemError('late')\n")
    assert code == 1 and "SystemError: late" in err and "domain" in out


WRONG_SHAPE = "import torch\nx = torch.ones(2, 3)\ntorch.nn.functional.layer_norm(x, (4,))\n"


def test_a_crash_in_the_traced_ops_keeps_its_line(run):
    code, _, err = run("trace", WRONG_SHAPE)
    assert code == 3 and 'train.py", line 3' in err and "normalized_shape" in err


@pytest.mark.parametrize("arguments", [["trace"], ["trace", "--locate"], ["audit"]])
def test_a_traceback_is_what_python_prints(tmp_path, capfd, arguments):
    (script := tmp_path / "train.py").write_text(WRONG_SHAPE)
    python = subprocess.run([sys.executable, script], capture_output=True, text=True).stderr
    assert "functional.py" in python and cli.main([*arguments, str(script)]) == 3
    assert capfd.readouterr().err.startswith(python)


@pytest.mark.parametrize("ending, expected", [("0", 0), ("7", 7), ("None", 0), ("'words'", 1)])
def test_sys_exit_passes_on(run, ending, expected):
    code, _, err = run("trace", f"import sys\nsys.exit({ending})\n")
    assert code == expected and ("words" in err) == (expected == 1)


def test_what_cannot_be_run_is_exit_code_2(run, tmp_path, capfd):
    code, _, err = run("trace", "x = (\n")
    assert code == 2 and "train.py does not parse" in err
    code, _, err = run("audit", "{}", name="book.ipynb")
    assert code == 2 and "is a notebook" in err and "nbconvert" in err
    assert cli.main(["trace", str(tmp_path / "absent.py")]) == 2 and "no such file" in capfd.readouterr().err
    assert cli.main(["trace", str(tmp_path)]) == 2 and "is a folder" in capfd.readouterr().err
    code, _, err = run("trace", "# -*- coding: nonsense -*-\n")
    assert code == 2 and "nonsense" in err
    code, _, err = run("trace", "x = 'é'\n", encoding="latin-1")
    assert code == 2 and "train.py" in err
    assert cli.main(["audit", "--select", "nonsense", "x.py"]) == 2
    assert cli.main(["trace", "--last", "-1", "x.py"]) == 2
    assert cli.main(["trace", "--html", str(tmp_path / "absent" / "page.html"), "x.py"]) == 2


@pytest.mark.parametrize("tool", ["trace", "audit"])
def test_a_module_that_cannot_be_run_is_exit_code_2(tool, tmp_path, monkeypatch, capfd):
    package = tmp_path / f"pk_{tool}"
    package.mkdir()
    sources = {"__init__": "", "bad": "x = (\n", "needs": "import nowhere", "ends": "import sys; sys.exit(2)"}
    for name, text in sources.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for module, code, words in (
        ("nomod", 2, "No module named nomod"),
        ("no.mod", 2, "No module named 'no'"),
        ("pk.nomod", 2, "No module named pk.nomod"),
        ("pk", 2, "'pk' is a package and cannot be directly executed"),
        ("pk.bad", 2, "pk.bad does not parse: '(' was never closed (bad.py, line 1)"),
        ("pk.needs", 3, "pk.needs ended with the exception above"),
        ("pk.ends", 2, ""),
    ):
        assert cli.main([tool, "-m", module.replace("pk", package.name)]) == code, module
        out, err = capfd.readouterr()
        assert words.replace("pk", package.name) in err
        assert module in ("pk.needs", "pk.ends") or err.startswith(f"safeops {tool}: ") and not out, (module, out, err)


@pytest.mark.parametrize("tool", ["trace", "audit"])
def test_ctrl_c_is_130(run, tool):
    assert run(tool, "raise KeyboardInterrupt\n")[0] == 130


@pytest.mark.parametrize("tool", ["trace", "audit", "lint", "doctor"])
def test_an_unknown_option_prints_the_usage_of_the_command(capsys, tool):
    with pytest.raises(SystemExit) as end:
        cli.main([tool, "--foo"] + ["x.py"] * (tool != "doctor"))
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith(f"usage: safeops {tool} ") and "arguments: --foo" in err


def test_a_declared_encoding_is_read(run):
    code, out, _ = run("trace", "# -*- coding: latin-1 -*-\nprint('é' == chr(233))\n", encoding="latin-1")
    assert code == 0 and "True" in out


def test_a_script_imports_what_lies_beside_it(run, tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 42\n")
    before = list(sys.path)
    code, out, _ = run("audit", "import neighbour\nprint(neighbour.value)\n")
    assert code == 0 and "42" in out and sys.path == before


@pytest.mark.slow
def test_the_command_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(NAN)
    run = subprocess.run([sys.executable, "-m", "safeops", "trace", script], capture_output=True, text=True)
    assert run.returncode == 1 and "safe_sqrt" in run.stdout
    help = subprocess.run([sys.executable, "-m", "safeops", "trace", "--help"], capture_output=True, text=True).stdout
    assert "Exit code: 0 nothing found, 1 something found (whatever else happened), 2 the script could" in " ".join(
        help.split()
    )


def test_a_run_in_which_no_weight_moved_is_a_finding(run):
    """A run in which every step overflows must be a finding; a single overflow, which GradScaler handles, must not."""
    step = """
        import torch

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        for _ in range({steps}):
            optimizer.zero_grad()
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = model(torch.ones(8, 4)).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(model.weight.isfinite().all())
        """
    code, out, _ = run("trace", step.format(steps=5))
    assert code == 1 and "in 5 of 5 steps" in out and "no weight has moved in this run" in out
    assert "  instead  the scale did not fall far enough" in out and "instead  nothing" not in out
    code, out, _ = run("trace", step.format(steps=25))
    assert code == 0 and "of 25 steps" in out and "no bug while it stays rare" in out
    assert "safeops trace: GradScaler handled this; no other NaN or inf reached a loss" in out


def test_a_long_run_tells_how_far_it_is(tmp_path, capfd, monkeypatch):
    (script := tmp_path / "train.py").write_text(CLEAN)
    command = ["trace", "--html", str(tmp_path / "page.html"), str(script)]
    assert cli.main(command) == 0 and "step" not in capfd.readouterr().err
    monkeypatch.setattr("safeops.debug.command.script.PROGRESS", 0)
    assert cli.main(command) == 0 and "safeops trace: step 1 after 0 s\n" in capfd.readouterr().err


def test_the_report_is_printed_once(run):
    code, out, err = run("trace", NAN + "raise ValueError('mine')\n")
    assert code == 1 and out.count("safe_sqrt") == 1 and "safe_sqrt" not in err and "ValueError: mine" in err
    code, out, err = run("trace", NAN + "raise SystemExit(7)\n")
    assert code == 1 and out.count("safe_sqrt") == 1 and "Warning" not in err


CHILD = """
import torch
import torch.multiprocessing as mp


def train(rank, value):
    x = torch.full((3,), float(value), requires_grad=True)
    torch.sqrt(x).sum().backward()


if __name__ == "__main__":
    for value in (1, {value}):
        mp.start_processes(train, (value,), 1, start_method="{method}")
    print("the end")
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
@pytest.mark.parametrize("tool", ["trace", "audit"])
def test_processes_that_a_script_starts_are_watched(run, tool, method):
    code, out, err = run(tool, CHILD.format(value=0, method=method))
    assert code == 1 and "train.py:8 in train" in out and "safe_sqrt" in out, (out, err)
    assert out.count("Process-") == 1, "it is told of the second process alone"
    code, out, _ = run(tool, CHILD.format(value=2, method=method))
    assert code == 0 and "the end" in out and "Process-" not in out


@pytest.mark.timeout(60)
def test_a_fork_of_a_process_that_has_used_openmp_does_not_hang(run):
    """Threads of OpenMP do not live on in a forked child, where a parallel loop waits for them for ever."""
    source = CHILD.format(value=0, method="fork")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.zeros(1 << 20).add_(1)
        code, out, _ = run("trace", source)
    finally:
        torch.set_num_threads(before)
    assert code == 1 and "train.py:8 in train" in out


def test_a_fork_does_not_tell_what_its_parent_found(run):
    source = CHILD.format(value=1, method="fork")
    before = "torch.sqrt(torch.zeros(1, requires_grad=True))"
    code, out, _ = run("audit", source.replace("    for value", f"    {before}\n    for value"))
    assert code == 1 and out.count("domain:") == 1 and "Process-" not in out


@pytest.mark.parametrize("tool", ["trace", "audit"])
def test_a_module_is_run_by_its_name(tmp_path, tool):
    (tmp_path / "training.py").write_text(NAN + "import sys\nprint(__name__, sys.argv[1:])\n")
    command = [sys.executable, "-m", "safeops", tool, "-m", "training", "--lr", "1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1 and "__main__ ['--lr', '1']" in result.stdout and "training.py:5" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["trace", "audit"])
def test_torchrun_starts_its_workers_under_the_tool(tmp_path, tool):
    (tmp_path / "train.py").write_text(NAN)
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", str(tmp_path / "train.py")]
    result = subprocess.run([sys.executable, "-m", "safeops", tool, "-m", *torchrun], capture_output=True, text=True)
    assert result.returncode == 1 and "train.py:5" in result.stdout and "safe_sqrt" in result.stdout, result.stderr
