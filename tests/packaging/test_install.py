"""The installed wheel works in an environment with torch alone, from any folder, and a damaged one raises an error."""

import ast
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from tests.packaging.conftest import ROOT, closure, run
from tests.packaging.test_wheel import needs_compiler

pytestmark = pytest.mark.xdist_group("packaging")
VALUES = Path(__file__).with_name("values.py")
# For tests on the CPU, which CUDA kernels of other architectures do not change.
native = pytest.mark.parametrize("architectures", ["native"], indirect=True)


def prefix(python):
    return python.parent.parent


def package(python):
    (folder,) = prefix(python).glob("lib/python3*/site-packages/safeops")
    return folder


@native
@needs_compiler
def test_kernels_run_from_the_installed_wheel(python, tmp_path):
    result = run([python, VALUES, prefix(python), "kernel", ROOT], cwd=tmp_path)
    assert result.stdout.split() == ["kernel", "ok"]


@pytest.mark.slow
def test_pure_python_install_gives_the_same_values(pure_python, tmp_path):
    assert not list(package(pure_python).rglob("*.so"))
    result = run([pure_python, VALUES, prefix(pure_python), "composite", ROOT], cwd=tmp_path)
    assert result.stdout.split() == ["composite", "ok"]


@native
def test_the_environment_holds_torch_alone(python, tmp_path):
    """The environment must have torch alone, or the two tests above would not show that safeops needs nothing else."""
    probe = "import importlib.util as u; print([n for n in ('numpy', 'rich', 'triton', 'pytest') if u.find_spec(n)])"
    brought = ["triton"] if ("triton",) in closure("torch") else []  # torch for CUDA requires triton
    assert run([python, "-c", probe], cwd=tmp_path).stdout.strip() == str(brought)


@native
def test_doctor_needs_torch_alone(python, tmp_path):
    by_module = run([python, "-m", "safeops", "doctor"], cwd=tmp_path)
    by_script = run([prefix(python) / "bin" / "safeops", "doctor"], cwd=tmp_path)
    for result in (by_module, by_script):
        assert "masked_mean" in result.stdout and "torch" in result.stdout


@native
def test_verify_runs_from_the_installed_wheel(python, tmp_path):
    command = [python, "-m", "safeops", "verify", "--device", "cpu", "--ops", "safe_gather"]
    out = run(command, cwd=tmp_path, SAFEOPS_CACHE=str(tmp_path)).stdout
    assert "safe_gather: passed" in out and out.splitlines()[-1] == "1 passed"


@needs_compiler
def test_the_cuda_binary_says_for_what_it_has_code(python, architectures, tmp_path):
    probe = (
        "from safeops.core.library import cuda_extension as c; "
        "print(c and c.archs); print(c and (c.runtime, c.driver()))"
    )
    archs, versions = run([python, "-c", probe], cwd=tmp_path).stdout.splitlines()
    if architectures != "native":
        assert archs in ("None", {"all": "80 90 100 120"}.get(architectures, "90"))
    if archs != "None":
        runtime, driver = ast.literal_eval(versions)
        assert runtime >= 12000 and (driver > 0 or not torch.cuda.is_available())


def cut(path):
    path.write_bytes(path.read_bytes()[:60])


def scribble(path):
    path.write_bytes(b"not a shared library\n" * 1000)


def other_module(path):
    """Replaces the extension at `path` by another extension module, which loads but is not safeops'."""
    source = next(Path(sys.base_prefix).glob("lib/python3*/lib-dynload/_heapq*.so"))
    shutil.copyfile(source, path)


IMPORTS = """
import os, pathlib, sys, torch
for folder in map(pathlib.Path, sys.argv[1:]):
    if os.fork() == 0:
        sys.path.insert(0, str(folder))
        try:
            import safeops
            print(folder.name, "imported", safeops.__file__, flush=True)
        except ImportError as error:
            print(folder.name, "refused", " ".join(str(error).split()), flush=True)
        os._exit(0)
    os.wait()
"""


