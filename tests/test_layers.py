"""A file imports or includes only files of layers below its own, or of its own part; and there are no cycles.

An import inside a function counts as any other.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The parts of each tree, from the lowest layer up. Parts of one layer do not import each other.
FAMILIES = (
    "elementwise selection lists reductions",
    "losses",
    "classification",
    "divergences",
    "vectors",
    "linear",
    "images policies rankings routers",
)
ENGINE_AND_FAMILIES = "engine", *FAMILIES
SAFEOPS = (
    *("core", *(" ".join(f"ops/{family}" for family in floor.split()) for floor in FAMILIES)),
    *("distributed", "head", "amp nn testing debug/common", "debug/page"),
    *("debug/trace debug/audit debug/errors debug/no_sync debug/compare", "debug/recorder"),
    *("debug/__init__ debug/command integrations", "safe"),
    *("__init__ ops/__init__", "verify demo"),
    *("cli", "__main__"),
)
MODULES = {"safeops": SAFEOPS, "kernels": (*ENGINE_AND_FAMILIES, "__init__")}
SOURCES = {"csrc/cpu": ENGINE_AND_FAMILIES, "csrc/cuda": (*ENGINE_AND_FAMILIES, "module")}


def files(tree, *suffixes):
    return sorted(path for path in (ROOT / tree).rglob("*.*") if path.suffix in suffixes)


def room(tree, path):
    """Returns (the part that a file belongs to, its layer)."""
    inside = path.relative_to(ROOT / tree).with_suffix("").as_posix()
    floors = MODULES.get(tree) or SOURCES[tree]
    rooms = [(name, floor) for floor, names in enumerate(floors) for name in names.split()]
    results = [(name, floor) for name, floor in rooms if f"{inside}/".startswith(f"{name}/")]
    assert results, f"{tree}/{inside}: a new room, which tests/test_layers.py is to place"
    return results[0]


def goes_down(tree, path, target):
    (here, floor), (there, other_floor) = room(tree, path), room(tree, target)
    return here == there or other_floor < floor


def imported(path):
    """Yields the files of this repository that a module imports, also inside functions."""
    package = [*path.relative_to(ROOT).parts[:-1]]
    package = package if package[0] == "safeops" else ["safeops", *package]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [name.name.split(".") for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            before = package[: len(package) + 1 - node.level] if node.level else []
            before = before + (node.module.split(".") if node.module else [])
            names = [[*before, name.name] for name in node.names]
        else:
            continue
        yield from filter(None, (file_of(name) for name in names))


def file_of(name):
    """Returns the file of a dotted name, or of the module that defines the name; None outside this repository."""
    if name[0] != "safeops":
        return None
    name = name[1:] if name[1:2] == ["kernels"] else name
    for end in range(len(name), 0, -1):
        place = ROOT.joinpath(*name[:end])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


ARROWS = {path: {to for to in imported(path) if to != path} for tree in MODULES for path in files(tree, ".py")}


@pytest.mark.parametrize("tree", MODULES)
def test_no_import_goes_up(tree):
    inside = {path for path in ARROWS if path.is_relative_to(ROOT / tree)}
    up = [(path, to) for path in inside for to in ARROWS[path] & inside if not goes_down(tree, path, to)]
    assert not up, "\n".join(f"{path.relative_to(ROOT)} imports {to.relative_to(ROOT)}" for path, to in up)


def test_kernels_take_of_safeops_its_core_alone():
    taken = {room("safeops", to)[0] for path in files("kernels", ".py") for to in ARROWS[path] if "safeops" in to.parts}
    assert taken <= {"core"}


def test_no_modules_form_a_circle():
    left = dict(ARROWS)
    while ends := [path for path, to in left.items() if not to & left.keys()]:
        for path in ends:
            del left[path]
    assert not left, "\n".join(sorted(str(path.relative_to(ROOT)) for path in left))


@pytest.mark.parametrize("tree", SOURCES)
def test_no_include_goes_up(tree):
    for path in files(tree, ".h", ".cpp", ".cuh", ".cu"):
        for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            beside = path.parent / name
            target = beside if tree == "csrc/cuda" and beside.is_file() else ROOT / "csrc" / name
            assert target.is_file(), f"{path}: {name}: includes are written from csrc"
            if not target.is_relative_to(ROOT / "csrc" / "common"):
                assert target.is_relative_to(ROOT / tree) and goes_down(tree, path, target), f"{path}: {name}"


def test_what_both_devices_share_includes_nothing_else():
    for path in files("csrc/common", ".h"):
        for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            assert (path.parent / name).is_file(), f"{path}: {name}"


FAMILY_OF = {path.stem: path.parent.name for path in files("safeops/ops", ".py")}
TREES = ("csrc/cpu", "csrc/cuda", "kernels", "tests/ops", "tests/contract", "benchmarks", "benchmarks/rivals")


@pytest.mark.parametrize("tree", TREES)
def test_a_family_has_the_same_name_in_every_tree(tree):
    families = {*FAMILY_OF.values()} - {"ops"}
    folders = {path.name for path in (ROOT / tree).iterdir() if path.is_dir()} - {"engine", "__pycache__"}
    if tree.startswith("benchmarks"):
        assert families <= {path.stem for path in (ROOT / tree).glob("*.py")}
    else:
        assert folders <= families
    if tree == "tests/ops":
        assert families <= folders | {path.stem for path in (ROOT / tree).glob("*.py")}


@pytest.mark.parametrize("tree", ["csrc/cpu", "csrc/cuda", "kernels", "tests/ops"])
def test_an_ops_files_lie_in_its_family(tree):
    for path in files(tree, ".h", ".cpp", ".cuh", ".cu", ".py"):
        name = path.stem.removesuffix("_backward")
        if name in FAMILY_OF and name != "__init__" and path.parent.name != Path(tree).name:
            assert path.parent.name == FAMILY_OF[name], path


def test_every_family_explains_its_data_flow():
    for room in (path for path in (ROOT / "csrc" / "cpu").iterdir() if path.is_dir()):
        assert (room / "README.md").is_file()
