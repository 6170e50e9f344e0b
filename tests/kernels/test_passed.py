"""A changed source, and another operand at a launch, make the kernels run again."""

import warnings

import pytest

pytest.importorskip("triton")

from safeops.core import library
from tests.kernels import passed
from tests.kernels.executed.subjects import launched


def test_a_swapped_operand_is_noticed(monkeypatch):
    subject = launched()["huber_loss"]
    [forward] = [op for op in library.launchers if op.name() == "safeops::_huber_loss"]
    launch = library.launchers[forward]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about broadcast operands, which are intended here
        before = passed.launches(subject)
        assert passed.digest(before) == passed.digest(passed.launches(subject))
        monkeypatch.setitem(library.launchers, forward, lambda x, y, *rest: launch(y, x, *rest))
        after = passed.launches(subject)
    assert len(before) == len(after) > 20 and passed.digest(before) != passed.digest(after)


def test_what_changed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(passed, "FILE", tmp_path / "passed.txt")
    monkeypatch.setattr(passed, "launched", dict)
    monkeypatch.setattr("sys.argv", ["passed", "--write"])
    passed.main()
    monkeypatch.setattr("sys.argv", ["passed"])
    passed.main()
    monkeypatch.setitem(passed.SOURCES, "csrc", "csrc/cpu/**/*.*")
    with pytest.raises(SystemExit, match="passed: csrc$"):
        passed.main()
