"""The checks of a kernel: clauses of the contract, and errors that only a GPU can make."""

import collections
import contextlib

import torch

from safeops.core import private_torch
from safeops.core.op import registry
from safeops.testing import CHECKS, DTYPES, Check, Subject, run, run_check
from safeops.testing.compare import COMPUTE_EPS, assert_outcomes_equal, assert_same_bits, cancellation, largest_error
from safeops.testing.layouts import _after_sum, _right
from safeops.testing.sample import NotApplicable
from safeops.testing.values import each_dtype
from safeops.verify.calls import callable_of
from safeops.verify.samples import has_classes, samples
from safeops.verify.variations import variations

LATE = 20_000_000  # clock cycles: about ten milliseconds


# ---- the routes


@contextlib.contextmanager
def kernels_off(ops):
    """Inside, these ops run as their composites."""
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


class _Calls(private_torch.TorchDispatchMode):
    """Record the names of safeops' ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "safeops":
            self.names.append(function.name().removeprefix("safeops::"))
        return function(*args, **(kwargs or {}))


# ---- the subject


def subject(op, device, full=False):
    """The Subject of an op on a device. The truth is its composite in float64. If terms cancel, the tolerance depends
    on their sizes and on the error of the composite in float32."""
    call = callable_of(op)

    def composite(*args, **kwargs):
        with kernels_off(registry.values()):
            return call(*args, **kwargs)

    def reference(*args, out_dtype, **kwargs):
        results = composite(*args, **kwargs)
        return _saturated(results, torch.finfo(out_dtype).max) if op.name.startswith("safe_") else results

    def terms(wide, truth):
        narrow = run(reference, wide.cast(torch.float32), truth.upstream, unused_ok=True, grad=bool(truth.grads))
        value, grads = cancellation(wide, truth)
        results = {key: grads[key] + _scale(narrow.grads[key], d) for key, d in truth.grads.items()}
        if getattr(op, "shards", None) == "cosine" and truth.grads:
            # The gradient is a difference of unit vectors over the length, 0 for vectors of one number: its terms are
            # as large as upstream / length.
            upstream = truth.upstream[0].double().nan_to_num(0, 0, 0).abs().amax() if narrow.values[0].numel() else 0.0
            for i in {0, 1} & truth.grads.keys():
                length = wide.args[i].detach().double().norm(dim=wide.kwargs["dim"])
                least = torch.where((length > 0) & length.isfinite(), length, torch.inf)
                results[i] = results[i] + (upstream / least.min() if least.numel() else 0.0)
        return max((value + _scale(a, b) for a, b in zip(narrow.values, truth.values)), default=0.0), results

    def dtype(sample, autocast):
        return run(composite, sample, grad=False, keys=()).values[0].dtype

    fields = {"terms": terms, "several_terms": True, "dtype_rule": dtype, "name": op.name}
    return Subject(call, reference, tuple(samples(op, full)), device=device, **fields)


def _saturated(value, largest):
    """Saturate as the safe_* functions do when they round to their dtype; the gradient there is 0."""
    return torch.where((value.abs() > largest) & value.isfinite(), value.sign().detach() * largest, value)


def _scale(narrow, truth):
    """The size of terms whose rounding in float32 explains the error of `narrow`; at least the result's size."""
    if not truth.numel() or not truth.is_floating_point():
        return torch.zeros((), device=truth.device)
    size = truth.detach().double().nan_to_num(0, 0, 0).abs().amax()
    error = largest_error(narrow, truth)
    return size + 8 * (error if error < float("inf") else 0.0) / COMPUTE_EPS[torch.float32]


# ---- checks beside those of safeops.testing


def _check_variations(subject, sample):
    for what, laid in variations(sample):
        _right(subject, laid, what)
    if sample.leaves() and _rare(sample, "after_sum"):
        _after_sum(subject, each_dtype(sample)[0])


def _rare(sample, name):
    """True if this call runs the check `name`, which compiles more kernels and so runs on one call of an op."""
    return sample.turns is None or name in sample.rare


def _check_mixed(subject, sample):
    """Operands of different dtypes: neighboring operands differ."""
    floats = sample.floats()
    if len(floats) < 2 or not _rare(sample, "mixed"):
        raise NotApplicable("one floating operand only, or another call's turn")
    # float64 is among the dtypes, as it changes the arithmetic
    for shift in range(len(DTYPES)) if sample.turns is None else (sample.turns[0] % 2 - len(floats),):
        mixed = sample.cast({key: DTYPES[(shift + i) % len(DTYPES)] for i, key in enumerate(floats)})
        _right(subject, mixed, f"with operands of {', '.join(str(t.dtype) for t in mixed.floats().values())}")


def _check_nothing_kept(subject, sample):
    if not _rare(sample, "nothing_kept"):
        raise NotApplicable("another call's turn")
    CHECKS["nothing_kept"](subject, sample)


