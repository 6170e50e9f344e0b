"""What is checked of a kernel: clauses of the contract, and what only a GPU can get wrong."""

import collections
import contextlib

import torch

from safeops import _torch
from safeops._op import registry
from safeops.testing import CHECKS, Check, Subject, run, run_check
from safeops.testing.compare import COMPUTE_EPS, assert_outcomes_equal, cancellation, largest_error
from safeops.testing.layouts import LAYOUTS, REPEATS, _after_sum, _relaid, _right
from safeops.testing.sample import NotApplicable
from safeops.testing.values import fitting
from safeops.verify.calls import callable_of
from safeops.verify.samples import family, has_classes, samples

# Elements, nearly: less than a vector, beyond a block, a wave of blocks, and what one block adds up by itself.
SIZES = (1, 1000, 5000, 70_000, 1_050_000)
LATE = 20_000_000  # clock cycles: about ten milliseconds
WAITS = ("masked_select",)  # its size depends on the data: the host reads it


# ---- the routes


@contextlib.contextmanager
def kernels_off(ops):
    """The ops by their composites."""
    was = [(op, op.cpu, vars(op).get("cuda")) for op in ops]
    for op, _, cuda in was:
        op.cpu = False
        if cuda is not None:
            op.cuda = collections.defaultdict(bool)
    try:
        yield
    finally:
        for op, cpu, cuda in was:
            op.cpu = cpu
            if cuda is not None:
                op.cuda = cuda


class _Calls(_torch.TorchDispatchMode):
    """The names of safeops' ops as they run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "safeops":
            self.names.append(function.name().removeprefix("safeops::"))
        return function(*args, **(kwargs or {}))


# ---- the subject


def subject(op, device):
    """The op on a device, judged by its composite in float64: where terms cancel, by their sizes and by how far the
    composite in float32 is from that."""
    call = callable_of(op)

    def composite(*args, **kwargs):
        with kernels_off(registry.values()):
            return call(*args, **kwargs)

    def reference(*args, out_dtype, **kwargs):
        found = composite(*args, **kwargs)
        return _saturated(found, torch.finfo(out_dtype).max) if op.name.startswith("safe_") else found

    def terms(wide, truth):
        narrow = run(reference, wide.cast(torch.float32), truth.upstream, unused_ok=True, grad=bool(truth.grads))
        value, grads = cancellation(wide, truth)
        found = {key: grads[key] + _scale(narrow.grads[key], d) for key, d in truth.grads.items()}
        return max((value + _scale(a, b) for a, b in zip(narrow.values, truth.values)), default=0.0), found

    def dtype(sample, autocast):
        return run(composite, sample, grad=False, keys=()).values[0].dtype

    fields = {"terms": terms, "several_terms": True, "dtype_rule": dtype, "name": op.name}
    return Subject(call, reference, samples(op), device=device, **fields)


def _saturated(value, largest):
    """As the safe_* functions round to their dtype, with a gradient of 0."""
    return torch.where((value.abs() > largest) & value.isfinite(), value.sign().detach() * largest, value)


def _scale(narrow, truth):
    """The size of the terms of which float32 makes such an error, and no less than the result's."""
    if not truth.numel() or not truth.is_floating_point():
        return torch.zeros((), device=truth.device)
    size = truth.detach().double().nan_to_num(0, 0, 0).abs().amax()
    error = largest_error(narrow, truth)
    return size + 8 * (error if error < float("inf") else 0.0) / COMPUTE_EPS[torch.float32]


# ---- checks beside those of safeops.testing


def _check_layouts(subject, sample):
    """All operands laid out alike, and each offset alone, in one dtype after the other; what .sum() sends back."""
    shape, keys = sample.shape(), list(sample.operands())
    if not shape or shape[0] < 2:
        raise NotApplicable("no layout to vary")
    sized = sample.grown(2000)
    casts = list(fitting(sized).values())
    cases = [(name, keys) for name in LAYOUTS if name not in REPEATS] + [("offset", [key]) for key in keys]
    cases += [(name, [key]) for key in keys for name in ("row_expanded", "expanded")] + [("column_expanded", keys)]
    for i, (name, chosen) in enumerate(cases):
        laid = _relaid(casts[i % len(casts)], LAYOUTS[name], chosen)
        if laid is not None:
            _right(subject, laid, f"with {name} operands {chosen}")
    if sample.leaves():
        _after_sum(subject, casts[0])


