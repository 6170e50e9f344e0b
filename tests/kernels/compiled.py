"""Searches Triton's compiled kernels for four faults, by the installed Triton or another version.

- `gaps`: a reduction over lanes whose lane numbers differ in bits that are not adjacent, as 0 and 2. Triton 3.6
  compiles the wrong shuffles for it.
- `crosswise`: neighbors in memory lie in lanes that are not neighbors. 32 lanes then read 32 cache lines.
- `fused`: a fused multiply-add whose addend another lane has sent. Two lanes exchange products to hold their sum. Each
  lane rounds only the other's product, so the two sums, of which both may be stored, differ in the last bit.
- `alike`: a kernel calls one function with two nestings of the same leaves, as ((n,), ()) and ((), (n,)). Triton 3.6
  names a compiled function by the leaves alone, so the second call runs the code of the first.

`python -m tests.kernels.compiled STAGE` reads kernels from stdin, as scripts/gpu_kernels.py writes them, and prints the
faults or the instructions of each; it needs no torch. PYTHONPATH selects the Triton.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.machine_code import INSTRUCTION, disassembled, text

ROOT = Path(__file__).resolve().parents[2]
ARCH = 90


# ---- layouts of a TTGIR: how far each bit of a register's, lane's and warp's number moves an element in the tile


def layouts(ttgir):
    """Returns {alias: text of the layout} of a module, e.g. {"#blocked": "#ttg.blocked<...>"}."""
    return dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.M))


def bases(layout, shape, layouts_by_name):
    """Returns {"register", "lane", "warp": [[rows, columns] by which bit 0, 1, ... of the number moves the
    element]}."""
    layout = layouts_by_name.get(layout, layout)
    if slice_of := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>", layout):
        dim = int(slice_of[1])
        results = bases(slice_of[2], (*shape[:dim], None, *shape[dim:]), layouts_by_name)
        return {name: [step[:dim] + step[dim + 1 :] for step in steps] for name, steps in results.items()}
    if layout.startswith("#ttg.linear<"):
        return {
            name: json.loads(re.search(rf"{name} = (\[(?:\[[^]]*\](?:, )?)*\])", layout)[1])
            for name in ("register", "lane", "warp")
        }
    if mma := re.fullmatch(
        r"#ttg\.nvidia_mma<\{versionMajor = 3, .*warpsPerCTA = \[(\d+), 1\], instrShape = \[16, (\d+).*", layout
    ):
        (rows, columns), (warps, wide) = shape, map(int, mma.groups())
        powers = [1 << bit for bit in range(20)]
        tall = [[x, 0] for x in powers if 16 * warps <= x < (rows or 0)]
        return {
            "register": [[0, 1], [8, 0], *([0, x] for x in powers if 8 <= x < (columns or wide)), *tall],
            "lane": [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
            "warp": [[16 * x, 0] for x in powers if x < warps],
        }
    parts = re.search(r"sizePerThread = (.*?), threadsPerWarp = (.*?), warpsPerCTA = (.*?), order = (\[.*?\])", layout)
    *sizes, order = map(json.loads, parts.groups())
    results, reach = {}, [1] * len(order)
    for name, size in zip(("register", "lane", "warp"), sizes):
        results[name] = []
        for dim in order:
            for _ in range(size[dim].bit_length() - 1):
                step = [0] * len(order)
                # A step beyond the tile's end is 0: the register, lane or warp holds a copy.
                step[dim] = reach[dim] if shape[dim] is None or reach[dim] < shape[dim] else 0
                reach[dim] *= 2
                results[name].append(step)
    return results


REDUCE = re.compile(r'"tt\.reduce"\(.*?<\{axis = (\d+) : i32.*?\}\) : \(tensor<((?:\d+x)+)[a-z]\w*, (.*?)>[,)]', re.S)
ACCESS = re.compile(r"tt\.(?:load|store) [^\n]*: tensor<(\d+)x(\d+)x!tt\.ptr<\w+>, (#\w+)>")


def gaps(ttgir):
    layouts_by_name, results = layouts(ttgir), []
    reductions = REDUCE.findall(ttgir)
    if len(reductions) != ttgir.count('"tt.reduce"'):
        raise ValueError("compiled.REDUCE does not match each reduction")
    for axis, sizes, layout in reductions:
        shape = tuple(map(int, sizes.split("x")[:-1]))
        for name, steps in bases(layout, shape, layouts_by_name).items():
            bits = [bit for bit, step in enumerate(steps) if step[int(axis)]]
            if name != "register" and bits and bits != list(range(bits[0], bits[-1] + 1)):
                results.append(f"gaps: {name} bits {bits} of axis {axis} of {shape}")
    return results


def crosswise(ttgir, tile):
    layouts_by_name, results = layouts(ttgir), []
    for *sizes, layout in ACCESS.findall(ttgir):
        shape = tuple(map(int, sizes))
        if shape != tile or min(shape) == 1:
            continue
        steps = bases(layout, shape, layouts_by_name)
        nearest = next(step for step in (*steps["register"], *steps["lane"]) if any(step))
        if nearest != [0, 1]:
            results.append(f"crosswise: {shape} in steps of {nearest}")
    return results


# ---- machine code

PAIRS = re.compile(r"D|(F2F|I2F)\.F64|.*\.(64|WIDE)|CS2R(?!\.32)")  # instructions that write two registers


def fused(listing):
    sent, results = set(), []  # sent: the registers that hold a value from another lane
    for _, _, op, rest in INSTRUCTION.findall(listing):
        operands = [operand.strip("-|~ ").partition(".")[0] for operand in rest.split(", ")]
        places = [int(operand[1:]) if re.fullmatch(r"R\d+", operand) else None for operand in operands]
        result = next((place for place in places[:2] if place is not None), None)
        if operands[0].startswith(("[", "desc")) or result is None:  # a store, or only predicates written
            continue
        # A division or root computes its remainder by an FMA that subtracts the product, or rounds up or down; such
        # results are exact.
        exact = re.search(r"\.R[MP]\b", op) or "-R" in rest.partition(", ")[2].rpartition(", ")[0]
        if re.match(r"[FD]FMA\b", op) and not exact:
            if {places[3], *([places[3] + 1] if places[3] and op[0] == "D" else ())} & sent:
                results.append(f"fused: {op} {rest}")
        moved = re.match(r"MOV\b|IMAD\.MOV", op) and places[-1] in sent
        wide = 4 if ".128" in op else 2 if PAIRS.match(op) else 1
        sent -= set(range(result, result + wide))
        if moved or op.startswith("SHFL.BFLY"):
            sent.add(result)
    return results


# ---- machine code, as scripts/compare_kernels.py compares it


def instructions(listing):
    """Returns one line per instruction. Branch targets are relative to the start, and the kernel's arguments are
    numbered in the order of their first read, so neither the code's address nor the order of arguments shows."""
    rows = INSTRUCTION.findall(listing)
    start, arguments = int(rows[0][0], 16), {}

    def argument(match):  # on sm_90 the arguments begin at 0x210
        place = int(match[1], 16)
        return match[0] if place < 0x210 else f"argument {arguments.setdefault(place, len(arguments))}"

    results = []
    for _, predicate, op, rest in rows:
        rest = re.sub(r"c\[0x0\]\[(0x[0-9a-f]+)\]", argument, rest.strip())
        if re.match(r"BRA|BSSY|CALL|RET|BREAK|WARPSYNC", op):
            rest = re.sub(r"0x[0-9a-f]+", lambda match: hex(int(match[0], 16) - start), rest)
        results.append(f"{predicate}{op} {rest}")
    return results


