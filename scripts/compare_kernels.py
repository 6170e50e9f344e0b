"""Compares the machine code of every planned Triton kernel before and after a change of the engine.

    python scripts/compare_kernels.py record BEFORE [--part N]         (in one checkout; ten minutes on two cores)
    python scripts/compare_kernels.py record AFTER [--like BEFORE]     (in the other one)
    python scripts/compare_kernels.py compare BEFORE AFTER

`record` compiles the kernels that tests/kernels plans for sm_90, with the pinned Triton and the oldest supported one,
and writes them to a file (JSON, xz). --part takes every Nth kernel; --like takes those of another file. For `compare`,
two kernels of one name are equal if they have equally many registers and the same instructions in the same order; the
offsets of their arguments may differ. It prints the kernels that differ or are in one file alone, and exits with 1 if
there are any. Other offsets may merge or split loads of neighboring arguments: kernels that differ only in such loads
are counted separately. Needs no GPU.
"""

import argparse
import collections
import json
import lzma
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUT_LOADS = "but for loads of arguments"
CHUNK = 40  # number of kernels that one process compiles


def read(file):
    return json.loads(lzma.open(file).read())


def record(file, part, names):
    sys.path.insert(0, str(ROOT))
    from tests.kernels import compiled
    from tests.kernels.test_triton_compiled import FOLDERS, GPU, planned

    plans = {name: plan for name, plan in planned().items() if not names or name in names}
    plans = dict(list(plans.items())[::part])
    requests = [compiled.gpu_kernels().encoded(plan.source(), plan.options(GPU)) for plan in plans.values()]
    chunks = [slice(at, at + CHUNK) for at in range(0, len(requests), CHUNK)]
    results = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for version, folder in FOLDERS.items():
            if folder and not folder.exists():
                raise SystemExit(f"compare_kernels: there is no {folder}: make test-kernels installs Triton {version}")
            answers = pool.map(lambda chunk, by=folder: compiled.ask(requests[chunk], "instructions", by), chunks)
            results[version] = dict(zip(plans, (code for _, codes in answers for code in codes), strict=True))
            print(f"Triton {version}: {len(plans)} kernels", flush=True)
    with lzma.open(file, "wt", preset=1) as out:
        json.dump(results, out)


LOAD = re.compile(r"U?LDC\S* \w+, argument|NOP")  # matches loads of arguments, and the padding at a kernel's end


def work(code):
    """Returns {instruction without operands and predicate: how often it occurs}."""
    return collections.Counter(row.removeprefix("@").split(" ", 2)[row.startswith("@")] for row in code)


def difference(before, after):
    """Returns the difference between two kernels in words; None if there is none."""
    if before == after:
        return None
    (registers, *old), (others, *new) = before, after
    if work(old) == work(new):
        return f"{registers} -> {others}, the same {len(new)} instructions in another order or other registers"
    ours, theirs = ([row for row in code if not LOAD.match(row)] for code in (old, new))
    if work(ours) == work(theirs):
        return f"{registers} -> {others}, the same {len(ours)} instructions {BUT_LOADS}"
    return f"{registers} -> {others}, {len(old)} -> {len(new)} instructions"


def compare(before, after):
    """Print the kernels that differ, and return how many there are."""
    wrong = 0
    for version in sorted({*before, *after}):
        old, new = before.get(version, {}), after.get(version, {})
        lines = [f"  {name}: in one file alone" for name in old.keys() ^ new.keys()]
        for name in old.keys() & new.keys():
            if (what := difference(old[name], new[name])) is not None:
                lines.append(f"  {name}: {what}")
        loads = sum(line.endswith(BUT_LOADS) for line in lines)
        print(f"Triton {version}: {len(old.keys() | new.keys())} kernels, {len(lines)} differ, {loads} {BUT_LOADS}")
        print("".join(f"{line}\n" for line in sorted(lines)), end="")
        wrong += len(lines)
    return wrong


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("file", type=Path)
    one.add_argument("--part", type=int, default=1, metavar="N", help="every Nth kernel (default: all)")
    one.add_argument("--like", type=Path, metavar="FILE", help="the kernels that this file has")
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.command == "record":
        return record(parsed.file, parsed.part, parsed.like and set().union(*read(parsed.like).values()))
    return min(1, compare(read(parsed.before), read(parsed.after)))


if __name__ == "__main__":
    sys.exit(main())