def _check_boundaries(subject, sample):
    """Sizes on both sides of what the plans distinguish, of many rows and of long ones by turns."""
    shape, dtypes = sample.shape(), list(fitting(sample))
    if not shape:
        raise NotApplicable("no size to vary")
    for i, size in enumerate(SIZES):
        axis = (-len(shape), -1)[i % 2]
        times = -(-size // shape.numel())
        grown = sample._resize(lambda t, a, n=times: torch.cat([t] * n, dim=a), axis)
        # one less along the axis: of no round size
        odd = grown._resize(lambda t, a: t.narrow(a, 0, t.shape[a] - 1) if t.shape[a] > 1 else t, axis)
        _right(subject, odd.cast(dtypes[i % len(dtypes)]), f"of {tuple(odd.shape())}")


def _check_side_stream(subject, sample):
    """Operands that arrive late on a side stream: a kernel on another one would read what was there before."""
    cast = sample.cast(torch.float32)
    expected = run(subject.op, cast)
    stale = cast.replace({key: torch.full_like(x, 0.5) for key, x in cast.floats().items()})
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _torch.keep_busy(LATE)
        for key, x in cast.floats().items():
            stale.get(key).copy_(x)
        got = run(subject.op, stale, expected.upstream or None)
    side.synchronize()
    assert_outcomes_equal(got, expected, "on a side stream")


def _check_graph(subject, sample):
    if not sample.leaves():
        raise NotApplicable("nothing is differentiable")
    CHECKS["cuda_graph"](subject, sample)


OWN = {
    "few_layouts": Check("few_layouts", _check_layouts, "strides, offsets and broadcasts"),
    "boundaries": Check("boundaries", _check_boundaries, "sizes across the plans' boundaries"),
    "side_stream": Check("side_stream", _check_side_stream, "the current stream", cuda=True),
    "graph": Check("graph", _check_graph, "capture and replay", cuda=True),
}
KERNEL_RUNS = "kernel_runs"  # first: the others would pass on the composite too
QUICK = (
    "value gradient few_layouts masked_garbage masked_upstream kept_nonfinite kept_upstream nothing_kept mixed_dtypes "
    "repeatable no_sync boundaries side_stream graph"
).split()
MORE = (
    "weight_zero layouts upstream_layouts sizes partial_gradients inputs_unchanged uninitialized accumulation".split()
)


# What their operands have no room for: a class, an image or a window cannot be taken away, no element stands alone; and
# what is moved is not added up.
NOT_OF = {
    "images": {"sizes", "uninitialized", "accumulation"},
    "selection": {"mixed_dtypes", "accumulation"},
    "lists": {"accumulation"},
}


def names(op, full=False):
    """The checks that an op is due."""
    left = set(NOT_OF.get(family(op), ()))
    if op.name in WAITS:
        left |= {"no_sync", "graph", "few_layouts"}
    if not op.differentiable:
        left |= {"nothing_kept", "accumulation"}  # counts and lists: whole numbers, and no policy
    if op.name in ("clip_grad_norm_", "health"):
        left |= {"mixed_dtypes"}  # each of their results has its own
    if has_classes(op):
        left |= {"sizes", "uninitialized"}
    return [name for name in (KERNEL_RUNS, *QUICK, *(MORE if full else ())) if name not in left]


def apply(op, subject, name):
    """Run one check over the samples: to how many it applied. AssertionError where it does not hold."""
    if name == KERNEL_RUNS:
        return _kernel_runs(op, subject)
    try:
        return run_check(subject, OWN.get(name, name))
    except AssertionError as error:
        if "applies to no sample" in str(error):
            return 0
        raise


def _kernel_runs(op, subject):
    """Every sample's forward calls the raw op, and its backward another."""
    if not subject.samples:
        raise AssertionError(f"there are no samples of {op.name}")
    for sample in subject.samples:
        sample = sample.to(subject.device).cast(torch.float32)
        with _Calls() as forward:
            run(subject.op, sample, grad=False, keys=())
        with _Calls() as both:
            run(subject.op, sample)
        if op.raw[0] not in forward.names or (op.differentiable and len(both.names) <= len(forward.names)):
            raise AssertionError(f"{op.name}, sample {sample.name}: ran {both.names}, and not the kernels")
    return len(subject.samples)
