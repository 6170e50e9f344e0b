"""Writes safeops/__init__.pyi and safeops/nn.pyi, the types of public functions and modules for type checkers and
editors. Run `make types` after a signature has changed; a test compares the files with it.

Types come from the schemas of torch.ops.safeops. The few functions that are not ops have annotations in their source.
"""

import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import safeops  # noqa: E402
from safeops.core.check import EMPTY  # noqa: E402
from safeops.core.loss_reduction import REDUCTION  # noqa: E402
from safeops.core.op import registry  # noqa: E402
from safeops.ops.classification._best_classes import TAILS  # noqa: E402
from safeops.ops.classification._support import OUTSIDE  # noqa: E402
from safeops.ops.images._ssim import PADDING  # noqa: E402
from safeops.ops.linear.linear_cross_entropy import MEMORY  # noqa: E402
from safeops.ops.rankings.cox_loss import TIES  # noqa: E402
from safeops.ops.rankings.preference_loss import OBJECTIVES  # noqa: E402
from safeops.ops.routers._experts import SCORES  # noqa: E402
from safeops.ops.vectors.box_iou_loss import KINDS  # noqa: E402

HEAD = '''"""Types of {module}, written by scripts/type_stubs.py."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor
'''
TYPES = {
    **{"Tensor": "Tensor", "Optional[Tensor]": "Tensor | None", "List[Tensor]": "Sequence[Tensor]"},
    **{"Optional[List[Tensor]]": "Sequence[Tensor] | None", "float": "float", "Optional[float]": "float | None"},
    **{"List[float]": "Sequence[float]", "Optional[List[float]]": "Sequence[float] | None", "number": "float"},
    **{"List[int]": "int | Sequence[int]", "Optional[List[int]]": "int | Sequence[int] | None", "bool": "bool"},
    **{"int": "int", "SymInt": "int", "Optional[int]": "int | None", "Optional[SymInt]": "int | None", "str": "str"},
    **{"ScalarType": "torch.dtype", "Optional[ScalarType]": "torch.dtype | None"},
}
# {argument: its type}, for arguments that take more types than their schema says, or have no schema.
NAMED = {
    **{"denominator": "Tensor | float | None", "log_probs": "Tensor", "targets": "Tensor", "blank": "int"},
    **dict.fromkeys(("input_lengths", "target_lengths"), "Tensor | Sequence[int]"),
    **{"support": "Tensor | Sequence[Tensor]", "clip": "float | Sequence[float]"},
    **dict.fromkeys(("group", "process_group"), "object"),
    **{"zero_infinity": "bool", "distance_function": "Callable[[Tensor, Tensor], Tensor] | None"},
}
# {argument: the strings that the checks accept}
CHOICES = {"reduction": REDUCTION, "empty": EMPTY, "padding": PADDING, "kind": KINDS, "memory": MEMORY}
CHOICES |= {"outside": OUTSIDE, "tail": TAILS, "scores": SCORES, "objective": OBJECTIVES, "ties": TIES}


def literal(name: str, key: str) -> str:
    own = {"empty": "empties"}.get(key, f"{key}s")  # the record's attribute: an op's own choices
    choices = getattr(registry.get(name), own, None) or CHOICES[key]
    return f"Literal[{', '.join(map(json.dumps, choices))}]"


def schemas(name: str) -> list:
    packet = getattr(torch.ops.safeops, name, None)
    return [getattr(packet, overload)._schema for overload in packet.overloads()] if packet else []


def types(name: str) -> dict[str, str]:
    """Returns {argument: type} of an op. The type is the union over the op's overloads."""
    results = {}
    for x in (x for schema in schemas(name) for x in schema.arguments):
        kinds = results.setdefault(x.name, [])
        kinds += [kind for kind in TYPES[str(x.real_type)].split(" | ") if kind not in kinds]
    return {key: " | ".join(sorted(kinds, key="None".__eq__)) for key, kinds in results.items()} | NAMED


SHARED = {key: kind for name in registry for key, kind in types(name).items()}


