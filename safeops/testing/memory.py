"""Memory: the caller's tensors, what the graph keeps alive, what is left unwritten, and how much is allocated."""

from __future__ import annotations

import contextlib
import ctypes
import sys

import torch
from torch import Tensor

from safeops.core.private_torch import version

from .compare import assert_outcomes_equal, bits
from .registry import check
from .sample import NotApplicable, Sample
from .subject import Subject, attach, make_upstream, outputs, run
from .values import each_dtype


def _state(t: Tensor):
    storage = t.untyped_storage()
    return {
        "data": bits(t).clone(),
        "_version": version(t),
        "strides": t.stride(),
        "shape": t.shape,
        "storage_offset": t.storage_offset(),
        "storage": (storage.data_ptr(), storage.nbytes()),
        "requires_grad": t.requires_grad,
    }


@check("the caller's tensors, upstream gradient included, are as they were: bits, _version, strides, storage")
def check_inputs_unchanged(subject: Subject, sample: Sample) -> None:
    for cast in each_dtype(sample, (torch.float32, torch.float16)):
        live, leaves = attach(cast.clone())
        before = {k: _state(t) for k, t in live.operands().items()}
        values = [v for v in outputs(subject.op(*live.args, **live.kwargs)) if v.requires_grad]
        upstream = [make_upstream(v) for v in values]
        upstream_before = [_state(u) for u in upstream]
        if values:
            torch.autograd.grad(values, list(leaves.values()), upstream, allow_unused=True)
        for key, t in live.operands().items():
            _unchanged(f"operand {key!r}", before[key], _state(t))
            if t.grad is not None:
                raise AssertionError(f"operand {key!r}: .grad was written by torch.autograd.grad")
        for i, u in enumerate(upstream):
            _unchanged(f"upstream gradient {i}", upstream_before[i], _state(u))


def _unchanged(what, before, after):
    for name, was in before.items():
        now = after[name]
        if not (torch.equal(was, now) if isinstance(was, Tensor) else was == now):
            raise AssertionError(f"{what} was changed by the call: its {name}")


@check("the graph keeps the inputs alive, or a result in place of one; else 16 bytes per reduced element, 24 per row")
def check_saved_bytes(subject: Subject, sample: Sample) -> None:
    try:
        sample = sample.grown(2000)
    except NotApplicable:
        pass
    for cast in each_dtype(sample, (torch.float32, torch.float16)):
        _assert_saves_little(subject, cast)


