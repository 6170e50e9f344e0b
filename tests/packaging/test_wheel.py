"""The wheel has the right tag and contents, and its binaries need only LibTorch's stable C interface."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from tests.kernels.test_cuda_build import CUOBJDUMP
from tests.packaging.conftest import PLATFORM, ROOT

spec = spec_from_file_location("release", ROOT / "scripts" / "release.py")
release = module_from_spec(spec)
spec.loader.exec_module(release)
pytestmark = pytest.mark.xdist_group("packaging")

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")), reason="no C++ compiler"
)


def test_these_tests_share_one_worker(request):
    """Two builds in the same folder would overwrite each other. xdist adds the group to the end of a test's name."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@packaging")


def modules(contents):
    return sorted(contents.glob("safeops/*.so"))


@needs_compiler
def test_one_wheel_for_every_python(wheel):
    assert re.fullmatch(rf"safeops-[\d.]+-cp310-abi3-{PLATFORM}\.whl", wheel.name)


@needs_compiler
def test_extensions_are_there(contents, architectures):
    results = {module.name for module in modules(contents)}
    assert results - {"_cuda.abi3.so"} == {"_C.abi3.so"}
    if architectures != "native":
        assert ("_cuda.abi3.so" in results) == (shutil.which("nvcc") is not None)


@needs_compiler
def test_no_path_of_the_build_machine(contents):
    """Error messages name source files; their paths must not contain folders of the build machine."""
    folders = [str(ROOT), str(Path(torch.__file__).parent)]
    for module in modules(contents):
        text = module.read_bytes()
        assert b"csrc/cpu/" in text or b"csrc/cuda/" in text or b"torch/csrc/stable/" in text
        assert not [folder for folder in folders if folder.encode() in text]


@needs_compiler
def test_only_the_limited_python_api(wheel):
    audit = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--report", str(wheel)], capture_output=True, text=True
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


@needs_compiler
def test_the_platform_is_true(wheel, contents):
    """The binaries must need only symbols of Python and of torch's C interface. auditwheel checks versioned symbols
    alone."""
    assert release.audit(wheel) == []
    for module in modules(contents):
        names = subprocess.check_output(["nm", "-D", "--undefined-only", "--format=posix", module], text=True)
        plain = re.findall(r"^([^@\s]+) U", names, re.MULTILINE)
        assert plain and not [name for name in plain if not re.match(r"_?Py|(aoti_)?torch_", name)]


@needs_compiler
def test_a_newer_library_is_noticed(tmp_path):
    """A wheel with this machine's libstdc++, which needs a newer glibc, must be reported."""
    library = subprocess.check_output(["g++", "-print-file-name=libstdc++.so.6"], text=True).strip()
    wheel = tmp_path / f"safeops-0-cp310-abi3-{PLATFORM}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "safeops/_C.abi3.so")
        archive.writestr("safeops-0.dist-info/RECORD", "safeops/_C.abi3.so,,\n")
    (problem,) = release.audit(wheel)
    assert "has symbols of" in problem


@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump")
def test_cuda_code_for_all_architectures(contents, architectures):
    """Without machine code for each architecture, and PTX for later ones, the kernels would not run on some GPUs."""
    if architectures == "native" or not (contents / "safeops/_cuda.abi3.so").exists():
        pytest.skip("built for this machine")
    library = contents / "safeops/_cuda.abi3.so"
    every = {"80", "90", "100", "120"}, {"80", "120"}
    for option, kinds in zip(("elf", "ptx"), every if architectures == "all" else ({"90"}, {"90"})):
        listing = subprocess.check_output([CUOBJDUMP, f"--list-{option}", library], text=True)
        assert set(re.findall(r"\.sm_(\d+)\.", listing)) == kinds


@needs_compiler
def test_no_torch_cxx_symbols(contents):
    for module in modules(contents):
        names = subprocess.check_output(["nm", "-DC", "--undefined-only", module], text=True)
        assert re.search(r"\b(aoti_)?torch_\w+", names), f"{module.name}: no stable symbol at all?"
        cxx = [line for line in names.splitlines() if re.search(r"\b(c10|at|torch|caffe2)::", line)]
        assert not cxx, f"{module.name} is bound to one torch version by:\n" + "\n".join(cxx)


@needs_compiler
def test_links_neither_libpython_nor_libtorch_python(contents):
    for module in modules(contents):
        lines = subprocess.check_output(["readelf", "-d", module], text=True)
        needed = set(re.findall(r"NEEDED.*\[(.+?)\]", lines))
        assert "libtorch.so" in needed
        assert not [lib for lib in needed if "python" in lib or "c10" in lib or "cudart" in lib], needed
        assert "RUNPATH" not in lines and "RPATH" not in lines, f"{module.name} carries a path of the build machine"


@needs_compiler
def test_exports_nothing_but_its_init(contents):
    for module in modules(contents):
        names = subprocess.check_output(["nm", "-D", "--defined-only", "--format=posix", module], text=True)
        exported = {line.split()[0] for line in names.splitlines()}
        assert exported == {f"PyInit_{module.name.split('.')[0]}"}


def test_contents(contents):
    files = {str(path.relative_to(contents)) for path in contents.rglob("*") if path.is_file()}
    tops = {name.split("/")[0] for name in files}
    assert tops == {"safeops", "safeops_lint", next(top for top in tops if top.endswith(".dist-info"))}
    # All Python files of the packages and of kernels/, and none left by an earlier build.
    packages = ROOT / "safeops", ROOT / "safeops_lint"
    expected = {str(path.relative_to(ROOT)) for package in packages for path in package.rglob("*.py")}
    expected |= {f"safeops/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == expected
    data = {str(path.relative_to(ROOT)) for path in (ROOT / "safeops/debug/page").glob("page*.[hj]*")}  # trace's page
    assert len(data) == 4 and {"safeops/py.typed", "safeops/__init__.pyi", "safeops/nn.pyi"} | data <= files
    assert not [name for name in files if name.endswith((".o", ".d", ".cpp", ".cu", ".cuh", ".h"))]


def test_metadata(contents):
    (path,) = contents.glob("*.dist-info/METADATA")
    headers = HeaderParser().parsestr(path.read_text())
    assert not re.search(r"\]\((?!https://|#)", path.read_text()), "a link that is dead on an index's page"
    required = [line for line in headers.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=2.11"], "torch alone"
    assert headers["Requires-Python"] == ">=3.10"
    assert headers["License-Expression"] == "BSD-3-Clause" and headers["Project-URL"]
    assert set(release.versions().values()) == {headers["Version"]}, "the changelog, or the citation, is of another"
    (scripts,) = contents.glob("*.dist-info/entry_points.txt")
    assert "safeops = safeops_lint.entry:main" in scripts.read_text()


def test_pure_wheel_is_for_any_platform(pure_wheel):
    assert pure_wheel.name.endswith("-py3-none-any.whl")
