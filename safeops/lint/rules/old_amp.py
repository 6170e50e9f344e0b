"""SO403: torch.cuda.amp, and the edits that turn its calls and imports into those of torch.amp."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.syntax import descendants, dotted

OLD = {"autocast": ("enabled", "dtype", "cache_enabled"), "GradScaler": None, "custom_fwd": (), "custom_bwd": ()}


class OldAmp(Rule):
    code, name = "SO403", "deprecated-cuda-amp"
    what = "`torch.cuda.amp` and `torch.cpu.amp` are deprecated: every call warns, and they will go."
    why = "`torch.amp` takes the device as its first argument, and serves every device."
    fix = '`torch.amp.autocast("cuda")`, `torch.amp.GradScaler("cuda")`, `torch.amp.custom_fwd(device_type="cuda")`.'
    outcome = "a FutureWarning at every call"
    rewrites = "calls and imports, with the device and the old positional arguments by name"
    bad = """
    def make_scaler():
        return torch.cuda.amp.GradScaler(enabled=False)
    """
    good = """
    def make_scaler():
        return torch.amp.GradScaler("cuda", enabled=False)
    """
    events = ("module",)

    def visit(self, event, node, walk):
        if not re.search(r"\bamp\b", walk.code):
            return
        imported = {}
        uses, parts, decorators = {}, set(), set()
        for item in descendants(node):
            if (
                isinstance(item, cst.ImportFrom)
                and item.module is not None
                and not isinstance(item.names, cst.ImportStar)
            ):
                module = dotted(item.module)
                if module in ("torch.cuda.amp", "torch.cpu.amp") and not item.relative:
                    imported.update(
                        {a.evaluated_alias or a.evaluated_name: (item, a, module.split(".")[1]) for a in item.names}
                    )
            elif isinstance(item, cst.Call):
                uses[id(item.func)] = item
            elif isinstance(item, cst.Decorator):
                decorators.add(id(item.decorator))
            if isinstance(item, cst.Attribute):
                parts.add(id(item.value))
        statements = {}
        for item in descendants(node):
            if isinstance(item, cst.Attribute) and id(item) not in uses and id(item) not in decorators:
                continue  # talked about, not used: that does not warn
            if isinstance(item, (cst.Attribute, cst.Name)) and id(item) not in parts:
                self._use(item, uses.get(id(item)), imported, statements, walk)
        for statement in {id(s): s for s, _, _ in imported.values()}.values():
            self._import(statement, statements.get(id(statement), []), walk)

    def _use(self, item, call, imported, statements, walk):
        if isinstance(item, cst.Attribute):
            full = walk.imports.resolve(item) or ""
            match = re.fullmatch(r"torch\.(cuda|cpu)\.amp\.(autocast|GradScaler|custom_fwd|custom_bwd)", full)
            if match:
                fix = _call_edits(item, call, match[2], match[1], walk)
                if fix is not None:
                    whole = [] if call is not None and not call.args else [(item.value, "torch.amp")]
                    fix = whole + fix if dotted(item).startswith("torch.") else None
                message = f'{full} is deprecated; use torch.amp.{match[2]}("{match[1]}", ...)'
                walk.report(self, call or item, message, fix, imports=False)
            return
        entry = imported.get(item.value)
        if entry is None or item is entry[1].name or (entry[1].asname and item is entry[1].asname.name):
            return
        statement, alias, device = entry
        statements.setdefault(id(statement), []).append(_call_edits(item, call, alias.evaluated_name, device, walk))

    def _import(self, statement, uses, walk):
        """One finding for the import and all uses of what it names: they change together or not at all."""
        names = [a.evaluated_name for a in statement.names]
        module = dotted(statement.module)
        fix = None
        if all(name in OLD for name in names) and all(edits is not None for edits in uses):
            fix = [(statement.module, "torch.amp"), *(edit for edits in uses for edit in edits)]
        message = f"{module} is deprecated; import {', '.join(names)} from torch.amp, with the device as first argument"
        walk.report(self, statement, message, fix, imports=False)


def _call_edits(item, call, name, device, walk):
    """What makes a use of the old name one of the new; None where it cannot be told."""
    if call is None:
        return (
            [(item, f'{walk.text(item)}(device_type="{device}")')]
            if name.startswith("custom_") and isinstance(item, cst.Name)
            else None
        )
    if any(a.star for a in call.args):
        return None
    if name.startswith("custom_"):
        if any(a.keyword is None for a in call.args):
            return None
        device = f'device_type="{device}"'
    else:
        device = f'"{device}"'
    edits = []
    positional = [a for a in call.args if a.keyword is None]
    if positional and OLD[name] is None:
        pass  # GradScaler: the order is the old one behind the device
    else:
        if len(positional) > len(OLD[name] or ()):
            return None
        edits = [(a.value, f"{key}={walk.text(a.value)}") for a, key in zip(positional, OLD[name] or ())]
    if not call.args:
        return (
            [(call, f"{walk.text(item)}({device})")]
            if isinstance(item, cst.Name)
            else [(call, f"torch.amp.{name}({device})")]
        )
    first = call.args[0]
    if edits:
        edits[0] = (edits[0][0], f"{device}, {edits[0][1]}")
    else:
        text = walk.text(first.value) if first.keyword is None else None
        edits = (
            [(first.value, f"{device}, {text}")]
            if text is not None
            else [(first.keyword, f"{device}, {first.keyword.value}")]
        )
    return edits


RULES = (OldAmp,)
