"""Elements masked out do not exist; kept ones are never hidden; nothing kept follows `empty=`."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .compare import assert_nonfinite_alike, assert_outcomes_equal, assert_right, assert_same_bits, only_nan
from .derivatives import functional
from .registry import check
from .sample import NotApplicable, Sample
from .subject import Subject, accepts, attach, make_upstream, outputs, run
from .values import each_dtype, fitting

GARBAGE = ("nan", "inf", "-inf", "max")


def garbage(name: str, sample: Sample) -> float:
    dtypes = [t.dtype for t in sample.floats().values()]
    return min(torch.finfo(d).max for d in dtypes) if name == "max" else float(name)


def _masked(sample: Sample) -> Tensor:
    keep = sample.keep()
    if keep is None or bool(keep.all()) or not sample.masked_keys():
        raise NotApplicable("no mask that drops something")
    return keep


def _small_and_large(sample: Sample):
    """Yield the sample, and the sample repeated to at least 500 elements, for the vector loops."""
    yield sample
    try:
        yield sample.grown(500)
    except NotApplicable:
        pass


def assert_dead_gradients(sample: Sample, grads: dict, because: str, keep: Tensor | None = None) -> None:
    """Raise unless operands have a gradient of exactly 0 at elements that no kept position uses."""
    for key in sample.masked_keys():
        if key not in grads:
            continue
        leak = grads[key][sample.dead(key, keep)]
        if leak.numel() and not bool((leak == 0).all()):
            raise AssertionError(
                f"gradient of masked-out elements of operand {key!r} is {leak[leak != 0][0].item()}, want 0: {because}"
            )


@check("NaN, inf and huge numbers under the mask change no bit of any result or gradient; their own gradient is 0")
def check_masked_garbage(subject: Subject, sample: Sample) -> None:
    _masked(sample)
    for sized in _small_and_large(sample):
        for cast in each_dtype(sized):
            clean = run(subject.op, cast.poisoned(1.0))  # not `cast`: it must have the strides of `dirty`
            assert_dead_gradients(cast, clean.grads, "nothing unusual there")
            for name in GARBAGE:
                dirty = cast.poisoned(garbage(name, cast))
                got = run(subject.op, dirty, clean.upstream)
                assert_outcomes_equal(got, clean, f"changed by {name} under the mask")
                assert_dead_gradients(dirty, got.grads, f"{name} there")


@check("NaN in the upstream gradient at a masked-out position reaches no operand")
def check_masked_upstream(subject: Subject, sample: Sample) -> None:
    keep = _masked(sample)
    for sized in _small_and_large(sample):
        keep = sized.keep()
        for cast in each_dtype(sized):
            clean = run(subject.op, cast)
            if [u.shape for u in clean.upstream] != [keep.shape]:
                raise NotApplicable("the result is not elementwise")
            for name in ("nan", "inf"):
                upstream = torch.where(keep, clean.upstream[0], float(name))
                got = run(subject.op, cast.poisoned(float("nan")), [upstream])
                assert_dead_gradients(cast, got.grads, f"upstream {name} there")
                for key in cast.masked_keys():
                    if key in got.grads:
                        what = f"gradient of operand {key!r}"
                        assert_same_bits(
                            what, got.grads[key], clean.grads[key], f"upstream {name} under the mask leaks"
                        )


@check("the same in second derivatives, forward mode and vmap: garbage under the mask changes nothing there either")
def check_masked_garbage_transforms(subject: Subject, sample: Sample) -> None:
    _masked(sample)
    clean = sample.cast(torch.float64)
    for name in ("nan", "inf"):
        dirty = clean.poisoned(float(name))
        for what, derive in (
            ("second derivative", _second),
            ("forward-mode tangent", _tangent),
            ("vmap", _mapped),
        ):
            a, b = derive(subject, dirty), derive(subject, clean)
            for (key, got), (_, want) in zip(a, b):
                wrong = got.isnan() & ~want.isnan()
                if wrong.any() or not torch.allclose(got, want, rtol=1e-12, atol=0, equal_nan=True):
                    raise AssertionError(f"{what} of {key}: changed by {name} under the mask")


def _second(subject, sample):
    """Gradients of the squared norm of the gradients."""
    live, leaves = attach(sample)
    values = [v for v in outputs(subject.op(*live.args, **live.kwargs)) if v.requires_grad]
    first = torch.autograd.grad(values, list(leaves.values()), [make_upstream(v) for v in values], create_graph=True)
    tracked = [g for g in first if g.requires_grad]
    if not tracked:
        return [(f"operand {k!r}", g.detach()) for k, g in zip(leaves, first)]
    second = torch.autograd.grad(sum(g.square().sum() for g in tracked), list(leaves.values()), allow_unused=True)
    return [(f"operand {k!r}", torch.zeros_like(t) if g is None else g) for (k, t), g in zip(leaves.items(), second)]


def _tangent(subject, sample):
    fn, tensors = functional(subject.op, sample)
    # A tangent under the mask must not matter either: where the operand is garbage, so is its tangent.
    tangents = [torch.where(t.isfinite(), make_upstream(t, i), t) for i, t in enumerate(tensors)]
    return [("the value", outputs(torch.func.jvp(fn, tuple(tensors), tuple(tangents))[1])[0])]


def _mapped(subject, sample):
    fn, tensors = functional(subject.op, sample)
    grad = torch.func.grad(lambda *ts: outputs(fn(*ts))[0].sum(), argnums=tuple(range(len(tensors))))
    return [("the gradient", g) for g in torch.vmap(grad)(*[torch.stack([t, t]) for t in tensors])]


@check("weight=0 means masked out: what lies there changes no bit, and equals the same positions under the mask")
def check_weight_zero(subject: Subject, sample: Sample) -> None:
    weight = sample.get(sample.weight)
    if weight is None or weight.numel() < 2:
        raise NotApplicable("no weight")
    # Drop every second element that the mask keeps: a weight of 0 under the mask would test nothing.
    alive = torch.ones_like(weight, dtype=torch.bool) if sample.keep() is None else ~sample.dead(sample.weight)
    drop = alive & (alive.flatten().cumsum(0).reshape(weight.shape) % 2 == 0)
    for sized in _small_and_large(sample.replace({sample.weight: torch.where(drop, 0.0, weight)})):
        for cast in each_dtype(sized):
            keep = (cast.get(sample.weight) != 0).expand(cast.shape())
            kept_both = keep if cast.keep() is None else keep & cast.keep()
            data = tuple(k for k in cast.masked_keys() if k != cast.weight)
            clean = run(subject.op, _only(cast, data).poisoned(1.0, kept_both))
            for name in GARBAGE:
                dirty = _only(cast, data).poisoned(garbage(name, cast), kept_both)
                got = run(subject.op, dirty, clean.upstream)
                assert_outcomes_equal(got, clean, f"changed by {name} where weight is 0")
                assert_dead_gradients(dirty, got.grads, f"weight is 0 and {name} is there", kept_both)
            if cast.mask is not None:
                mask = kept_both if cast.mask_keeps else ~kept_both
                ones = torch.where(cast.get(cast.weight) == 0, 1.0, cast.get(cast.weight))
                other = cast.replace({cast.mask: mask, cast.weight: ones})
                as_mask = run(subject.op, other, clean.upstream)
                assert_outcomes_equal(as_mask, clean, "weight 0 differs from the same positions masked out")


def _only(sample, masked):
    return dataclasses.replace(sample, masked=masked)


@check("a kept NaN or inf shows in value and gradient exactly where the definition says")
def check_kept_nonfinite(subject: Subject, sample: Sample) -> None:
    keep = sample.keep()
    keys = sample.masked_keys() if keep is not None else tuple(k for k in sample.floats() if isinstance(k, int))
    cases = []
    for sized in _small_and_large(sample):
        for key in keys:
            alive = torch.ones_like(sized.get(key), dtype=torch.bool) if keep is None else ~sized.dead(key)
            if alive.any():
                # The first and the last kept element. A wrong neutral element in a vector loop's tail hides the last.
                places = [int(alive.flatten().nonzero()[i]) for i in (0, -1)]
                cases += [(sized, key, place, value) for value in NONFINITE for place in places]
    if not cases:
        raise NotApplicable("nothing is kept")
    for (sized, key, place, value), dtype in _in_turn(cases, sample):
        cast = sized.cast(dtype)
        tensor = cast.get(key).clone(memory_format=torch.contiguous_format)
        tensor.view(-1)[place] = value
        changed = cast.replace({key: tensor})
        got = run(subject.op, changed)
        truth = dict(subject.truth(changed, got.upstream))
        for what, result in got:
            label = f"{what} with {value} kept in operand {key!r} ({tensor.dtype})"
            want = truth[what].to(result.dtype)
            if subject.several_terms and what.startswith("gradient"):
                result, want = only_nan(result), only_nan(want)
            assert_nonfinite_alike(label, result, want)


NONFINITE = (float("nan"), float("inf"), -float("inf"))


def _in_turn(cases, sample):
    """Give each case one dtype, in turn: dtypes differ in how they are read, fp64 also in its arithmetic. Each round
    starts one dtype later, so that no place or value always gets the same dtype."""
    dtypes = list(fitting(sample))
    return [(case, dtypes[(i + i // len(dtypes)) % len(dtypes)]) for i, case in enumerate(cases)]


@check("a NaN or inf in the upstream gradient makes every gradient non-finite that the definition says, and no other")
def check_kept_upstream(subject: Subject, sample: Sample) -> None:
    cases = []
    for sized in _small_and_large(sample):
        upstream = run(subject.op, each_dtype(sized)[0]).upstream
        for which in (i for i, u in enumerate(upstream) if u.numel()):
            places = ("first", 0), ("last", -1), ("every", slice(None))
            cases += [(sized, which, *place, value) for place in places for value in NONFINITE[:2]]
    if not cases:
        raise NotApplicable("nothing is differentiable")
    for (sized, which, name, place, value), dtype in _in_turn(cases, sample):
        cast = sized.cast(dtype)
        upstream = list(run(subject.op, cast).upstream)
        upstream[which] = upstream[which].clone(memory_format=torch.contiguous_format)
        upstream[which].view(-1)[place] = value
        _finite_alike(subject, cast, upstream, f"{value} for the {name} upstream gradient")


def _finite_alike(subject, sample, upstream, label):
    """Raise unless gradients are finite at the same places. NaN and inf count alike: which of them 0 * inf or inf - inf
    gives depends on the order of the arithmetic, and GradScaler finds both."""
    truth = subject.truth(sample, upstream).grads
    for key, grad in run(subject.op, sample, upstream).grads.items():
        wrong = grad.isfinite() != truth[key].to(grad.dtype).isfinite()
        if wrong.any():
            i = int(wrong.flatten().nonzero()[0])
            got, want = grad.flatten()[i].item(), truth[key].flatten()[i].item()
            raise AssertionError(f"gradient of operand {key!r}, {label}: {got}, want {want}, at {i} ({grad.dtype})")


@check("nothing kept: empty='zero' is 0 with a graph and zero gradients, 'nan' is NaN, 'raise' raises")
def check_nothing_kept(subject: Subject, sample: Sample) -> None:
    mask = sample.get(sample.mask)
    if mask is None:
        raise NotApplicable("no mask")
    nothing = sample.replace({sample.mask: torch.full_like(mask, not sample.mask_keeps)})
    for cast in each_dtype(nothing):
        dirty = cast.poisoned(float("nan"))
        got = run(subject.op, dirty)  # raises where the result is detached
        assert_dead_gradients(dirty, got.grads, "everything is masked out")
        reduced = got.values[0].numel() < cast.shape().numel()
        if not reduced or not accepts(subject.op, "empty") or cast.kwargs.get("reduction") == "none":
            continue
        _policies(subject, dirty, got)
    if accepts(subject.op, "empty") and mask.dim() and mask.shape[0] > 1:
        # One group that keeps nothing, beside groups that keep something.
        partial_mask = mask.clone()
        partial_mask[0] = not sample.mask_keeps
        for empty in ("zero", "nan"):
            (cast, *_) = each_dtype(sample.replace({sample.mask: partial_mask}), (torch.float32,))
            cast = cast.with_kwargs(empty=empty)
            got = run(subject.op, cast.poisoned(float("nan")))
            assert_right(
                cast,
                got,
                subject.truth(cast, got.upstream),
                f"with a group that keeps nothing, empty={empty!r}",
            )


def _policies(subject, dirty, zero):
    for value in zero.values:
        if not bool((value == 0).all()):
            raise AssertionError(f"nothing kept, empty='zero': {value.flatten()[0].item()}, want 0")
    for key, grad in zero.grads.items():
        if not bool((grad == 0).all()):
            raise AssertionError(f"nothing kept, empty='zero': gradient of operand {key!r} is not 0")
    if dirty.kwargs.get("denominator"):  # it counts kept elements elsewhere too: only 0 means that there are none
        for empty in ("nan", "raise"):
            for value in run(subject.op, dirty.with_kwargs(empty=empty)).values:
                if not bool((value == 0).all()):
                    raise AssertionError(f"nothing kept here, empty={empty!r}: {value.flatten()[0].item()}, want 0")
        dirty = dirty.with_kwargs(denominator=0)
    for value in run(subject.op, dirty.with_kwargs(empty="nan")).values:
        if not bool(value.isnan().all()):
            raise AssertionError(f"nothing kept, empty='nan': {value.flatten()[0].item()}, want nan")
    try:
        subject.op(*dirty.args, **{**dirty.kwargs, "empty": "raise"})
    except ValueError:
        return
    raise AssertionError("nothing kept, empty='raise': nothing was raised")
