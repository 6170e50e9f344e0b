"""Writes safeops as a kernel for the Hugging Face Hub, dist/hub/build/torch-{cuda,cpu}. The `kernels` package loads it:
kernels.get_local_kernel(Path("dist/hub")), and after an upload kernels.get_kernel("<user>/safeops").

    python scripts/hub.py [FOLDER]

The copy has the Python package and the Triton kernels, but not the commands. It imports its own modules by relative
imports, since the loader chooses the package's name; its ops are registered under that name too. So the copy can be
loaded beside an installed safeops or another version.
"""

import ast
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from safeops.core import VERSION  # noqa: E402

COMMANDS = {"__main__.py", "cli.py", "demo", "integrations", "testing", "verify"}
MAY_IMPORT = {*sys.stdlib_module_names, "torch", "triton"}


def relative(text: str, depth: int) -> str:
    """Returns the source with relative imports in place of imports of safeops. depth: how many folders inside the
    package the source is."""
    dots = "." * (depth + 1)
    text = re.sub(r"^( *)from safeops import ", rf"\1from {dots} import ", text, flags=re.MULTILINE)
    return re.sub(r"^( *)from safeops\.", rf"\1from {dots}", text, flags=re.MULTILINE)


def foreign_imports(text: str) -> list[str]:
    """Returns the modules that a source imports from outside torch, Triton, the standard library and the package
    itself."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module)
    return [name for name in names if name.split(".")[0] not in MAY_IMPORT]


def copy_package(target: Path):
    for source, place in ((ROOT / "safeops", target), (ROOT / "kernels", target / "kernels")):
        for path in sorted(source.rglob("*.*")):
            inside = path.relative_to(source)
            if inside.parts[0] in COMMANDS or path.suffix not in (".py", ".html", ".js"):
                continue
            text = path.read_text()
            if path.suffix == ".py":
                text = relative(text, len((place / inside).relative_to(target).parts) - 1)
                if names := foreign_imports(text):
                    raise SystemExit(f"hub: {path.relative_to(ROOT)} imports {names}")
            (place / inside).parent.mkdir(parents=True, exist_ok=True)
            (place / inside).write_text(text)


def build(folder: Path):
    shutil.rmtree(folder, ignore_errors=True)
    for backend in ("cuda", "cpu"):
        target = folder / "build" / f"torch-{backend}"
        copy_package(target)
        shutil.copy(ROOT / "scripts" / "hub_layers.py", target / "layers.py")
        with open(target / "__init__.py", "a") as file:
            file.write("\nfrom . import layers  # noqa: E402\n")
        metadata = {
            "id": f"_safeops_{VERSION.replace('.', '_')}_{backend}",
            "name": "safeops",
            "version": int(VERSION.split(".")[0]),
            "license": "BSD-3-Clause",
            "upstream": "https://github.com/safeops/safeops",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "dist" / "hub")
