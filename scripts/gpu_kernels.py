"""Compiles the Triton kernels that a GPU check will launch, which would take minutes of the check's time.

    python scripts/gpu_kernels.py [--arch 90] [--ops ...] [--python PYTHON] [--out FILE]

Needs no GPU. The calls of `safeops verify`, tests/gpu/test_unseen.py and the benchmarks run on the CPU, and each is
also planned as on a GPU. The planned kernels are then compiled into a Triton cache, which `gpu_check.py --kernels FILE`
copies into the cache of the GPU's machine. There Triton finds a kernel by a key made from

    Triton's own files, including its extension module, which differs between versions of Python
    the kernel's source, the source of all functions it calls, its arguments' types and its constants
    ptxas's version, the architecture, the options, and environment variables that change the result

So --python must be an interpreter with the GPU machine's versions of Python and Triton; it needs no torch. If a key
differs nevertheless, the kernel is compiled on the GPU's machine.
"""

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
GROUP = "__grp__"  # prefix of the file in which Triton lists a kernel's files, by absolute paths
KEPT = (".cubin", ".json")  # the files in Triton's cache that a launch needs
ELEMENTS = 1 << 20  # elements in a benchmark's call: calls of more elements take the same kernels


# ---- planning, in this interpreter


@contextlib.contextmanager
def planned(arch):
    """Context manager: yields a dict. For each call on the CPU inside, it gets the kernels that the call would compile
    for a GPU of this architecture, as JSON, as keys.

    Inside, checks do not compare values: an op's own result stands for the truth. Plans do not depend on values, and
    the definitions in fp64 would take most of the time."""
    import torch
    from safeops.kernels.engine import launch
    from triton.backends.compiler import GPUTarget

    from safeops.core import library
    from safeops.testing import Subject, compare, run

    result, planning = {}, [True]

    def plan(launch_plan, *_):
        if "noted" not in vars(launch_plan):  # plans are cached, so one comes back at each call
            launch_plan.noted = True
            launch_plan.compile(GPUTarget("cuda", arch, 32))

    def note(source, target, options):
        result[json.dumps(encoded(source, options))] = None

    def truth(subject, sample, upstream=None, autocast=False):
        planning[0] = False
        try:
            outcome = run(subject.op, sample, upstream, unused_ok=True)
        finally:
            planning[0] = True
        outcome.several_terms = subject.several_terms
        return outcome

    def with_plan(launcher, kernel):
        def call(keys, *args):
            if planning[0]:
                launcher(*args)
            return kernel.call_boxed(keys, *args)

        return call

    kernels = torch.library.Library("safeops", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the C++ kernels are overridden
        for op, launcher in library.launchers.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
                continue  # no CPU kernel: the op's Triton kernels are compiled during the check
            call = with_plan(launcher, torch.library.get_kernel(op, "CPU"))
            kernels.impl(op, call, "CPU", with_keyset=True)
    changes = [(launch.triton, "compile", note), (launch.Plan, "__call__", plan), (Subject, "truth", truth),
               (compare, "assert_close", lambda *_, **__: None)]  # fmt: skip
    with contextlib.ExitStack() as changed:
        for change in (*changes, (launch, "arch_of", lambda device: arch)):
            changed.enter_context(mock.patch.object(*change))
        yield result
    del kernels
    launch._plans.clear()  # they hold for this architecture alone


def requests(ops, arch):
    """Returns {stage of the GPU check: {kernel that its calls compile, as JSON: None}}. ops: the ops to call; empty:
    all."""
    from safeops.core import library
    from safeops.core.op import registry

    sys.path.insert(0, str(ROOT))
    from benchmarks import case
    from tests.gpu.test_unseen import CASES

    if unknown := set(ops).difference(registry, case.names()):
        raise SystemExit(f"gpu_kernels: there is no op {min(unknown)!r}")
    launched = {op.name().removeprefix("safeops::") for op in library.launchers}
    names = {
        "unseen": list(dict.fromkeys(case.op for case in CASES)),
        "verify": [name for name, op in registry.items() if op.cpu and launched.intersection(op.raw)],
        "benchmarks": case.names(),
    }
    work = [(who, name) for who, all_names in names.items() for name in all_names if not ops or name in ops]
    results = {who: {} for who in names}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), initializer=prepare_planner) as pool:
        for (who, name), texts in zip(work, pool.map(request, *zip(*work), [arch] * len(work))):
            results[who].update(dict.fromkeys(texts))
            print(f"{who}: {len(results[who])} kernels up to {name}", flush=True)
    return results


def prepare_planner():
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # losses warn that operands are broadcast, which is intended here


def request(who, name, arch):
    """Returns the kernels, as JSON, that the calls of one op (or one benchmark) compile. who: the stage that makes
    them."""
    with planned(arch) as result:
        {"unseen": call_unseen, "verify": call_checks, "benchmarks": call_benchmark}[who](name)
    return list(result)


def call_checks(name):
    from safeops.core.op import registry
    from safeops.verify import worker

    def say(op, why=None, **_):
        if why:
            raise RuntimeError(f"{op}: {why}")

    worker.check_op(registry[name], "cpu", False, say)


def call_unseen(name):
    """Launches the op's cases of tests/gpu/test_unseen.py with all rows, since their number decides how blocks share
    the work."""
    from tests.gpu import test_unseen

    with mock.patch.object(test_unseen, "ELEMENTS", None):
        for case in test_unseen.CASES:
            if case.op == name:
                case.launch()


