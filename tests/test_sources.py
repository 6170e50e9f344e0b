"""What a kernel is made of, and what its binary says of that."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from safeops import _sources, _verified
from safeops._op import registry

ROOT = Path(__file__).resolve().parents[1]


def test_the_fingerprint_follows_every_file_of_the_kernel(tmp_path):
    files = {
        "csrc/cuda/some/a.cu": '// a, and_a: of two ops\n#include <vector>\n#include "shared.cuh"\n',
        "csrc/cuda/some/and_a.cu": "// and_a: more of it\n",
        "csrc/cuda/some/shared.cuh": '#include "cuda/engine/deep.h"\n',
        "csrc/cuda/some/shared.cu": "",  # where what shared.cuh declares is defined
        "csrc/cuda/some/shared.cpp": '#include "common/host.h"\n',
        "csrc/cuda/engine/deep.h": "1",
        "csrc/cuda/engine/other.h": "1",
        "csrc/common/host.h": "",
        "kernels/some/b.py": '"""b: an op."""\nfrom ..engine.loop import (\n  x,\n)\nfrom . import tools, more as m\n',
        "kernels/some/b_backward.py": "from . import other\n",
        "kernels/engine/loop.py": "from ..engine import launch\n",
        "kernels/engine/launch.py": "",
        "kernels/some/tools.py": "",
        "kernels/some/more.py": "",
        "kernels/some/other.py": '"""What b is made of: nothing of it."""\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kind = {"a": _sources.CPP, "and_a": _sources.CPP, "b": _sources.TRITON}
    names = lambda op: [p.name for p in _sources.sources(op, tmp_path, kind[op])]  # noqa: E731
    assert names("a") == ["host.h", "deep.h", "a.cu", "shared.cpp", "shared.cu", "shared.cuh"]
    assert names("and_a") == ["host.h", "deep.h", "a.cu", "and_a.cu", "shared.cpp", "shared.cu", "shared.cuh"]
    assert names("b") == ["launch.py", "loop.py", "b.py", "b_backward.py", "more.py", "other.py", "tools.py"]

    def mark(op):
        _sources._digest.cache_clear()
        return _sources.fingerprint(op, tmp_path, kind[op])

    before = mark("a")
    (tmp_path / "csrc/cuda/engine/other.h").write_text("2")
    assert mark("a") == before
    (tmp_path / "csrc/cuda/engine/deep.h").write_text("2")
    assert mark("a") != before
    with pytest.raises(LookupError, match="nothing"):
        _sources.fingerprint("nothing", tmp_path, _sources.CPP)


@pytest.mark.parametrize("kind, owner", [(_sources.CPP, "C++/CUDA"), (_sources.TRITON, "Triton")])
def test_every_kernel_has_sources_and_every_source_a_kernel(kind, owner):
    """But the packages' own files, and the module that says what it is made of."""
    made = set()
    for op in registry.values():
        if op.owner == owner and op.raw:
            made |= set(_sources.sources(op.name, ROOT, kind))
    suffixes = (".cu", ".cuh", ".cpp", ".h") if kind == _sources.CPP else (".py",)
    every = {path for path in (ROOT / kind).rglob("*") if path.suffix in suffixes}
    assert {path.name for path in every - made} <= {"__init__.py", "module.cpp"}


def test_triton_is_fingerprinted_as_installed():
    import safeops.kernels

    folder = Path(safeops.kernels.__path__[0])
    launches = _sources.launch_fingerprint(ROOT)  # which the binary was compiled with
    found = _sources.fingerprint("mse_loss", folder.parent, folder.name)
    assert _verified.source("mse_loss", "Triton") == f"{found}.{launches}"


def test_what_launches_triton_has_a_fingerprint_of_all_its_files(tmp_path):
    (tmp_path / "csrc/launch").mkdir(parents=True)
    marks = set()
    for name, text in {"a.h": "1", "b.cpp": "1", "README.md": "1"}.items():
        (tmp_path / "csrc/launch" / name).write_text(text)
        marks.add(_sources.launch_fingerprint(tmp_path))
    (tmp_path / "csrc/launch/a.h").write_text("2")
    _sources._digest.cache_clear()
    marks.add(_sources.launch_fingerprint(tmp_path))
    assert len(marks) == 3, "of the header, of both, of another header; the README makes no kernel"


def test_setup_compiles_the_fingerprints_in(monkeypatch):
    """As setup.py does, which loads the tool by its path; and the file imports nothing beside the standard library."""
    text = (ROOT / "safeops/_sources.py").read_text()
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) <= {"functools", "hashlib", "re"}
    assert "_sources.py" in (ROOT / "setup.py").read_text()
    spec = spec_from_file_location("sources", ROOT / "safeops/_sources.py")
    spec.loader.exec_module(tool := module_from_spec(spec))
    monkeypatch.chdir(ROOT)
    ops = tool.kernel_files(Path(), tool.CPP)
    assert {op.name for op in registry.values() if op.owner == "C++/CUDA"} <= set(ops)
    assert tool.fingerprint("safe_div", Path(), tool.CPP) == _sources.fingerprint("safe_div", ROOT, _sources.CPP)