def parameters(name: str, function, required=(), **fixed) -> str:
    """Returns the parameters of a function as source text. fixed: {argument: its type in one overload}. required: the
    arguments that this overload needs, which have a default in the others."""
    kinds, parts = SHARED | types(name) | fixed, []
    for x in inspect.signature(function).parameters.values():
        if x.kind is x.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if x.name == "self":
            parts.append("self")
            continue
        kind = literal(name, x.name) if kinds[x.name] == "str" else kinds[x.name]
        default = json.dumps(x.default) if isinstance(x.default, str) else x.default
        optional = x.default is not x.empty and x.name not in required
        if optional and x.default is None and not kind.endswith("None"):
            kind += " | None"
        parts.append(f"{x.name}: {kind}" + (f" = {default}" if optional else ""))
    return ", ".join(parts)


def result(function, schema) -> tuple[str, str]:
    """Returns (the type of an op's result, its import if it is a named tuple, else "")."""
    fields = tuple(x.name for x in schema.returns) if schema else ()
    if len(fields) < 2:
        return "Tensor", ""
    for kind in vars(inspect.getmodule(function)).values():
        if getattr(kind, "_fields", None) == fields:
            return kind.__name__, f"from {kind.__module__} import {kind.__name__}"
    return f"tuple[{', '.join(['Tensor'] * len(fields))}]", ""


def definition(call: str, indent: str = "") -> str:
    # Lines break only after a comma outside of a Literal: other spaces become \0 meanwhile.
    text = re.sub(r'(?<!,) |(?<=",) (?=")', "\0", f"def {call}: ...")
    return textwrap.fill(text, 120, initial_indent=indent, subsequent_indent=f"{indent}    ").replace("\0", " ")


def calls(name: str, function, method, called: str, indent: str = "") -> list[tuple[str, str]]:
    """Returns (source text, import of its result or "") of each overload of an op. method: the function, or a method
    with its parameters, which is `called` so."""
    overloads, results = list({len(x.returns): x for x in schemas(name)}.values()) or [None], []
    common = len(overloads[0].arguments) if overloads[0] else 0
    for schema in overloads:
        kind, source = result(function, schema)
        required, fixed = set(), {}
        for other in overloads[1:]:  # what tells an overload from the others: a flag, or an operand
            (key, of), own = next((x.name, str(x.real_type)) for x in other.arguments[common:]), other is schema
            required |= {key} if own else set()
            if of == "bool" or not own:
                fixed[key] = f"Literal[{own}]" if of == "bool" else "None"
        call = f"{called}({parameters(name, method, required, **fixed)}) -> {kind}"
        results.append((f"{indent}@overload\n" * bool(overloads[1:]) + definition(call, indent), source))
    return results


def functions() -> str:
    imports, defs = [], []
    for name in safeops.__all__:
        function = getattr(safeops, name)
        if inspect.ismodule(function):
            imports.append(f"from safeops import {name} as {name}")
        elif function.__annotations__:
            imports.append(f"from {function.__module__} import {name} as {name}")
        else:
            for call, source in calls(name, function, function, name):
                imports += [source] if source else []
                defs.append(call)
    head = HEAD.format(module="safeops")
    return "\n".join([head, *sorted(set(imports)), "", "__version__: str", "", *defs, ""])


def modules() -> str:
    imports, lines = {"from safeops.head.module import HeadLoss as HeadLoss"}, []
    for op in sorted(filter(lambda op: op.module, registry.values()), key=lambda op: op.module):
        module = getattr(safeops.nn, op.module)
        lines.append(f"class {op.module}(torch.nn.Module):")
        lines.append(definition(f"__init__({parameters(op.name, module.__init__)}) -> None", "    "))
        for method in ("forward", "__call__"):
            for text, source in calls(op.name, op.public_function, module.forward, method, "    "):
                imports |= {source} - {""}
                lines.append(text)
        lines.append("")
    return "\n".join([HEAD.format(module="safeops.nn") + "\n".join(sorted(imports)) + "\n", *lines])


def texts() -> dict[Path, str]:
    return {ROOT / "safeops" / "__init__.pyi": functions(), ROOT / "safeops" / "nn.pyi": modules()}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