def _assert_saves_little(subject, cast):
    live, leaves = attach(cast)
    if not leaves:
        raise NotApplicable("nothing is differentiable")
    operands = {t.untyped_storage().data_ptr(): t.nbytes for t in live.operands().values()}
    kept: dict[int, int] = {}

    def note(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        values = outputs(subject.op(*live.args, **live.kwargs))
    for node, name, t in _kept_on_nodes(values):
        if t.untyped_storage().data_ptr() not in operands and t.numel() > 1:
            raise AssertionError(f"{node}.{name} holds a tensor {tuple(t.shape)} outside save_for_backward")
    extra = {data: size for data, size in kept.items() if data not in operands}
    released = sum(size for data, size in operands.items() if data not in kept)
    for data in {v.untyped_storage().data_ptr() for v in values} & extra.keys():
        if extra[data] <= released:
            released -= extra.pop(data)
    out = sum(v.numel() for v in values)
    allowed = 16 + max(16 * out if out < cast.shape().numel() else 0, subject.row_bytes(cast))
    if sum(extra.values()) > allowed:
        inputs = sum(t.nbytes for t in live.operands().values())
        raise AssertionError(
            f"saved for backward: {sum(extra.values())} bytes beside the inputs' own {inputs}, allowed {allowed} "
            f"({', '.join(map(str, extra.values()))} bytes each)"
        )


def _kept_on_nodes(values):
    """Yield (node, name, tensor) for tensors that are attributes of the graph's Python nodes: the hooks miss them."""
    seen, queue = set(), [v.grad_fn for v in values if v.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        queue += [n for n, _ in node.next_functions if n is not None]
        for name, value in getattr(node, "__dict__", {}).items():
            for t in outputs(value):
                yield type(node).__name__, name, t


@contextlib.contextmanager
def _malloc_fills(byte: int):
    """Make glibc fill memory from malloc with `byte`, also for C++ allocations that bypass torch's dispatcher."""
    libc = None
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(-6, byte ^ 0xFF)  # M_PERTURB
    try:
        yield
    finally:
        if libc is not None:
            libc.mallopt(-6, 0)


@contextlib.contextmanager
def _dispatcher_fills():
    """Deterministic mode fills memory from torch.empty and the like with NaN (integers: the largest), in C++ too."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextlib.contextmanager
def poisoned_memory(kind: str):
    """Fill uninitialized memory with values that show: "nan" (by torch), or the byte 0xFE or 0x7F (by malloc).

    A C++ kernel may allocate through the dispatcher (`torch::stable::empty`: both fill it) or below it (the shim's
    aoti_torch_empty_strided on the CPU: only malloc fills it). As halves 0xFEFE and 0x7F7F are NaN or the largest
    numbers, as floats huge, as counts absurd; and runs with different bytes differ wherever memory was left unwritten.
    """
    with _dispatcher_fills() if kind == "nan" else _malloc_fills({"0xFE": 0xFE, "0x7F": 0x7F}[kind]):
        yield


@check("every element of every result is written: memory poisoned three ways gives the same bits")
def check_uninitialized(subject: Subject, sample: Sample) -> None:
    sizes = [sample]
    with contextlib.suppress(NotApplicable):
        sizes.append(sample.grown(3000))  # beyond what malloc caches without filling
    with contextlib.suppress(NotApplicable, IndexError):  # without classes a class index raises IndexError
        empty = sample.emptied(-1)
        run(subject.op, empty, grad=False)
        sizes.append(empty)
    for sized in sizes:
        for cast in each_dtype(sized):
            clean = run(subject.op, cast)
            for kind in ("nan", "0xFE", "0x7F"):
                with poisoned_memory(kind):
                    # The upstream gradient was made before, so that it is not poisoned itself.
                    got = run(subject.op, cast, clean.upstream or None)
                assert_outcomes_equal(got, clean, f"depends on uninitialised memory ({kind})")


def _peak_bytes(device, work) -> int:
    """Most bytes allocated at once during work(), beyond those allocated before it."""
    work()  # first calls initialise things
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    del kept
    now = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@check("no upcast copy, no temporary: forward and backward allocate their results and little else")
def check_peak_memory(subject: Subject, sample: Sample) -> None:
    large = sample.grown(2**18)
    for cast in each_dtype(large, (torch.float16, torch.float32)):
        _assert_allocates_little(subject, cast)


def _assert_allocates_little(subject, cast):
    live, leaves = attach(cast)

    def forward():
        return outputs(subject.op(*live.args, **live.kwargs))

    values = forward()
    out = sum(v.numel() for v in values)
    # A reduced output may come with a statistic; an operand that was broadcast gets its gradient by a wide sum.
    statistic = max(16 * out if out < cast.shape().numel() else 0, subject.row_bytes(cast))
    if str(subject.device).startswith("cuda"):
        statistic += subject.workspace * cast.shape().numel()
    _within("forward", _peak_bytes(subject.device, forward), values, cast, statistic)
    tracked = [v for v in values if v.requires_grad]
    if not tracked:
        return
    upstream = [make_upstream(v) for v in tracked]

    def backward():
        return torch.autograd.grad(tracked, list(leaves.values()), upstream, retain_graph=True)

    numel = cast.shape().numel()
    summed = sum(8 * numel for t in leaves.values() if t.numel() < numel)
    _within("backward", _peak_bytes(subject.device, backward), backward(), cast, statistic + summed)


def _within(what, peak, results, sample, extra):
    size = sum(t.nbytes for t in results)
    allowed = size + extra + 65536 + sample.shape().numel() // 8  # partial sums, workspaces
    if peak > allowed:
        raise AssertionError(
            f"{what} allocates {peak} bytes at its peak for {size} bytes of results, allowed {allowed} "
            f"({sample.shape().numel()} elements): a copy was made"
        )
