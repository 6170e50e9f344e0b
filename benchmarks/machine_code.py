"""The work in a kernel's machine code: the instructions of its path over a tile inside the tensor, by pipe, and the
bytes that the path moves. Read from the compiled code, with branches and loops as the disassembler shows them."""

import re
import struct
import subprocess
import tempfile
from bisect import bisect
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

STORES = -1  # the key of a loop that touches memory, and loads nothing
AVOIDED = -1  # passes of a loop that the path does not lead through, if there is a choice


class Work:
    """Instructions of one warp by pipe, and bytes that a thread loads and stores. Of loops whose passes are known all
    instructions, the bytes of one pass, and how many passes wait for memory. marks: what was looked for and found.
    around: whether it is a loop's, beside the loops in it."""

    around = False

    def __init__(self, counts=(), load=0, store=0, waits=0, marks=0):
        self.counts, self.load, self.store, self.waits, self.marks = Counter(counts), load, store, waits, marks

    def __add__(self, other):
        mine, its = ((w.load, w.store, w.waits, w.marks) for w in (self, other))
        return Work(self.counts + other.counts, *(a + b for a, b in zip(mine, its)))

    def repeated(self, passes):
        """A loop's body, run so often (None: not at all, and not looked for); a loop that was looked for is a mark, one
        to be AVOIDED the opposite."""
        key = self.load or (STORES if self.counts["lsu"] else 0)
        often = passes.get(key)
        marks = self.marks + (0 if often is None else -1 if often == AVOIDED else 1)
        often = 0 if often == AVOIDED else passes.get(key, 1) or 0
        counts = {pipe: often * n for pipe, n in self.counts.items()}
        waits = often * (self.waits or bool(self.load))
        return Work(counts, self.load, self.store, waits, marks) if often else Work(marks=marks)

    @property
    def instructions(self):
        return self.counts.total()


PIPES = {
    "fp64": r"D(ADD|MUL|FMA|SETP|MNMX)",
    "xu": r"MUFU|F2F|F2I|I2F|FRND|POPC|FLO",
    "fma": r"F(ADD|MUL|FMA)|H(ADD|MUL|FMA)2",
    "imad": r"IMAD|IMUL",
    "lsu": r"(LD|ST)[GSL]|LDGSTS|ATOM[GS]?|RED|SHFL|MEMBAR",
    "issue": r"U\w+|R2UR|BRA|EXIT|NOP|BAR|BSSY|BSYNC|WARPSYNC|CALL|RET|LDC|S2R|CS2R|ERRBAR|CCTL",
}
PIPES = {op: re.compile(ops) for op, ops in PIPES.items()}


MEMORY = ("LDG", "LDGSTS", "STG")
NONE = "$^"  # a pattern of no instruction
END = -1  # of the program, among addresses


def work_of(op, marks=0):
    base, _, modifiers = op.partition(".")
    pipe = next((name for name, ops in PIPES.items() if ops.fullmatch(base)), "alu")
    load = store = 0
    if base in MEMORY and not re.search(r"STRONG\.(GPU|SYS)", modifiers):  # those are other blocks' partials
        width = re.search(r"\b[US]?(256|128|64|16|8)\b", modifiers)
        size = int(width.group(1)) // 8 if width else 4
        load, store = (0, size * (size == 16)) if base == "STG" else (size, 0)  # narrower ones: results of a block
    return Work({pipe: 1}, load, store, marks=marks)


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ )? *([A-Z][A-Z0-9.a-z_]*) *([^;]*);")


def basic_blocks(listing, mark=NONE, avoid=NONE):
    """{address: (Work, addresses of what may follow)}, END among them."""

    def marks(line):
        return (re.search(mark, line) is not None) - (re.search(avoid, line) is not None)

    rows = [(int(at, 16), bool(guard), op, rest) for at, guard, op, rest in INSTRUCTION.findall(listing)]
    jumps = {at: int(re.search(r"0x([0-9a-f]+)", rest).group(1), 16) for at, _, op, rest in rows if op[:3] == "BRA"}
    starts, result, here = {rows[0][0], *jumps.values()}, {}, None
    for (at, guard, op, rest), after in zip(rows, [*(row[0] for row in rows[1:]), None]):
        if here is None or at in starts:
            if here is not None:
                result[here][1].append(at)
            here, result[at] = at, [Work(), []]
        result[here][0] += work_of(op, marks(f"{op} {rest}"))
        if at in jumps:
            maybe = guard or re.match(r"!?U?P\d", rest)
            result[here][1].extend([jumps[at], after] if maybe else [jumps[at]])
            here = None
        elif op == "EXIT" or op.startswith("RET"):
            result[here][1].extend([END, after] if guard else [END])
            here = None
    return result