@needs_compiler
def test_a_broken_extension_is_an_error(python, tmp_path):
    """A damaged extension must raise an error, not fall back to pure Python. Several damaged copies and a whole one are
    imported in one process, since importing torch takes seconds."""
    damaged = {}
    for name in ("_C", "_cuda"):
        for damage in (cut, scribble, other_module):
            folder = tmp_path / f"{damage.__name__}{name}"
            shutil.copytree(package(python), folder / "safeops")
            module = folder / "safeops" / f"{name}.abi3.so"
            if module.exists():  # _cuda is missing if there is no nvcc
                damage(module)
                damaged[folder] = name
    shutil.copytree(package(python), tmp_path / "whole" / "safeops")
    lines = run([python, "-c", IMPORTS, *damaged, tmp_path / "whole"], cwd=tmp_path).stdout.splitlines()
    assert len(lines) == len(damaged) + 1 and len(damaged) >= 3
    for line, (folder, name) in zip(lines, damaged.items()):
        begin, refused, reason = line.partition(" refused ")
        assert begin == folder.name and refused, f"fell back silently: {line}"
        assert f"/{name}.abi3.so" in reason or f"PyInit_{name})" in reason, line
    assert lines[-1] == f"whole imported {tmp_path / 'whole' / 'safeops' / '__init__.py'}"


def test_editable_install_maps_kernels(tmp_path):
    """kernels/ must be found both in the repository's root, where ./safeops shadows the install, and elsewhere."""
    probe = "import safeops.kernels as k, safeops; print(k.__file__); print(safeops.__file__)"
    for cwd in (ROOT, tmp_path):
        lines = run([sys.executable, "-c", probe], cwd=cwd).stdout.split()
        assert lines == [str(ROOT / "kernels" / "__init__.py"), str(ROOT / "safeops" / "__init__.py")]


def test_no_compiler_is_said(tmp_path):
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path]
    result = run(command, cwd=ROOT, CXX="/nonexistent/c++")
    assert "NO C++ COMPILER FOUND" in result.stderr
    assert [path.name for path in tmp_path.iterdir()][0].endswith("-py3-none-any.whl")


def test_source_distribution_is_complete(tmp_path):
    run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path], cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    packed = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
    folders = [ROOT / name for name in ("csrc", "kernels", "safeops")]
    kinds = {".h", ".cuh", ".cpp", ".cu", ".map", ".ninja", ".py", ".pyi", ".json", ".html", ".js"}
    needed = {str(p.relative_to(ROOT)) for folder in folders for p in folder.rglob("*") if p.suffix in kinds}
    assert needed | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= packed, needed - packed


def test_a_failing_compiler_fails_the_build(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path]
    result = run(command, cwd=ROOT, check=False, CXX="false", SAFEOPS_NO_CUDA="1")
    assert result.returncode != 0 and "safeops: the build failed" in result.stderr
    assert re.search(r"^FAILED: .*\nfalse -std=c\+\+17 .* -c csrc/", result.stdout, re.MULTILINE), "not the command"
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("build", "gpus", "asked", "expected"),
    [
        (["--inplace"], "9.0\n9.0\n", "", {"90"}),
        (["--inplace"], "12.0\n8.6\n", "", {"86", "120"}),
        (["--inplace"], "7.5\n", "", set()),  # this GPU is too old for the kernels
        (["--inplace"], "", "", set()),
        (["--inplace"], "9.0\n", "all", {"80", "90", "100", "120"}),
        (["--inplace"], "9.0\n", "8.0, sm_90", {"80", "90"}),
        ([], "9.0\n", "", {"80", "90", "100", "120"}),
        ([], "9.0\n", "native", {"90"}),
    ],
)
def test_architectures(build, gpus, asked, expected, tmp_path):
    """A development build must compile for this machine's GPUs and a wheel for all, by the commands in build.ninja."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "setup.py", "-q", "build_ext", *build, "--build-lib", tmp_path, "--build-temp", tmp_path]
    result = run(command, cwd=ROOT, check=False, CXX="false", PATH=path, SAFEOPS_CUDA_ARCH=asked)
    rules = (ROOT / "build" / "ninja" / "build.ninja").read_text()
    assert result.returncode != 0 and set(re.findall(r"code=sm_(\d+)", rules)) == expected
    assert ("building without the CUDA kernels" in result.stderr) == (not expected)
