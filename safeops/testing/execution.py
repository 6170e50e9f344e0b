"""Execution: repeatable, no hidden synchronisation, the dispatcher's op, autocast, routes that agree, refused calls."""

from __future__ import annotations

import contextlib

import torch

from safeops.core import private_torch

from .compare import assert_outcomes_close, assert_outcomes_equal, assert_right
from .memory import _state, _unchanged
from .registry import check
from .sample import NotApplicable, Sample
from .subject import HALVES, Subject, attach, make_upstream, outputs, run
from .values import each_dtype


def _grown(sample: Sample, numel: int) -> Sample:
    try:
        return sample.grown(numel)
    except NotApplicable:
        return sample


@check("bitwise the same from run to run, values and gradients")
def check_repeatable(subject: Subject, sample: Sample) -> None:
    for cast in each_dtype(_grown(sample, 2**16), (torch.float32, torch.float16)):
        first = run(subject.op, cast)
        for _ in range(3):
            assert_outcomes_equal(run(subject.op, cast, first.upstream or None), first, "differs from run to run")


@check("bitwise independent of the number of threads")
def check_threads(subject: Subject, sample: Sample) -> None:
    before = torch.get_num_threads()
    for cast, threads in zip(each_dtype(_grown(sample, 2**16 + 1), (torch.float32, torch.float16)), (3, 2)):
        try:
            torch.set_num_threads(1)
            first = run(subject.op, cast)
            torch.set_num_threads(threads)
            got = run(subject.op, cast, first.upstream or None)
            assert_outcomes_equal(got, first, f"{threads} threads differ from one")
        finally:
            torch.set_num_threads(before)


# Ops by which the host reads values. _SIZE_READS have a data-dependent size, and always wait. _VALUE_READS count only
# if no aten op calls them: on the CPU, aten itself reads 0-dim operands by them, without waiting.
_SIZE_READS = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
_VALUE_READS = {
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
}


@contextlib.contextmanager
def no_synchronisation(device="cpu"):
    """Raise if the block synchronizes: on CUDA at the call, elsewhere at the end of the block, from its profile."""
    if str(device).startswith("cuda"):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    for event in profiler.events():
        root = event
        while root.cpu_parent is not None and root.cpu_parent.name.startswith("aten::"):
            root = root.cpu_parent
        if event.name in _SIZE_READS or root.name in _VALUE_READS:
            raise AssertionError(f"synchronises: {event.name} called by {root.name if root is not event else 'Python'}")


@check("no hidden synchronisation: the host reads no value and no data-dependent size, forward or backward")
def check_no_sync(subject: Subject, sample: Sample) -> None:
    if sample.kwargs.get("empty") == "raise":
        raise NotApplicable('empty="raise" is a documented exception')
    for cast in each_dtype(sample, (torch.float32, torch.float16)):
        upstream = run(subject.op, cast).upstream
        live, leaves = attach(cast)
        with no_synchronisation(subject.device):
            values = [v for v in outputs(subject.op(*live.args, **live.kwargs)) if v.requires_grad]
            if values:
                torch.autograd.grad(values, list(leaves.values()), upstream, allow_unused=True)
    try:
        with torch.no_grad(), no_synchronisation(subject.device):
            subject.op(*cast.args, **cast.kwargs)
    except AssertionError as error:
        raise AssertionError(f"without gradients: {error}") from error


