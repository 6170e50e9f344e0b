"""csrc/cpu has three levels: an op's source, its family's driver, the engine. No arrow goes up, none to a sister."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
FAMILIES = {"elementwise", "selection", "reductions", "rows", "losses", "images", "lists"}
SOURCES = sorted(p for p in (CSRC / "cpu").rglob("*.*") if p.suffix in (".h", ".cpp"))


def allowed(path):
    """The folders that a source may include from."""
    folder = path.parent.name
    return {"common", "cpu/engine"} | ({f"cpu/{folder}"} if folder in FAMILIES else set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(CSRC / "cpu").as_posix())
def test_includes_go_down(path):
    assert path.parent.name in FAMILIES | {"engine"}
    for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        assert (CSRC / name).is_file(), f"{name}: includes are written from csrc"
        assert Path(name).parent.as_posix() in allowed(path), name


def test_every_family_explains_its_data_flow():
    for folder in FAMILIES | {"engine"}:
        assert (CSRC / "cpu" / folder / "README.md").is_file()
