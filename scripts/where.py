"""Lists the places in the source that an op's call passes, one a line: `python -m scripts.where masked_mean`.

They are the public function, record, definition, call path, route and gradients; for each raw op the CPU kernel with
its loops, and the CUDA launcher with its kernels; then test record, benchmark and docs. All are found from the records
and the sources. A line has the form `file:line`, by which an editor opens it.
"""

import argparse
import ast
import difflib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from safeops.core import route
from safeops.core.library import launchers
from safeops.core.op import Op, registry

ROOT = Path(__file__).resolve().parents[1]
OPS = sorted(name for name, record in registry.items() if record.public_function)


class Hop(NamedTuple):
    what: str
    path: Path
    line: int
    name: str  # the word in that line

    def __str__(self):
        return f"{self.what:22} {self.path.relative_to(ROOT)}:{self.line}  {self.name}"


# ---- Python


def of_function(what, function):
    """Returns the place of a function; of a decorated function, that of the function inside."""
    code = inspect.unwrap(getattr(function, "__func__", function)).__code__
    lines = text_of(Path(code.co_filename)).splitlines()
    at = next(i for i in range(code.co_firstlineno, len(lines) + 1) if re.search(r"\bdef |\blambda\b", lines[i - 1]))
    return Hop(what, Path(code.co_filename), at, code.co_name if code.co_name != "<lambda>" else "lambda")


@cache
def text_of(path):
    return path.read_text()


@cache
def tree_of(path):
    return ast.parse(text_of(path))


@cache
def calls(path):
    """Returns [(line, first argument, if a string or name)] of the calls in a file."""
    nodes = [node.args[0] for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call) and node.args]
    return [(node.lineno, getattr(node, "value", getattr(node, "id", None))) for node in nodes]


@cache
def words(path):
    """Returns [(line, text)] of the constants, names and attributes in a file."""
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.Constant, ast.Name, ast.Attribute))]
    return [(x.lineno, getattr(x, "attr", getattr(x, "id", getattr(x, "value", None)))) for x in nodes]


def assigned(what, record):
    """Returns the place of the assignment that names a record, in the modules of safeops that have it as an
    attribute."""
    for module in [m for name, m in sys.modules.items() if name.startswith("safeops.")]:
        for name in [key for key, value in vars(module).items() if value is record]:
            yield from definition_in(what, Path(module.__file__), name)


def formula(record):
    """Returns the op's definition, or the function in its closure that is in the op's own file."""
    own = inspect.unwrap(record.public_function).__code__.co_filename
    functions, seen = [record.definition], []
    while functions:
        function = functions.pop(0)
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        seen.append(function)
        functions += [x for x in cells if inspect.isfunction(x) and x not in seen]
    return next((f for f in seen if f.__code__.co_filename == own), record.definition)


def class_of(record):
    path = Path(inspect.getsourcefile(type(record)))
    name = type(record).__name__
    (line,) = [x.lineno for x in ast.walk(tree_of(path)) if isinstance(x, ast.ClassDef) and x.name == name]
    return Hop("  its class", path, line, name)


def mention(what, folder, name):
    """Returns the place of the first call in a folder with the op's name as first argument, else of the first line that
    names the op."""
    files = sorted((ROOT / folder).rglob("*.py"))
    for kind in calls, words:
        for path in files:
            for line, key in kind(path):
                if key == name:
                    return [Hop(what, path, line, name)]
    return []


# ---- C++


@cache
def sources(device):
    return sorted(p for p in (ROOT / "csrc" / device).rglob("*.*") if p.suffix in (".cpp", ".h", ".cu", ".cuh"))


def lines_with(pattern, paths):
    for path in paths:
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if not line.lstrip().startswith(("//", "#define")) and (match := re.search(pattern, line)):
                yield path, number, match


def included(path, depth=2):
    """Yields a source and the files that it includes by #include "...", to a depth of `depth` includes: headers of the
    family, and headers of the engine that these include."""
    yield path
    for name in re.findall(r'#include "([^"]+)"', text_of(path)) if depth else ():
        for header in (path.parent / name, ROOT / "csrc" / name):
            if header.is_file():
                yield from included(header, depth - 1)
                break