def call_benchmark(name):
    import torch

    from benchmarks import __main__ as benchmarks
    from benchmarks import case

    case.names()  # registers the cases
    for dtype in benchmarks.parse(["--quick"]).dtypes.split(","):
        benchmark = case.build(name, ELEMENTS, case.DTYPES[dtype], "cpu")
        result = benchmark.ours(*benchmark.inputs)
        if benchmark.backward_bytes is not None:
            result.backward(torch.ones_like(result))


def encoded(source, options):
    """Converts a triton.compiler.ASTSource and its options to values that JSON can hold."""
    return {
        "kernel": path(source.fn),
        "signature": source.signature,
        "constants": [(at, constant(value)) for at, value in source.constants.items()],
        "attrs": list(source.attrs.items()),
        "options": options,
    }


def constant(value):
    if hasattr(value, "arg_names"):
        return {"function": path(value)}
    if hasattr(value, "primitive_bitwidth"):
        return {"dtype": value.name}
    if value is None or isinstance(value, (int, str)):
        return value
    raise TypeError(f"a constant of {type(value)}")


def path(fn):
    if getattr(sys.modules[fn.__module__], fn.__name__, None) is not fn:
        raise ValueError(f"{fn.__module__}.{fn.__name__} is another function")
    return f"{fn.__module__}:{fn.__name__}"


def function(path):
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


# ---- compiling, in the other interpreter


def decoded(request):
    """Returns (triton.compiler.ASTSource, options), the inverse of `encoded`."""
    import triton.language as tl
    from safeops.kernels.engine.kernel import hash_callees_first
    from triton.compiler import ASTSource

    def hashed(path):
        result = function(path)
        hash_callees_first(result)
        return result

    def value(x):
        if isinstance(x, dict):
            return hashed(x["function"]) if "function" in x else tl.dtype(x["dtype"])
        return x

    def tuples(x):
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    kernel = hashed(request["kernel"])
    kinds = {name: tuples(kind) for name, kind in request["signature"].items()}
    for name, annotation in kernel.fn.__annotations__.items():
        if hasattr(annotation, "_fields") and isinstance(kinds[name], tuple):  # JSON has made a list of a NamedTuple
            kinds[name] = annotation(*kinds[name])
    constants = {tuple(at): value(x) for at, x in request["constants"]}
    attrs = {tuple(at): what for at, what in request["attrs"]}
    return ASTSource(kernel, kinds, constants, attrs), request["options"]


def compile_one(arch, request):
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = decoded(request)
    triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def without_torch():
    """Makes the kernels' modules importable without torch, which they need only for its dtypes, and without an
    installed safeops, which would map `safeops.kernels` to the folder kernels/."""
    for name, folder in {"safeops": "safeops", "safeops.kernels": "kernels"}.items():
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(ROOT / folder)]
    sys.modules |= {"torch": mock.MagicMock(), "safeops.core.library": mock.MagicMock()}


def prepare_worker():
    sys.path.insert(0, str(ROOT))
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

        return
    without_torch()


def compile_all(arch, wanted):
    with ProcessPoolExecutor(initializer=prepare_worker) as pool:
        for done, _ in enumerate(pool.map(compile_one, [arch] * len(wanted), wanted), 1):
            if done % 100 == 0:
                print(f"{done} of {len(wanted)} kernels compiled", flush=True)


def compile_by(python, arch, wanted, cache):
    """Runs compile_all in another interpreter, whose Triton writes into the folder `cache`."""
    command = [python, __file__, "--compile", "--arch", str(arch)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {
        "TRITON_CACHE_DIR": str(cache)
    }
    subprocess.run(command, input=json.dumps(wanted), text=True, check=True, env=environment)


# ---- the file


def pack(cache, out):
    """Writes the kernels of a cache folder to the file `out`. Absolute paths in Triton's lists become file names."""
    with tarfile.open(out, "w:xz") as file:
        for result in sorted(cache.glob("*/*")):
            if result.suffix not in KEPT:
                continue
            data = result.read_bytes()
            if result.name.startswith(GROUP):
                paths = json.loads(data)["child_paths"]
                data = json.dumps({"child_paths": {name: name for name in paths if name.endswith(KEPT)}}).encode()
            entry = tarfile.TarInfo(f"{result.parent.name}/{result.name}")
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))


def unpack(file, cache):
    """Copies the kernels of a file into a cache folder, with absolute paths in Triton's lists. Returns their number."""
    with tarfile.open(file) as packed:
        packed.extractall(cache, filter="data")
        groups = [Path(cache, name) for name in packed.getnames() if Path(name).name.startswith(GROUP)]
    for group in groups:
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))
    return len(groups)


def cache_folder():
    """Returns Triton's cache folder on this machine."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))


def compiled():
    """Returns how many kernels Triton's cache has."""
    return sum(1 for _ in cache_folder().glob("*/*.cubin"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="the GPU's compute capability (default: 90, for 9.0)")
    parser.add_argument("--ops", nargs="+", default=(), metavar="OP", help="of these alone (default: all)")
    parser.add_argument("--python", default=sys.executable, help="as on that machine: its version, and its Triton")
    out = ROOT / "dist" / "gpu-kernels.tar.xz"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"default: {out}")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.compile:
        compile_all(args.arch, json.load(sys.stdin))
        return 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each of its starts
    results = requests(args.ops, args.arch)
    wanted = [json.loads(text) for text in {text: None for texts in results.values() for text in texts}]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        compile_by(args.python, args.arch, wanted, Path(cache))
        pack(Path(cache), args.out)
    counts = ", ".join(f"{len(texts)} for {who}" for who, texts in results.items())
    print(f"{args.out}: {len(wanted)} kernels ({counts}), {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
