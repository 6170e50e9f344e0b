"""debug.sketch and `safeops sketch` write files; `safeops compare` compares them, and refuses what it cannot."""

import collections
import copy
import json
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from safeops import cli
from safeops.debug import compare, sketch
from tests.debug.compared import dropping, network, planted, transposed, wrong_mask


def sketched(file, model, batch, **others):
    model = copy.deepcopy(model)
    with sketch(model, file, **others):
        model(batch).sum().backward()
    return str(file)


@pytest.fixture
def command(capfd):
    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_equal_and_planted(tmp_path, command):
    model, batch = network("transformer")
    a, b = (sketched(tmp_path / name, model, batch) for name in ("a.json", "b.json"))
    code, out, _ = command("compare", a, b)
    assert code == 0 and "forward: no difference beyond rounding in" in out
    for where, change, named in (
        ("blocks.1.square", transposed, "blocks.1.square (Linear), the output"),
        ("blocks.2.drop", dropping, "blocks.2.drop (Dropout), the output"),
        ("blocks.1.attention", wrong_mask, "blocks.1.attention.out (Linear), the output"),
    ):
        c = sketched(tmp_path / "c.json", planted(model, where, change), batch)
        code, out, _ = command("compare", a, c)
        assert code == 1 and f"forward: the first difference is at {named}" in out
        assert command("compare", a, c, "--slack", "1e9")[0] == 0
    # compare() finds the same difference without files.
    kept = compare(model, planted(model, "blocks.1.attention", wrong_mask), batch)
    assert re.search(r"differs +by (\S+) of", out)[1] == re.search(r"differs +by (\S+) of", str(kept))[1]


def test_a_file_is_a_few_kilobytes_a_module_and_holds_no_tensor(tmp_path):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    file = tmp_path / "a.json"
    with sketch(model, file):
        model(torch.randn(64, 512)).sum().backward()
    assert file.stat().st_size < 4 * 8_000 + 4_000
    contents = json.loads(file.read_text())
    (first,) = [e for e in contents["entries"] if (e["phase"], e["module"]) == ("forward", "0")]
    assert first["shape"] == [64, 512] and first["kind"] == "Linear" and len(first["stats"]) == 71


def test_gradients_are_those_that_the_optimizer_reads(tmp_path, command):
    model = nn.Linear(4, 1)
    files = []
    for clip in (None, 1e-3):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        files.append(tmp_path / f"{clip}.json")
        with sketch(net, files[-1]):
            net(torch.ones(3, 4)).sum().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    code, out, _ = command("compare", *files)
    assert code == 1 and "backward: the first difference is at Linear, the gradient of its parameters" in out


