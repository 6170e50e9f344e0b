"""Translates PTX to the text that executor.cpp reads: one instruction per line.

Registers, constants and labels become numbers, and called functions are inlined. A name declared in braces is another
name than an equal one outside of them. Opcodes stay as they are; the executor refuses those that it does not know.
"""

import re
from dataclasses import dataclass, field
from itertools import count

WIDTHS = {"pred": 0, "b8": 2, "u8": 2, "s8": 2}  # bytes of a register; a predicate has one bit per lane
# Registers with numbers 0, 1, ..., which the executor fills: the order must be the executor's.
SPECIAL = [f"%{name}.{d}" for name in ("tid", "ntid", "ctaid", "nctaid") for d in "xyz"]
SPECIAL += ["%laneid", *(f"%lanemask_{which}" for which in ("eq", "le", "lt", "ge", "gt"))]
STATEMENT = re.compile(r"(?:@(!?)([%\w.$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
ADDRESS = re.compile(r"\[\s*([%\w.$]+)\s*(?:\+\s*(-?\w+))?\s*\]")
HEADER = re.compile(r"\.(entry|func)\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)([{;])")
VARIABLE = re.compile(
    r"\.(shared|local|param|global|const)\s+(?:\.align\s+(\d+)\s+)?(?:\.\w+\s+)*?\.(\w\d+)\s+([\w$]+)(\[(\d*)\])?"
)


def split_list(text):
    """Split operands at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def aligned(offset, alignment):
    return -(-offset // alignment) * alignment


@dataclass
class Program:
    """A translated kernel: the text for the executor, and the offsets of the kernel's parameters."""

    name: str
    params: dict = field(default_factory=dict)  # name: (offset, bytes)
    param_bytes: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    instructions: list = field(default_factory=list)
    text: str = ""


def bodies(ptx):
    """Returns {name: (kind, results, parameters, body)} of the functions."""
    results = {}
    for match in HEADER.finditer(ptx):
        kind, returned, name, parameters, _, end = match.groups()
        if end == ";":
            continue
        depth, start = 1, match.end()
        for at in range(start, len(ptx)):
            depth += (ptx[at] == "{") - (ptx[at] == "}")
            if depth == 0:
                break
        results[name] = kind, returned or "", parameters or "", ptx[start:at]
    return results


def statements(body):
    """Yields statements, labels (with their colon), and the braces of scopes. Braces around operands stay in their
    statement."""
    text = ""
    for character in body:
        if character in ";{}:" and not (text.strip() if character in "{}" else False):
            if character == ":" and not re.fullmatch(r"\s*[$\w]+", text):
                text += character
                continue
            yield " ".join((text + (character if character != ";" else "")).split())
            text = ""
        else:
            text += character


class Translation:
    def __init__(self, ptx, entry=None):
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
        self.files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx))
        ptx = re.sub(r"\.file\s[^\n]*", "", ptx)
        ptx = re.sub(r"\.loc\s+(\d+)\s+(\d+)[^\n]*", r".loc \1 \2;", ptx)
        self.functions = bodies(ptx)
        entries = [name for name, (kind, *_) in self.functions.items() if kind == "entry"]
        self.program = Program(entry or entries[0])
        self.registers, self.widths, self.of_calls = {}, [], set()  # of_calls: registers for parameters of calls
        self.constants, self.labels, self.symbols = {}, {}, {}
        self.fresh = count()
        self.dynamic = False  # True if the launch gives the size of shared memory
        self.place = ""
        for name in SPECIAL:
            self.register(name, 4)
        self.sink = self.register("sink", 8)
        self.predicate_sink = self.register("predicate sink", 0)
        self.variables(ptx[: HEADER.search(ptx).start()], {})  # variables of the module
        self.parameters()
        self.function(self.functions[self.program.name][3], {}, None)
        self.link()

    # ---- names

    def register(self, name, width):
        self.registers[name] = len(self.widths)
        self.widths.append(width)
        return self.registers[name]

    def declare(self, kind, names, scope):
        width = WIDTHS.get(kind, int(re.sub(r"\D", "", kind) or 0) // 8)
        for name in split_list(names):
            repeated = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            for each in [f"{repeated[1]}{i}" for i in range(int(repeated[2]))] if repeated else [name]:
                scope[each] = f"{each} {next(self.fresh)}"
                self.register(scope[each], width)

    def variables(self, text, scope):
        """Enter the declared variables of memory into `scope`. Parameters of called functions become registers."""
        for space, alignment, kind, name, array, size in VARIABLE.findall(text):
            width = int(kind[1:]) // 8
            bytes_ = width * (int(size or 0) if array else 1)
            if space == "param":
                if array:
                    raise ValueError(f"an array as parameter of a call: {name}")
                scope[name] = f"{name} {next(self.fresh)}"
                self.register(scope[name], width)
                self.of_calls.add(scope[name])
                continue
            if space in ("global", "const"):
                continue  # not supported: an access fails as an unknown operand
            if space == "shared" and self.dynamic:
                raise ValueError(f"{name} beside dynamic shared memory")
            self.dynamic |= bytes_ == 0
            total = f"{space}_bytes"
            offset = aligned(getattr(self.program, total), int(alignment or width))
            self.symbols[name] = offset
            setattr(self.program, total, offset + bytes_)

    def parameters(self):
        program, offset = self.program, 0
        for line in split_list(self.functions[program.name][2]):
            kind, name, size = re.search(r"\.([busf]\d+)\s.*?([\w$]+)(?:\[(\d+)\])?$", line, re.S).groups()
            alignment = re.search(r"\.align\s+(\d+)\s+\.b8", line)
            width = int(kind[1:]) // 8
            offset = aligned(offset, int(alignment[1]) if alignment and size else width)
            program.params[name] = offset, width * int(size or 1)
            self.symbols[name] = offset
            offset += width * int(size or 1)
        program.param_bytes = offset

    # ---- operands

    def constant(self, value):
        return ~self.constants.setdefault(value & (1 << 64) - 1, len(self.constants))

    def operand(self, text, scope):
        if text == "_":
            return self.sink
        name = scope.get(text, text)
        if name in self.registers:
            return self.registers[name]
        if text in self.symbols:
            return self.constant(self.symbols[text])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return self.constant(int(text[2:], 16))
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return self.constant(int(text.rstrip("U"), 0))
        raise ValueError(f"operand {text!r}")

    # ---- code

    def emit(self, opcode, operands=(), numbers=(), text="call", predicate=-1, negated=False):
        self.program.instructions.append([opcode, predicate, int(negated), operands, numbers, f"{text}{self.place}"])

    def function(self, body, scope, end):
        """Translate a function's body. end: the label to which a `ret` of an inlined function branches."""
        scopes, labels = [scope], {}
        for statement in statements(body):
            if statement == "{":
                scopes.append(dict(scopes[-1]))
            elif statement == "}":
                if len(scopes) > 1:
                    scopes.pop()
            elif statement.endswith(":"):
                label = labels.setdefault(statement[:-1], next(self.fresh))
                self.labels[label] = len(self.program.instructions)
            elif statement.startswith("."):
                self.directive(statement, scopes[-1])
            elif statement:
                self.instruction(statement, scopes[-1], labels, end)

    def directive(self, statement, scope):
        kind, _, rest = statement[1:].partition(" ")
        if kind == "reg":
            kind, _, names = rest.strip().lstrip(".").partition(" ")
            self.declare(kind, names, scope)
        elif kind == "loc":
            file, line = rest.split()
            self.place = f"   ({self.files.get(file, '?').rpartition('/')[2]}:{line})"
        elif kind in ("shared", "local", "param"):
            self.variables(statement, scope)
        elif kind not in ("pragma", "maxntid", "minnctapersm", "section"):
            raise ValueError(f"directive {statement!r}")

    def instruction(self, statement, scope, labels, end):
        match = STATEMENT.fullmatch(statement)
        if not match:
            raise ValueError(f"statement {statement!r}")
        negated, predicate, opcode, rest = match.groups()
        guard = {"text": statement}
        if predicate:
            guard |= {"predicate": self.operand(predicate, scope), "negated": bool(negated)}
        operands = split_list(rest)
        family = opcode.partition(".")[0]
        if family == "bra":
            return self.emit(opcode, (), (labels.setdefault(rest, next(self.fresh)),), **guard)
        if family == "ret" and end is not None:
            return self.emit("bra", (), (end,), **guard)
        if family == "call":
            if predicate:
                raise ValueError(f"a call that not all make: {statement}")
            return self.call(operands, scope)
        if ".param" in opcode and (name := ADDRESS.search(rest)) and scope.get(name[1]) in self.of_calls:
            if int(name[2] or 0) or "{" in rest:
                raise ValueError(f"a part of a parameter: {statement}")
            to, source = (operands[0], name[1]) if family == "ld" else (name[1], operands[-1])
            return self.move(to, source, scope, scope, **guard)
        if family == "mov" and "{" in rest:
            opcode = f"{'unpack' if rest.startswith('{') else 'pack'}{rest.count(',')}{opcode[3:]}"
        if family in ("min", "max") and len(operands) == 4:  # min and max of three operands, from sm_100 on
            opcode = f"{family}3{opcode[3:]}"
        # `red` becomes an `atom` whose result is unused.
        opcode = re.sub(r"^red\.(?!async)", "atom.", opcode)
        self.emit(opcode, *self.encoded(family, operands, scope), **guard)

    def encoded(self, family, operands, scope):
        """Returns (numbers of the operands, offsets of their addresses)."""
        results, numbers = [], []
        for text in operands:
            if text.startswith("{"):
                results += [self.operand(x, scope) for x in split_list(text[1:-1])]
            elif address := ADDRESS.fullmatch(text):
                results.append(self.operand(address[1], scope))
                numbers.append(int(address[2] or "0", 0))
            elif "|" in text:
                results += [self.operand(x.strip(), scope) for x in text.split("|")]
            else:
                results.append(self.operand(text, scope))
        if family in ("setp", "shfl") and "|" not in operands[0]:
            results.insert(1, self.predicate_sink)
        if family == "red":
            results.insert(0, self.sink)
        return results, numbers

    def move(self, to, source, scope, scope_of_source, **guard):
        pair = [self.operand(*x) for x in ((to, scope), (source, scope_of_source))]
        self.emit(f"mov.b{8 * self.widths[pair[0]]}", pair, **guard)

    def call(self, operands, scope):
        """Inline the called function."""
        results, name, arguments = operands if len(operands) == 3 else ("", *operands)
        kind, returned, parameters, body = self.functions[name]
        inner = {}
        self.variables(returned, inner), self.variables(parameters, inner)
        theirs = [x.split()[-1] for x in split_list(parameters)]
        for to, source in zip(theirs, split_list(arguments.strip("()"))):
            self.move(to, source, inner, scope)
        end = next(self.fresh)
        self.function(body, inner, end)
        self.labels[end] = len(self.program.instructions)
        for to, source in zip(split_list(results.strip("()")), [x.split()[-1] for x in split_list(returned)]):
            self.move(to, source, scope, inner)

    def link(self):
        lines = [
            f"widths\t{' '.join(map(str, self.widths))}",
            f"constants\t{' '.join(str(x - (x >> 63 << 64)) for x in self.constants)}",
            f"memory\t{self.program.shared_bytes} {self.program.local_bytes}",
        ]
        for opcode, predicate, negated, operands, numbers, text in self.program.instructions:
            if opcode.startswith("bra"):
                if numbers[0] not in self.labels:
                    raise ValueError(f"no label: {text}")
                numbers = [self.labels[numbers[0]]]
            row = opcode, predicate, negated, " ".join(map(str, operands)), " ".join(map(str, numbers)), text
            lines.append("\t".join(map(str, row)))
        self.program.text = "\n".join(lines) + "\n"


def program(ptx, entry=None):
    return Translation(ptx, entry).program
