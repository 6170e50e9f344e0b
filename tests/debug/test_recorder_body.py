"""The block of a step runs again wherever it stands: in functions, methods, closures, modules, loops and notebooks."""

import itertools
import linecache
import textwrap

import pytest
import torch

from tests.debug.recording import Positive


@pytest.fixture
def setting(record):
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return record(model, optimizer), model, optimizer, torch.zeros(2, 4)


def found(recorder):
    (report,) = recorder.reports
    assert report.op == "log" and "# HERE" in report.line.text, str(report)
    return report


def test_variables_that_the_block_changes(setting):
    """Counters, lists and hidden states have the value that they had at the block's begin; the user's own stay."""
    recorder, model, optimizer, x = setting
    count, hidden, seen = 1, torch.ones(2, 4), []
    with recorder.step(x):
        seen = [*seen, (count, hidden.sum().item())]
        count += 1
        hidden = hidden * 2
        kept = seen
        model(x * hidden).mean().backward()
    found(recorder)
    assert count == 2 and kept == [(1, 8.0)] and hidden.sum() == 16


def test_break_continue_and_return(setting):
    recorder, model, optimizer, x = setting

    def returns():
        with recorder.step(x):
            model(x).mean().backward()
            return 5

    assert returns() == 5
    for _ in range(1):
        with recorder.step(x):
            model(x).mean().backward()
            continue
    for _ in range(3):
        with recorder.step(x):
            model(x).mean().backward()
            break
    assert [report.op for report in recorder.reports] == ["log"] * 3


def test_closures_lambdas_and_comprehensions(setting):
    recorder, model, optimizer, x = setting
    total = 0

    def inner():
        nonlocal total
        with recorder.step(x):
            total += 1
            parts = [model(part) for part in x]
            add = lambda: sum(p.mean() for p in parts)  # noqa: E731
            add().backward()

    inner()
    found(recorder)
    assert total == 1


class Base:
    def loss(self, x):
        return self.model(x).mean()


class Trainer(Base):
    def __init__(self, model):
        self.model, self.__private = model, 2.0

    def __scaled(self, loss):
        return loss * self.__private

    def train(self, recorder, x):
        with recorder.step(x):
            loss = self.__scaled(super().loss(x))
            loss.backward()


def test_methods_with_super_and_private_names(setting):
    recorder, model, optimizer, x = setting
    Trainer(model).train(recorder, x)
    assert [line.function for line in found(recorder).lines[:3]] == ["forward", "loss", "train"]


def test_other_managers_in_the_statement(setting):
    recorder, model, optimizer, x = setting
    with (
        torch.autocast("cpu", enabled=False) as first,
        recorder.step(
            x,
        ),
    ):
        model(x).mean().backward()
    found(recorder)
    assert first is not None


def run_source(source, names):
    """Run source as a module or a notebook's cell is: its variables are globals."""
    name = f"<cell {next(_numbers)}>"
    source = textwrap.dedent(source)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), names)
    return names


_numbers = itertools.count()


def test_a_context_that_is_made_before(setting):
    recorder, model, optimizer, x = setting
    context = recorder.step(x)
    with context:
        model(x).mean().backward()
    found(recorder)


def test_a_module_s_own_code(setting):
    recorder, model, optimizer, x = setting
    names = run_source(
        """
        step = 0
        for x in [x]:
            with recorder.step(x):
                step += 1
                output = model(x)
                loss = output.mean()
                print(end="")
                loss.backward()
        """,
        {"recorder": recorder, "model": model, "x": x},
    )
    found(recorder)
    assert names["step"] == 1 and names["loss"] == -torch.inf


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f():\n    with recorder.step(x):\n        LOSS.backward()\n        yield\nlist(f())", "yields"),
        ("class A:\n    with recorder.step(x):\n        LOSS.backward()", "class"),
        (
            "c = recorder.step(x)\nc.__enter__()\nLOSS.backward()\nc.__exit__(None, None, None)",
            "no `with` block begins",
        ),
        ("def f():\n  with recorder.step(x):\n    global y\n    y = 1\n    LOSS.backward()\nf()", "global"),
    ],
)
def test_a_block_that_cannot_run_again_is_told(setting, source, why):
    """The step is found and kept from the weights all the same."""
    recorder, model, optimizer, x = setting
    with pytest.warns(UserWarning, match=f"will not be replayed: .*{why}"):
        run_source(source.replace("LOSS", "model(x).mean()"), {"recorder": recorder, "model": model, "x": x})
    (report,) = recorder.reports
    assert report.kind == "not repeated" and why in report.why


def test_source_that_is_not_there(setting):
    recorder, model, optimizer, x = setting
    with pytest.warns(UserWarning, match="source of <nowhere> is not there"):
        exec(compile("with recorder.step(x):\n    model(x).mean().backward()", "<nowhere>", "exec"),
             {"recorder": recorder, "model": model, "x": x})  # fmt: skip
    assert recorder.found == 1


def test_a_batch_that_the_block_does_not_name(setting):
    recorder, model, optimizer, x = setting
    other = torch.zeros(2, 4)
    with pytest.warns(UserWarning, match="no variable of the block holds the batch"), recorder.step(x):
        model(other).mean().backward()
    found(recorder)


def test_an_error_in_the_replay_is_told(setting):
    recorder, model, optimizer, x = setting
    runs = []
    with recorder.step(x):
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("gone")
        model(x).mean().backward()
    (report,) = recorder.reports
    assert report.kind == "not repeated" and any("replay ended with KeyError: 'gone'" in note for note in report.notes)


def test_values_of_a_step_are_let_go(setting):
    """The recorder keeps no graph of an earlier step alive."""
    import weakref

    recorder, model, optimizer, x = setting
    for _ in range(3):
        with recorder.step(x):
            loss = model(x + 1).mean()
            loss.backward()
    alive = weakref.ref(loss)
    del loss
    assert alive() is None
