"""Counts the work in a kernel's machine code, on the path that handles a tile inside the tensor: instructions by pipe,
and bytes moved. Branches and loops are read from the disassembler's listing."""

import re
import struct
import subprocess
import tempfile
from bisect import bisect
from collections import Counter
from itertools import accumulate
from typing import NamedTuple

STORES = -1  # in `passes`, the key of a loop that touches memory but loads nothing
AVOIDED = -1  # in `passes`, the value of a loop that the path avoids if it can


class Work:
    """The work of a piece of machine code.

    counts: {pipe: one warp's instructions}. load, store: bytes of one thread. waits: passes of loops that wait for
    memory. marks: how many wanted instructions and loops the path has, minus how many unwanted ones. A loop with a
    given number of passes counts with the instructions of all passes, but the bytes of one. around: True for a loop
    that contains loops; the work is then that outside of the inner loops."""

    around = False

    def __init__(self, counts=(), load=0, store=0, waits=0, marks=0):
        self.counts, self.load, self.store, self.waits, self.marks = Counter(counts), load, store, waits, marks

    def __add__(self, other):
        mine, its = ((w.load, w.store, w.waits, w.marks) for w in (self, other))
        return Work(self.counts + other.counts, *(a + b for a, b in zip(mine, its)))

    def repeated(self, passes):
        """Returns the work of a loop with this body. passes: {bytes that the body loads: number of passes}. A body that
        is not in `passes` counts once; None or AVOIDED: not at all. A number adds a mark, AVOIDED takes one away."""
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
NONE = "$^"  # a pattern that matches no instruction
END = -1  # in place of an address: the program's end


def work_of(op, marks=0):
    base, _, modifiers = op.partition(".")
    pipe = next((name for name, ops in PIPES.items() if ops.fullmatch(base)), "alu")
    load = store = 0
    if base in MEMORY and not re.search(r"STRONG\.(GPU|SYS)", modifiers):  # STRONG: other blocks' partial results
        width = re.search(r"\b[US]?(256|128|64|16|8)\b", modifiers)
        size = int(width.group(1)) // 8 if width else 4
        load, store = (0, size * (size == 16)) if base == "STG" else (size, 0)  # narrower: a block's result
    return Work({pipe: 1}, load, store, marks=marks)


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(@!?U?P\w+ )? *([A-Z][A-Z0-9.a-z_]*) *([^;]*);")


def basic_blocks(listing, mark=NONE, avoid=NONE):
    """Returns {address of a basic block: [its Work, addresses of the blocks that may follow]}. END follows the last
    block."""

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
    """Returns the strongly connected components of a graph (Tarjan). A component comes after the components that it
    leads to."""
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
    """Follows the path from `entry` that handles a tile inside the tensor: the path with the most marks; of equal ones
    that which moves the most data; of equal ones that with the fewest instructions. most: the most instructions
    instead, for branches that depend on values.

    passes: {bytes that a pass of a loop loads: number of passes}. If given, loops are a part of the path, with one pass
    if they are not in `passes`. Returns (Work outside of loops, [Work of one pass of each innermost loop that moves
    data, and of each loop around one]); with `passes` the list is empty."""

    def moved(path):
        instructions = path[0].instructions if most else -path[0].instructions
        return path[0].marks, sum(w.load + w.store for w in (path[0], *path[1])), instructions

    best = {END: (Work(), [])}
    for part in components(nodes, lambda v: blocks[v][1] if v == entry else [w for w in blocks[v][1] if w != entry]):
        here = {}
        for v in part & {entry, *(w for u in nodes - part for w in blocks[u][1])}:  # blocks that enter the component
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
    """Returns (Work of a thread block outside of loops, [Work of one pass of each loop over tiles]). A kernel without
    loops has one tile per thread block. mark, avoid: patterns of instructions that the path takes, or avoids, if it
    can. passes, most: as in `longest`."""
    blocks = basic_blocks(listing, mark, avoid)
    entry = min(blocks)
    reached, left = {END}, [entry]
    while left:
        v = left.pop()
        left += () if v in reached else blocks[v][1]
        reached.add(v)
    return longest(blocks, reached - {END}, entry, passes, most)


def text(cubin):
    """Returns (machine code, registers per thread) of an ELF file that has one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    for name, *_, offset, length in headers:
        if cubin[headers[names][4] + name :].startswith(b".text."):
            registers = re.search(rb"\x04\x2f\x08\x00.{4}(.{4})", cubin, re.S).group(1)  # EIATTR_REGCOUNT
            return cubin[offset : offset + length], int.from_bytes(registers, "little")


class Code(NamedTuple):
    once: Work  # of a thread block, outside of its loops
    loops: list  # Work of one pass of each loop over tiles, and of each loop around one; empty: a block has one tile
    registers: int
    shared: int


def read(cubins, arch, nvdisasm):
    """Returns a list with the Code of each kernel. cubins: [(cubin with one kernel, bytes of shared memory, passes of
    its loops or None)]."""
    texts = [text(cubin) for cubin, *_ in cubins]
    listings = disassembled([code for code, _ in texts], arch, nvdisasm)
    return [
        Code(*main_path(listing, passes), registers, shared)
        for listing, (_, registers), (_, shared, passes) in zip(listings, texts, cubins)
    ]


def disassembled(kernels, arch, nvdisasm):
    """Returns the kernels' listings. One run of nvdisasm disassembles all kernels, since its start takes most of the
    time."""
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