# ---- calls within a kernel


def structures_by_leaves():
    """Returns a dict that Triton's calls within kernels fill while it compiles: {(function, types of the leaves,
    constants by path): structures of the arguments}."""
    from triton import language
    from triton.compiler.code_generator import CodeGenerator

    results, call = {}, CodeGenerator.call_JitFunction

    def structure(x, path, types, constants):
        if isinstance(x, (list, tuple, language.tuple)):
            return tuple([structure(each, (*path, i), types, constants) for i, each in enumerate(x)])
        kind = x.type.mangle() if isinstance(x, language.tensor) else repr(x)
        (types if isinstance(x, language.tensor) else constants).append((path, kind))
        return kind

    def noted(generator, fn, args, kwargs, *context):
        bound, types, constants = fn.signature.bind(*args, **kwargs), [], []
        bound.apply_defaults()
        whole = structure(bound.args, (), types, constants)
        key = fn, tuple(kind for _, kind in types), tuple(constants)
        results.setdefault(key, set()).add(whole)
        return call(generator, fn, args, kwargs, *context)

    CodeGenerator.call_JitFunction = noted
    return results


def alike(structures):
    return [
        f"alike: {len(those)} structures of {fn.__name__}" for (fn, *_), those in structures.items() if len(those) > 1
    ]