def _check_each_gradient(subject, sample):
    """Ask for one gradient alone: the kernels then skip the others."""
    leaves = list(sample.leaves())
    if len(leaves) < 2 or not _rare(sample, "alone"):
        raise NotApplicable("one gradient at most, or another call's turn")
    for cast in each_dtype(sample, (torch.float32,)):
        every = run(subject.op, cast)
        # ops that share a family's kernels check one operand each, in turn
        for key in leaves if sample.turns is None or len(sample.turns) > 1 else [leaves[sample.turns[0] % len(leaves)]]:
            alone = run(subject.op, cast, every.upstream, keys=[key]).grads
            assert_same_bits(f"gradient of operand {key!r}", alone[key], every.grads[key], "differs where it is alone")


def _check_repeatable(subject, sample):
    for _, laid in collections.deque(variations(sample), maxlen=1):  # the last is the largest
        first = run(subject.op, laid)
        for _ in range(3):
            assert_outcomes_equal(run(subject.op, laid, first.upstream or None), first, "differs from run to run")


def _check_side_stream(subject, sample):
    """Operands are written late on a side stream: a kernel on another stream would read the old values."""
    (cast, *_) = each_dtype(sample, (torch.float32,))
    expected = run(subject.op, cast)
    stale = cast.replace({key: torch.full_like(x, 0.5) for key, x in cast.floats().items()})
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        private_torch.keep_busy(LATE)
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
    "variations": Check("variations", _check_variations, "strides, offsets, broadcasts, the plans' sizes"),
    "nothing_kept": Check("nothing_kept", _check_nothing_kept, "what stands for nothing kept"),
    "alone": Check("alone", _check_each_gradient, "one gradient of several"),
    "mixed": Check("mixed", _check_mixed, "operands of different dtypes"),
    "repeated": Check("repeated", _check_repeatable, "the same bits from run to run"),
    "side_stream": Check("side_stream", _check_side_stream, "the current stream", cuda=True),
    "graph": Check("graph", _check_graph, "capture and replay", cuda=True),
}
KERNEL_RUNS = "kernel_runs"  # it runs first: the other checks would pass on the composite, too
QUICK = (
    "value gradient variations masked_garbage masked_upstream kept_nonfinite kept_upstream nothing_kept alone mixed "
    "repeated no_sync side_stream graph"
).split()
MORE = (
    "weight_zero layouts upstream_layouts sizes mixed_dtypes repeatable partial_gradients inputs_unchanged "
    "uninitialized accumulation"
).split()


# family: checks that its ops cannot run. An image needs whole windows, so elements cannot be taken away; selections
# move values and do not add them up.
NOT_OF = {
    "images": {"sizes", "uninitialized", "accumulation"},
    "selection": {"mixed", "mixed_dtypes", "accumulation"},
    "lists": {"accumulation"},
}


def names(op, full=False):
    """The names of the checks to run on an op."""
    left = set(NOT_OF.get(op.family, ()))
    if op.waits:
        left |= {"no_sync", "graph"}
    if not op.differentiable:
        left |= {"nothing_kept", "accumulation"}  # counts and lists: integers, no empty=
    if not op.returns:
        left |= {"mixed", "mixed_dtypes"}  # it writes into its tensors, each in its own dtype
    if "kind" in op.Operands._fields:
        left |= {"kept_nonfinite", "sizes", "uninitialized"}  # a box has four edges, in order
    if has_classes(op):
        left |= {"sizes", "uninitialized"}
    return [name for name in (KERNEL_RUNS, *QUICK, *(MORE if full else ())) if name not in left]


def apply(op, subject, name):
    """Run one check over the samples. Returns how many it applied to; raises AssertionError if it fails."""
    if name == KERNEL_RUNS:
        return _kernel_runs(op, subject)
    try:
        return run_check(subject, OWN.get(name, name))
    except AssertionError as error:
        if "applies to no sample" in str(error):
            return 0
        raise


def _kernel_runs(op, subject):
    """Raise unless every sample's forward calls the raw op, and its backward calls another."""
    if not subject.samples:
        raise AssertionError(f"there are no samples of {op.name}")
    for sample in subject.samples:
        (sample, *_) = each_dtype(sample.to(subject.device), (torch.float32,))
        with _Calls() as forward:
            run(subject.op, sample, grad=False, keys=())
        with _Calls() as both:
            run(subject.op, sample)
        own = {op.raw[0], *(part.raw[0] for part in op.parts if part.name == op.name)}  # (such as a ReducedRowLoss)
        if own.isdisjoint(forward.names) or (op.differentiable and len(both.names) <= len(forward.names)):
            raise AssertionError(f"{op.name}, sample {sample.name}: ran {both.names}, and not the kernels")
    return len(subject.samples)