class _Recorder(private_torch.TorchDispatchMode):
    """Record the calls of one namespace's ops, with their arguments."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace, self.calls = namespace, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == self.namespace:
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@check("torch.library.opcheck on the dispatcher's op and on every raw op that a forward and backward calls")
def check_opcheck(subject: Subject, sample: Sample) -> None:
    calls = list(subject.raw_ops)
    for cast in each_dtype(sample, (torch.float32, torch.float16)):
        with _Recorder(subject.namespace) as recorder:
            run(subject.op, cast)
        calls += recorder.calls
    calls += _direct(subject, sample)
    if not calls:
        raise NotApplicable(f"no op of {subject.namespace} is called, none is given as `direct` or `raw_ops`")
    _opcheck(calls, "test_schema", "test_faketensor", "test_autograd_registration")


@check("torch.library.opcheck as AOTAutograd traces them, with sizes that are symbols", slow=True, once=True)
def check_opcheck_traced(subject: Subject, sample: Sample) -> None:
    with _Recorder(subject.namespace) as recorder:
        run(subject.op, sample.cast(torch.float32))
    calls = [*subject.raw_ops, *recorder.calls, *_direct(subject, sample)]
    if not calls:
        raise NotApplicable(f"no op of {subject.namespace} is called, none is given as `direct` or `raw_ops`")
    _opcheck(calls, "test_aot_dispatch_dynamic")


def _direct(subject, sample):
    """[(op, args, kwargs)] for the call of `subject.direct` if it is an op of the dispatcher, else []."""
    if not isinstance(subject.direct, (private_torch.OpOverload, private_torch.OpOverloadPacket)):
        return []
    live, _ = attach(sample.cast(torch.float32).clone())
    return [(_overload(subject.direct, live), live.args, dict(live.kwargs))]


def _opcheck(calls, *tests):
    for function, args, kwargs in calls:
        if function.name().split("::")[1].startswith("_"):  # raw ops have no autograd of their own
            args, kwargs = private_torch.tree_map_only(torch.Tensor, lambda t: t.detach(), (args, kwargs))
        try:
            torch.library.opcheck(function, args, kwargs, test_utils=tests)
        except Exception as error:
            raise AssertionError(f"opcheck of {function}: {' '.join(str(error).split())[:600]}") from error


def _overload(packet, sample):
    """The overload that takes this call."""
    if not isinstance(packet, private_torch.OpOverloadPacket):
        return packet
    for overload in (getattr(packet, name) for name in packet.overloads()):
        with contextlib.suppress(TypeError, RuntimeError):
            overload(*sample.args, **sample.kwargs)
            return overload
    raise AssertionError(f"no overload of {packet} takes this call")


@check("torch.ops.<namespace>.<op> called directly: the same bits, gradients and autocast behaviour")
def check_direct(subject: Subject, sample: Sample) -> None:
    if subject.direct is None:
        raise NotApplicable("no `direct` op is given")
    for cast in each_dtype(sample):
        want = run(subject.op, cast)
        assert_outcomes_equal(run(subject.direct, cast, want.upstream or None), want, "called directly")
        for dtype in HALVES:
            with torch.autocast(torch.device(subject.device).type, dtype=dtype):
                want = run(subject.op, cast)
                assert_outcomes_equal(run(subject.direct, cast, want.upstream), want, f"called directly under {dtype}")


@check("autocast changes nothing but the documented output dtype; backward inside or outside the region")
def check_autocast(subject: Subject, sample: Sample) -> None:
    device = torch.device(subject.device).type
    for cast in each_dtype(sample):
        plain = run(subject.op, cast)
        want = subject.out_dtype(cast, autocast=True)
        for dtype in HALVES:

            def inside(*args, dtype=dtype, **kwargs):
                with torch.autocast(device, dtype=dtype):
                    return subject.op(*args, **kwargs)

            outside = run(inside, cast)
            with torch.autocast(device, dtype=dtype):
                within = run(subject.op, cast, outside.upstream or None)
                with torch.autocast(device, enabled=False):
                    off = run(subject.op, cast, plain.upstream or None)
            label = f"{cast.floats() and next(iter(cast.floats().values())).dtype} under {dtype} autocast"
            for value in outside.values:
                if value.is_floating_point() and value.dtype != want:
                    raise AssertionError(f"result of {label} is {value.dtype}, want {want}")
            assert_outcomes_equal(within, outside, f"{label}: backward inside the region differs from outside")
            assert_outcomes_equal(off, plain, f"{label}, switched off inside")
            if [v.dtype for v in outside.values] == [v.dtype for v in plain.values]:
                assert_outcomes_equal(outside, plain, f"{label} differs from without")
            else:
                truth = subject.truth(cast, outside.upstream or None, autocast=True)
                assert_right(cast, outside, truth, label)


@check("the routes agree: kernel, composite, and whatever else is given, in each dtype")
def check_routes(subject: Subject, sample: Sample) -> None:
    if not subject.routes:
        raise NotApplicable("no other route is given")
    for sized in (sample, _grown(sample, 500)):
        for cast in each_dtype(sized):
            want = run(subject.op, cast)
            for name, route in subject.routes.items():
                got = run(route, cast, want.upstream or None)
                assert_outcomes_close(got, want, f"the {name} route differs")


@check(
    "bad calls are refused by an error that names function, argument, and shapes, dtypes or devices; nothing is written"
)
def check_errors(subject: Subject, sample: Sample) -> None:
    if not subject.errors:
        raise NotApplicable("no bad calls are given")
    on_cuda = str(subject.device).startswith("cuda")
    for bad in subject.errors:
        _assert_refused(subject, bad, stray="meta")
        if on_cuda and "meta" in bad.words:  # on CUDA, users pass CPU tensors by mistake
            _assert_refused(subject, bad, stray="cpu")


def _assert_refused(subject, bad, stray):
    """stray: the device for the operands that the bad call has on the wrong device (in the sample: on meta)."""

    def place(t):
        return torch.zeros(t.shape, dtype=t.dtype, device=stray) if t.is_meta else t.to(subject.device)

    args, kwargs = private_torch.tree_map_only(torch.Tensor, place, (bad.args, dict(bad.kwargs)))
    words = tuple(stray if w == "meta" else w for w in bad.words)
    shown = f"the bad call {words}"
    tensors = [t for t in outputs((args, kwargs)) if not t.is_meta]
    before = [_state(t) for t in tensors]
    try:
        subject.op(*args, **kwargs)
    except bad.error as error:
        missing = [w for w in words if w not in str(error)]
        if missing:
            raise AssertionError(f"{shown}: the message lacks {missing}: {error}") from error
    except Exception as error:
        want = getattr(bad.error, "__name__", bad.error)
        raise AssertionError(f"{shown}: raised {type(error).__name__}, want {want}: {error}") from error
    else:
        raise AssertionError(f"{shown} was accepted")
    for t, was in zip(tensors, before):
        _unchanged(f"{shown}: an operand", was, _state(t))


@check("capturable in a CUDA graph: forward and backward, replayed on new data", cuda=True)
def check_cuda_graph(subject: Subject, sample: Sample) -> None:
    (cast, *_) = each_dtype(sample, (torch.float32,))
    live, leaves = attach(cast.clone())
    upstream = run(subject.op, cast).upstream

    def step():
        values = outputs(subject.op(*live.args, **live.kwargs))
        tracked = [v for v in values if v.requires_grad]
        return values, torch.autograd.grad(tracked, list(leaves.values()), upstream) if leaves else ()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, grads = step()
    with torch.no_grad():
        for t in leaves.values():
            t.mul_(0.5)
    graph.replay()
    want = run(subject.op, cast.replace({k: cast.get(k) * 0.5 for k in leaves}), upstream)
    for got, wanted in zip((*values, *grads), (*want.values, *want.grads.values()), strict=True):
        if not torch.equal(got.detach(), wanted):
            raise AssertionError("a replayed graph differs from eager")


__all__ = ["make_upstream", "no_synchronisation"]
