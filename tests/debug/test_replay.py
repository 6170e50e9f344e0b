"""`safeops replay` runs a recorded step again: in another program, dtype and torch, or says why it cannot."""

import json
import runpy
import shutil

import pytest
import torch

from safeops import cli

SCRIPT = """
import torch
import safeops


class Net(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.linear(x))


def build():
    model = Net()
    return model, lambda batch: (model(batch["x"]) * batch["scale"]).exp().mean().backward()


def wrong():
    return Net()


def main():
    torch.manual_seed(SEED)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    recorder = safeops.debug.recorder(model, optimizer, folder=FOLDER, action="record", save_weights=SAVE)
    for i in range(3):
        batch = {"x": torch.rand(8, 4), "scale": torch.tensor(100.0 if i == 2 else 1.0), "name": "text"}
        if MORE:
            batch["more"] = torch.ones(1)
        with recorder.step(batch):
            optimizer.zero_grad()
            noise = torch.rand(8, 1)
            loss = (model(batch["x"] * noise) * batch["scale"]).exp().mean()  # HERE
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""


def write(folder, name="train.py", width=3, seed=0, save=True, more=False):
    script = folder / name
    words = {"WIDTH": width, "SEED": seed, "SAVE": save, "FOLDER": repr(str(folder / "flight")), "MORE": more}
    text = SCRIPT
    for word, value in words.items():
        text = text.replace(word, str(value))
    script.write_text(text)
    return str(script)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with the script that ran, and its flight/step-3."""
    folder = tmp_path_factory.mktemp("recorded")
    runpy.run_path(write(folder), run_name="__main__")
    return folder


def replay(capsys, *words):
    code = cli.main(["replay", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_is_in_the_folder(recorded):
    step = recorded / "flight" / "step-3"
    assert {path.name for path in step.iterdir()} == {
        "report.txt", "page.html", "step.pt", "weights.json", "weights.pt", "about.json",
    }  # fmt: skip
    assert "exp(" in (step / "report.txt").read_text() and "<html" in (step / "page.html").read_text()
    saved = torch.load(step / "step.pt", weights_only=False)
    assert saved["batch"]["scale"] == 100 and saved["batch"]["name"] == "text"
    assert json.loads((step / "about.json").read_text())["torch"] == torch.__version__
    assert json.loads((step / "weights.json").read_text())["linear.weight"][:2] == [[3, 4], "float32"]


def test_the_same_line_in_another_run(recorded, capsys):
    """The script begins with other weights and another batch: the recorded ones take their place."""
    script = write(recorded, "again.py", seed=5)
    code, out, err = replay(capsys, recorded / "flight/step-3", "--script", script)
    report = (recorded / "flight/step-3/report.txt").read_text()
    assert code == 1 and not err and "step 3: the loss is not finite: exp overflowed" in out and "# HERE" in out
    why = next(line for line in report.splitlines() if line.startswith("  why"))
    assert why in out, "the same value to the last digit: weights, batch and noise are those of the step"
    before = set((recorded / "flight").iterdir())
    assert before == {recorded / "flight/step-3"}


def test_in_fp64_it_goes_away(recorded, capsys):
    script = write(recorded, "again.py")
    words = "--script", script, "--device", "cpu", "--dtype", "float64"
    code, out, _ = replay(capsys, recorded / "flight/step-3", *words)
    assert code == 0 and "step 3 is finite here (on cpu, torch" in out and "recorded on cpu" in out


def test_with_a_function(recorded, capsys):
    words = recorded / "flight/step-3", "--script", write(recorded, "again.py"), "--function"
    code, out, _ = replay(capsys, *words, "build")
    assert code == 1 and "again.py" in out and "lambda" in out
    assert replay(capsys, *words, "build", "--dtype", "float64")[0] == 0
    code, _, err = replay(capsys, *words, "nothing")
    assert code == 2 and "has no function nothing; it has Net, build, main, wrong" in err and len(err.splitlines()) == 1
    code, _, err = replay(capsys, *words, "wrong")
    assert code == 2 and "wrong() must return (model, step)" in err


def test_a_step_of_run(tmp_path, capsys):
    """recorder.run's batch is its arguments: the function gets them so."""
    script = tmp_path / "run.py"
    script.write_text(f"""
import torch, safeops
def build():
    model = torch.nn.Linear(4, 1)
    def step(x, *, power):
        (model(x) * 0).log().pow(power).sum().backward()  # HERE
    return model, step
if __name__ == "__main__":
    model, step = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = safeops.debug.recorder(model, optimizer, folder={str(tmp_path / "f")!r}, action="record")
    recorder.run(step, torch.ones(2, 4), power=1)
""")
    runpy.run_path(str(script), run_name="__main__")
    words = tmp_path / "f/step-1", "--script", script
    for more in ((), ("--function", "build")):
        code, out, err = replay(capsys, *words, *more)
        assert code == 1 and "step 1: the loss is not finite: log" in out, err


def test_without_the_weights_a_finite_step_says_nothing(tmp_path, capsys):
    runpy.run_path(write(tmp_path, save=False), run_name="__main__")
    script = write(tmp_path, "other.py", seed=3, save=False)
    words = tmp_path / "flight/step-3", "--script", script
    code, out, _ = replay(capsys, *words)
    assert code == 1 and "parameters are not those of the step: load its checkpoint" in out
    code, out, _ = replay(capsys, *words, "--dtype", "float64")
    assert code == 2 and "is finite with these weights, which says nothing of its own" in out


def test_the_folder_of_an_earlier_run_stays(tmp_path):
    script = write(tmp_path)
    for _ in range(2):
        runpy.run_path(script, run_name="__main__")
    assert {path.name for path in (tmp_path / "flight").iterdir()} == {"step-3", "step-3.2"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"width": 5}, "the model (Net) is not the recorded one (Net): linear.weight [5, 4], recorded [3, 4]"),
        ({"more": True}, "the recorded batch has tensors of [(8, 4), ()], the program's of [(8, 4), (), (1,)]"),
    ],
)
def test_another_program(recorded, capsys, change, text):
    code, _, err = replay(capsys, recorded / "flight/step-3", "--script", write(recorded, "other.py", **change))
    assert code == 2 and text in err and len(err.splitlines()) == 1