def components(nodes, follow):
    """Strongly connected components of a graph, each after those that it leads to (Tarjan)."""
    index, low, stack, results = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in follow(v):
            if w in nodes and w not in index:
                visit(w)
            if w in nodes and w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            at = stack.index(v)
            results.append(set(stack[at:]))
            del stack[at:]

    for v in nodes:
        if v not in index:
            visit(v)
    return results


def longest(blocks, nodes, entry, passes=None, most=False):
    """(Work outside of loops, [Work of one pass of each innermost loop that moves data, and of each around one]) of the
    path from `entry` that moves most data by the fewest instructions: that of a tile inside the tensor. passes: {bytes
    that a pass of a loop loads: how many passes there are}, else one; then no loop is left. most: by the most
    instructions, where a branch depends on values."""

    def moved(path):
        instructions = path[0].instructions if most else -path[0].instructions
        return path[0].marks, sum(w.load + w.store for w in (path[0], *path[1])), instructions

    best = {END: (Work(), [])}
    for part in components(nodes, lambda v: blocks[v][1] if v == entry else [w for w in blocks[v][1] if w != entry]):
        here = {}
        for v in part & {entry, *(w for u in nodes - part for w in blocks[u][1])}:  # where it is entered
            if v == entry or len(part) == 1 and v not in blocks[v][1]:
                here[v] = blocks[v][0], []
                continue
            once, loops = longest(blocks, part, v, passes, most)
            if passes is not None:
                once = once.repeated(passes)
            elif not loops and once.load + once.store:
                once, loops = Work(), [once]
            elif loops:
                once.around = True
                once, loops = Work(), [*loops, once]
            here[v] = once, loops
        after = [best[w] for v in part for w in blocks[v][1] if w in best and w not in part and w != entry]
        tail = max(after, key=moved, default=(Work(), []))
        for v, cost in here.items():
            best[v] = cost[0] + tail[0], cost[1] + tail[1]
    return best[entry]


def main_path(listing, passes=None, mark=NONE, avoid=NONE, most=False):
    """(Work of a block beside its tiles, [Work of one pass of each loop over tiles]); no loop: a block has one tile.
    mark, avoid: patterns of instructions through which the path leads, and does not, if there is a choice."""
    blocks = basic_blocks(listing, mark, avoid)
    entry = min(blocks)
    reached, left = {END}, [entry]
    while left:
        v = left.pop()
        left += () if v in reached else blocks[v][1]
        reached.add(v)
    return longest(blocks, reached - {END}, entry, passes, most)


def text(cubin):
    """The machine code of an ELF file of one kernel, and its registers."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, *_, offset, length in headers:
        if cubin[headers[names][4] + name :].startswith(b".text."):
            registers = re.search(rb"\x04\x2f\x08\x00.{4}(.{4})", cubin, re.S).group(1)  # EIATTR_REGCOUNT
            return cubin[offset : offset + length], int.from_bytes(registers, "little")


class Code(NamedTuple):
    once: Work  # of a block, beside its tiles
    loops: list  # Work of a pass over one tile, or a few; none where a block has one tile. And of the loops around
    registers: int
    shared: int


def read(cubins, arch, nvdisasm):
    """[Code] of cubins of one kernel each, given with their shared memory and the passes of their loops (or None)."""
    texts = [text(cubin) for cubin, *_ in cubins]
    listings = disassembled([code for code, _ in texts], arch, nvdisasm)
    return [
        Code(*main_path(listing, passes), registers, shared)
        for listing, (_, registers), (_, shared, passes) in zip(listings, texts, cubins)
    ]


def disassembled(kernels, arch, nvdisasm):
    """The listings of machine code. All of it is taken apart together: the tool's start takes longest."""
    raw, ends = b"".join(kernels), list(accumulate(map(len, kernels)))
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        command = [nvdisasm, "--binary", f"SM{arch}", "--no-dataflow", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[] for _ in kernels]
    for row in INSTRUCTION.finditer(listing):
        rows[bisect(ends, int(row.group(1), 16))].append(row.group())
    return ["\n".join(lines) for lines in rows]