def of_cpp(device, raw):
    """Yields the places of a raw op in C++: its registration, the registered function or struct, and the loops or
    kernels of that function's file."""
    backward, name = raw.endswith("_backward"), raw.removeprefix("_").removesuffix("_backward")
    registered = rf'm\.impl\("{raw}", TORCH_BOX\(&([\w:]+)|\bSAFEOPS_[A-Z_]+\(({name})\b(?:, (\w+))?'
    for path, line, match in lines_with(registered, sources(device)):
        by_name, macro, struct = match.groups()
        yield Hop(f"{device} {raw}", path, line, macro or raw)
        function = struct or macro or by_name
        for _, at, _ in lines_with(rf"^(?:struct|class|[\w:<>, &]+ \*?){function}\b(?!.*;$)", [path]):
            yield Hop("  its function", path, at, function)
            break
        yield from loops(path, backward) or loops(path, not backward)


@cache
def loops(path, backward):
    """Returns the loops that a file of csrc/cpu passes to its driver, or the kernels that a file of csrc/cuda launches.
    If the file has none: those in the headers that it includes. backward: True for those named after gradients, False
    for the rest."""
    result = {}
    for depth in range(4):
        files = dict.fromkeys(included(path, depth))
        picked = "|".join({name for file in files for name in re.findall(r"pick(?:_width)?<&(\w+)", text_of(file))})
        kernel = r"__global__ void(?: __launch_bounds__\(.*\))?\s+(\w+)\("
        for what, pattern in ("  kernel", kernel), ("  loop", rf"\bvoid\s+({picked})\(" if picked else "$^"):
            for file in files:
                for match in re.finditer(pattern, text_of(file)):
                    if backward == bool(re.search("slope|gradient|backward", match[1])):
                        line = text_of(file).count("\n", 0, match.start(1)) + 1
                        result.setdefault(match[1], Hop(what, file, line, match[1]))
        if result:
            break
    return list(result.values())


# ---- Triton


def of_triton(raw):
    """Yields the launcher of a raw op, and the functions named ..._kernel in its file, else in the files it imports."""
    for launcher in [x for op, x in launchers.items() if op._schema.name == f"safeops::{raw}"]:
        file = ROOT / "kernels" / f"{launcher.module.replace('.', '/')}.py"
        yield from definition_in(f"cuda {raw}", file, launcher.name)
        used = {x.id for node in tree_of(file).body if getattr(node, "name", "") == launcher.name
                for x in ast.walk(node) if isinstance(x, ast.Name)}  # fmt: skip
        files, kernels = list(imported(file, used)), list(kernels_of(file))
        while files and not kernels:
            kernels = [hop for file in files for hop in kernels_of(file)]
            files = [module for file in files for module in imported(file)]
        yield from dict.fromkeys(kernels)


def kernels_of(file):
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            yield Hop("  kernel", file, node.lineno, node.name)


def imported(file, used=()):
    """Yields the modules of kernels/ from which a file imports one of the names `used`; all modules without names."""
    for node in tree_of(file).body:
        if isinstance(node, ast.ImportFrom) and node.level and (not used or used & {x.name for x in node.names}):
            folder = file.parents[node.level - 1] / (node.module or "").replace(".", "/")
            names = [folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)]
            yield from (path for path in names if path.is_file())


def definition_in(what, file, name):
    """Yields the place where a module defines a name: its def, class or assignment."""
    for node in tree_of(file).body:
        targets = [t for x in getattr(node, "targets", ()) for t in getattr(x, "elts", [x])]
        if name in (getattr(node, "name", None), *(getattr(t, "id", None) for t in targets)):
            yield Hop(what, file, node.lineno, name)


# ---- all places of an op


def road(name):
    """Yields the places of a public op in the order in which a call passes them."""
    record = registry[name]
    yield of_function("public function", record.public_function)
    yield from assigned("record", record)
    yield class_of(record)
    for part in record.parts:
        yield from assigned("  calls", part)
    if isinstance(record, Op):
        yield of_function("  prepare", type(record).prepare)
        yield of_function("definition", formula(record))
        yield of_function("call", Op.call)
        yield of_function("route", route.route)
        yield of_function("gradients", type(record).gradients)
    for raw in record.raw:
        yield from of_cpp("cpu", raw)
        yield from of_triton(raw)
        yield from of_cpp("cuda", raw)
    yield from mention("test record", "tests/ops", name)
    yield from mention("benchmark", "benchmarks", name)
    functions = ROOT / "docs" / "functions.md"
    for path, line, _ in lines_with(rf"^\|.*`{name}\b", [functions]):
        yield Hop("docs", path, line, name)
        break


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", help="its public name")
    name = parser.parse_args().op
    if name not in OPS:
        close = difflib.get_close_matches(name, OPS)
        parser.error(f"{name} is no op{': did you mean ' + ' or '.join(close) + '?' if close else ''}")
    for hop in road(name):
        print(hop)


if __name__ == "__main__":
    main()
