"""The file of kernels that failed `safeops verify` on this machine: where it lies, who writes it, when it is unused."""

import json
import os
import subprocess
import sys
import warnings

import pytest

import safeops
from safeops.core import availability, failures
from tests.test_availability import DIV, H200, MSE, availability_of, fail, machine  # noqa: F401

pytestmark = pytest.mark.usefixtures("machine")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SAFEOPS_CACHE", str(tmp_path / "own"))
    assert failures.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SAFEOPS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert failures.cache_folder() == tmp_path / "safeops"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert failures.cache_folder() == tmp_path / "home" / ".cache" / "safeops"


def test_a_user_without_a_home_has_no_records_and_no_error(monkeypatch, tmp_path):
    """A container may run under a user number without a name or home."""
    for name in ("SAFEOPS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MSE.runs_on("cuda:0")


def test_a_folder_in_the_place_of_the_file_is_told():
    failures.path().mkdir()
    with pytest.warns(RuntimeWarning, match="failed.json is not used"):
        assert availability_of(MSE, 0).kernel


FOREIGN = ["{}", "3", "null", "[1]", '[{"op": "mse_loss", "gpu": "NVIDIA H200"}]', "[" * 100_000]
FOREIGN += [json.dumps([dict.fromkeys(failures.FIELDS, "x") | wrong]) for wrong in ({"op": []}, {"triton": {}})]


@pytest.mark.parametrize("text", ["", "{", '[{"op"', "\udcff", *FOREIGN])
def test_a_broken_or_foreign_file_is_told_and_not_used(text):
    failures.path().write_text(text, errors="surrogateescape")
    with pytest.warns(RuntimeWarning, match="failed.json is not used"):
        assert availability_of(MSE, 0).kernel
    with pytest.warns(RuntimeWarning):
        fail(MSE)
    assert not availability_of(MSE, 0).kernel


def test_a_record_of_another_version_is_told_and_not_used():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "VERSION", "0.0.9")
        fail(MSE)
        fail(DIV, gpu="NVIDIA A100")
    with pytest.warns(RuntimeWarning) as result:
        assert availability.availability(MSE, 0).kernel and availability.availability(DIV, 0).kernel
    (warning,) = result
    assert warning.filename == __file__, "of the caller's line"
    assert str(warning.message) == (
        f"safeops: mse_loss of safeops 0.0.9 failed on this GPU (value: wrong), which says nothing of "
        f"{safeops.__version__}: `safeops verify --ops mse_loss` judges that"
    )
    fail(MSE, why=None)
    assert [record["op"] for record in failures.read()] == ["safe_div"], "a verdict takes the place of an older one"


def test_records_replace_each_other_and_the_last_takes_the_file_along(tmp_path):
    fail(MSE, DIV)
    fail(MSE, gpu="NVIDIA A100")
    fail(MSE, why="graph: differs")
    results = json.loads(failures.path().read_text())
    assert sorted((record["op"], record["gpu"], record["triton"], record["why"]) for record in results) == [
        ("mse_loss", "NVIDIA A100", "3.7.1", "value: wrong"),
        ("mse_loss", "NVIDIA H200", "3.7.1", "graph: differs"),
        ("safe_div", "NVIDIA H200", None, "value: wrong"),
    ]
    assert {record["safeops"] for record in results} == {safeops.__version__}
    fail(MSE, DIV, why=None)
    fail(MSE, gpu="NVIDIA A100", why=None)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"], "nothing else is left behind"


SAVES = """
import sys
from safeops.core import availability, failures
_, who, count = sys.argv
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
for i in range(int(count)):
    failures.save({(f"{who} {i}", None): "why"}, "a GPU", "2026-01-02")
"""


def test_of_two_processes_that_record_none_undoes_the_other():
    def saving(who):
        command = [sys.executable, "-c", SAVES, who, "50"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr.readline() == "ready\n"
        return process

    both = saving("a"), saving("b")
    for process in both:
        process.stdin.close()
    assert [process.wait() for process in both] == [0, 0]
    assert {record["op"] for record in failures.read()} == {f"{who} {i}" for who in "ab" for i in range(50)}