@pytest.mark.parametrize("step", [True, False])
def test_a_loss_scale_is_divided_out(tmp_path, command, step):
    model, batch = network("perceptron")
    a = sketched(tmp_path / "a.json", model, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with sketch(model, tmp_path / "b.json", scaler=scaler):
        scaler.scale(model(batch)).backward()
        if step:
            scaler.step(optimizer)
            scaler.update()
    assert command("compare", a, tmp_path / "b.json")[0] == 0


# ---- scripts

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_function = torch.nn.MSELoss()
for step in range(4):
    x = torch.randn(8, 4)
    if "--wrong" in sys.argv and step == 2:
        model[2].weight.data.neg_()
    optimizer.zero_grad()
    loss_function(model(x), x[:, :1]).backward()
    try:
        optimizer.step()
    except Exception:
        pass
    print("step", step)
"""


def script(folder, text=SCRIPT):
    (folder / "train.py").write_text(textwrap.dedent(text))
    return folder / "train.py"


def test_a_script_is_run_up_to_its_step(tmp_path, command):
    train = script(tmp_path)
    for step, differs in ((1, False), (3, True)):
        code, out, _ = command("sketch", "--step", step, tmp_path / "a.json", train)
        assert code == 0 and out.count("step") == step and f"14 tensors of step {step}" in out
        assert command("sketch", "--step", step, tmp_path / "b.json", train, "--wrong")[0] == 0
        code, out, _ = command("compare", tmp_path / "a.json", tmp_path / "b.json")
        assert code == differs and ("difference is at Sequential.2 (Linear), the output" in out) == differs
        assert ("MSELoss" in (tmp_path / "a.json").read_text()) and "(Sequential)" not in out


def test_a_script_without_an_optimizer_is_one_step(tmp_path, command):
    train = script(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n")
    code, out, _ = command("sketch", tmp_path / "a.json", train)
    assert code == 0 and "4 tensors of the whole script" in out


@pytest.mark.parametrize("text, words, code", [
    (SCRIPT, "the script ended after 4 optimizer steps, before step 9", 2),
    ("x = 1", "the script ended after 0 optimizer steps, before step 9", 2),
    ("raise KeyError(3)", "ended with the exception above", 3),
    ("def", "does not parse", 2),
])  # fmt: skip
def test_scripts_without_the_step(tmp_path, command, text, words, code):
    result = command("sketch", "--step", 9, tmp_path / "a.json", script(tmp_path, text))
    assert result[0] == code and words in result[2] and not (tmp_path / "a.json").exists()


# ---- bad input


@pytest.mark.parametrize("text, words", [
    (None, "no such file: "), ("", "holds no sketch"), ("{}", "holds no sketch"), ("[1]", "holds no sketch"),
    ('{"safeops_sketch": 7}', "is of format 7, safeops"),
    ('{"safeops_sketch": 1, "ranks": 1, "facts": {}, "entries": [{"phase": "forward"}]}', "is damaged"),
])  # fmt: skip
def test_files_that_are_no_sketch(tmp_path, command, text, words):
    a = sketched(tmp_path / "a.json", nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), torch.ones(1, 2))
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    code, out, err = command("compare", a, tmp_path / "b.json")
    assert code == 2 and not out and words in err and err.count("\n") == 1 and err.startswith("safeops compare: ")


def test_bad_calls(tmp_path, command):
    a = sketched(tmp_path / "a.json", nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), torch.ones(1, 2))
    for arguments, words in (
        (("compare", a, tmp_path), "is a folder"),
        (("compare", a, a, "--html", "/no/such/page.html"), "no such folder"),
        (("compare", a, a, "--slack", "0"), "--slack must be positive"),
        (("sketch", "/no/such/a.json", script(tmp_path)), "no such folder"),
        (("sketch", "--step", 0, a, script(tmp_path)), "--step must be at least 1"),
        (("sketch", a, tmp_path / "no.py"), "no such file"),
    ):
        code, out, err = command(*arguments)
        assert code == 2 and words in err and err.count("\n") == 1, err
    model = nn.Linear(2, 2)
    for call, error, words in (
        (lambda: sketch(3, a), TypeError, "model must be a torch.nn.Module or None, got int"),
        (lambda: sketch(model, 3), TypeError, "file must be a path, got int"),
        (lambda: sketch(model, tmp_path), IsADirectoryError, "is a folder"),
        (lambda: sketch(model, a).__enter__().__exit__(None, None, None), RuntimeError, "no module was called inside"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not model._forward_hooks


def test_another_model_has_nothing_in_common(tmp_path, command):
    x, y = (nn.Sequential(collections.OrderedDict({name: nn.Linear(2, n)})) for name, n in (("x", 1), ("y", 3)))
    a, b = (sketched(tmp_path / name, model, torch.ones(1, 2)) for name, model in (("a", x), ("b", y)))
    code, _, err = command("compare", a, b)
    assert code == 2 and err == (
        "safeops compare: nothing to compare: Sequential, forward: (1, 1) and (1, 3); Sequential, backward: (1, 1) and "
        "(1, 3); only in a: x (Linear); only in b: y (Linear)\n"
    )


def test_the_page_marks_the_first_difference(tmp_path, command):
    model, batch = network("transformer")
    a = sketched(tmp_path / "a<b>.json", model, batch)
    b = sketched(tmp_path / "b.json", planted(model, "blocks.1.square", transposed), batch)
    assert command("compare", a, b, "--html", tmp_path / "page.html")[0] == 1
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 4 and page.count('class="first"') == 4
    assert page.count('<polyline class="a"') == page.count('<polyline class="b"') == 2
    assert "a&lt;b&gt;.json" in page and "<b>" not in page and "<script" not in page and "http" not in page[700:]
    (row,) = re.findall(r'<tr class="found differs"><td>blocks.1.square \(Linear\)</td><td>output</td>.*', page)
    assert row.count(">inf<") == 0 and page.count("<tr class") == len(compare(model, model, batch).differences) - 1


@pytest.mark.slow
def test_the_command_runs_in_a_process(tmp_path):
    run = [sys.executable, "-m", "safeops"]
    for name, arguments in (("a", []), ("b", ["--wrong"])):
        sketching = [*run, "sketch", "--step", "3", tmp_path / name, script(tmp_path), *arguments]
        subprocess.run(sketching, check=True, capture_output=True)
    result = subprocess.run([*run, "compare", tmp_path / "a", tmp_path / "b"], capture_output=True, text=True)
    assert result.returncode == 1 and "Sequential.2 (Linear)" in result.stdout