def test_what_is_no_recording(recorded, tmp_path, capsys):
    script = write(tmp_path)
    for folder, text in (
        (tmp_path / "none", "holds no recorded step (about.json is not there)"),
        (recorded / "flight", "holds no recorded step"),
        (shutil.copytree(recorded / "flight/step-3", tmp_path / "old"), "is of format 0, this safeops reads 1"),
        (shutil.copytree(recorded / "flight/step-3", tmp_path / "torn"), "holds no recorded step: "),
    ):
        if folder.name == "old":
            (folder / "about.json").write_text('{"format": 0}')
        if folder.name == "torn":
            (folder / "step.pt").write_bytes((folder / "step.pt").read_bytes()[:100])
        code, out, err = replay(capsys, folder, "--script", script)
        assert code == 2 and text in err and not out and len(err.splitlines()) == 1, err


def test_scripts_and_devices_that_are_not_there(recorded, tmp_path, capsys):
    step = recorded / "flight/step-3"
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    for words, code, text in (
        (("--script", tmp_path / "none.py"), 2, "no such file"),
        (("--script", empty), 2, "the script ended before a step of a recorder began"),
        (("--script", empty, "--device", "cuda:7"), 2, "--device cuda:7: "),
        (("--script", empty, "--device", "moon"), 2, "--device moon: "),
    ):
        result, _, err = replay(capsys, step, *words)
        assert result == code and text in err and len(err.splitlines()) == 1, err
    empty.write_text("1 / 0\n")
    code, _, err = replay(capsys, step, "--script", empty)
    assert code == 3 and "ZeroDivisionError" in err


def test_words_for_the_script_follow_its_options(recorded, tmp_path, capsys):
    script = tmp_path / "asks.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    step = str(recorded / "flight/step-3")
    for words in (["--script", str(script), step, "3"], [step, "--script", str(script), "--", "--lr", "3"]):
        assert cli.main(["replay", *words]) == 2
    assert capsys.readouterr().out == "['3']\n['--lr', '3']\n"