# ---- running a Triton


def gpu_kernels():
    spec = importlib.util.spec_from_file_location("gpu_kernels", ROOT / "scripts" / "gpu_kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lowered(source, options, stages, arch=ARCH):
    """Lower a kernel through these stages; returns (text after the last stage, metadata)."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    context, steps = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, *functions, context)
    backend.add_stages(steps, parsed, source.language)
    metadata = {"hash": "", "target": target, **parsed.__dict__}
    for stage in stages:
        module = steps[stage](module, metadata)
    return str(module), metadata


def compiled(source, options):
    """Returns (TTGIR, (machine code, registers))."""
    import triton
    from triton.backends.compiler import GPUTarget

    asm = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options).asm
    return asm["ttgir"], text(asm["cubin"])


def tile(source):
    """Returns the tile's (rows, columns) = (BM, BN); a kernel with only one of the two constants: (that constant,)."""
    at, fields = source.fn.arg_names.index("config"), source.fn.fn.__annotations__["config"]._fields
    return tuple(source.constants[at, fields.index(name)] for name in ("BM", "BN") if name in fields)


def ask(requests, stage, triton=None):
    """Returns (Triton's version, [faults or instructions of each request]). triton: the folder of the Triton that
    compiles; None: the installed one."""
    path = {} if triton is None else {"PYTHONPATH": str(triton)}
    command = [sys.executable, "-m", __name__, stage]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, cwd=ROOT, env=os.environ | path
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main(stage):
    """stage: ttir only compiles; ttgir and cubin print the faults found at that stage; instructions: the machine
    code."""
    kernels = gpu_kernels()
    kernels.without_torch()
    import triton

    requests = json.load(sys.stdin)
    result, codes, structures = [[] for _ in requests], {}, structures_by_leaves()
    for i, request in enumerate(requests):
        structures.clear()
        try:
            source, options = kernels.decoded(request)
            if stage in ("cubin", "instructions"):
                ttgir, codes[i] = compiled(source, options)
            else:
                ttgir, _ = lowered(source, options, ("ttir", "ttgir")[: 1 + (stage == "ttgir")])
        except triton.CompilationError as error:
            result[i].append(f"does not compile: {error}")
            continue
        result[i] += alike(structures)
        if stage in ("ttgir", "cubin"):
            result[i] += gaps(ttgir) + crosswise(ttgir, tile(source))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    for i, listing in zip(codes, disassembled([code for code, _ in codes.values()], ARCH, tool) if codes else ()):
        if stage == "cubin":
            result[i] += fused(listing)
        else:
            result[i] = [f"{codes[i][1]} registers", *instructions(listing)]
    print(json.dumps([triton.__version__, result]))


if __name__ == "__main__":
    main(sys.argv[1])
