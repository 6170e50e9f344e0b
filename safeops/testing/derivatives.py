"""Derivatives beyond the first backward: second order, forward mode, torch.func, vmap, batched gradients."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.gradcheck import GradcheckError

from .compare import assert_close, assert_same_bits
from .registry import check
from .sample import NotApplicable, Sample
from .subject import Subject, attach, make_upstream, outputs, run


def functional(op, sample: Sample, keys=None):
    """Returns (fn, tensors): the op as a function of only the tensors in `keys` (default: the leaves)."""
    keys = list(sample.leaves()) if keys is None else list(keys)
    if not keys:
        raise NotApplicable("nothing is differentiable")

    def fn(*tensors):
        result = op(*(call := sample.replace(dict(zip(keys, tensors)))).args, **call.kwargs)
        return result if isinstance(result, Tensor) else tuple(outputs(result))

    return fn, [sample.get(k) for k in keys]


def _smooth(sample: Sample) -> Sample:
    if not sample.smooth:
        raise NotApplicable("not smooth here")
    if not sample.leaves():
        raise NotApplicable("nothing is differentiable")
    return sample.cast(torch.float64)


def _near(what: str, got, want, eps: float = 1e-12) -> None:
    """Raise unless two float64 results agree up to the order of summation."""
    got, want = outputs(got), outputs(want)
    if len(got) != len(want):
        raise AssertionError(f"{what}: {len(got)} results, want {len(want)}")
    for a, b in zip(got, want):
        if not a.is_floating_point():
            assert_same_bits(what, a, b, "against the loop or the definition")
            continue
        finite = b.detach()[b.isfinite()].abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        assert_close(what, a, b.double(), scale=scale * eps / 1e-14)


@check("gradcheck in fp64: the backward is the derivative of the forward")
def check_gradcheck(subject: Subject, sample: Sample) -> None:
    fn, tensors = functional(subject.op, _smooth(sample))
    _check(torch.autograd.gradcheck, fn, tensors, check_batched_grad=False)


@check("gradgradcheck in fp64: the double backward is the derivative of the backward, over reverse and forward mode")
def check_gradgradcheck(subject: Subject, sample: Sample) -> None:
    fn, tensors = functional(subject.op, _smooth(sample))
    _check(torch.autograd.gradgradcheck, fn, tensors, check_fwd_over_rev=True)


def _check(function, fn, tensors, **options):
    tensors = tuple(t.detach().clone().requires_grad_() for t in tensors)
    # Central differences in fp64 are this good; the defaults of gradcheck (1e-3) would let 0.1% pass.
    options |= {"atol": 1e-6, "rtol": 1e-5}
    options["fast_mode"] = sum(t.numel() for t in tensors) > 24  # a random projection of the Jacobian

    def numbers(*tensors):  # (gradcheck would subtract bools)
        return tuple(value for value in outputs(fn(*tensors)) if value.is_floating_point())

    try:
        function(numbers, tensors, **options)
    except (GradcheckError, RuntimeError) as error:
        raise AssertionError(" ".join(str(error).split())[:600]) from error


@check("forward mode: gradcheck, and dual numbers against the definition's (a zero tangent is not silent)")
def check_forward_ad(subject: Subject, sample: Sample) -> None:
    if sample.smooth:
        fn, tensors = functional(subject.op, _smooth(sample))
        _check(torch.autograd.gradcheck, fn, tensors, check_forward_ad=True, check_backward_ad=False)
    for requires_grad in (False, True):  # both at once is what forward-over-reverse does
        wide = sample.cast(torch.float64)
        got, want = _dual(subject.op, wide, requires_grad), _dual(subject.reference, wide, False)
        for i, (a, b) in enumerate(zip(got, want)):
            if a is None and b is not None and bool((b != 0).any()):
                raise AssertionError(
                    f"the tangent of output {i} is silently dropped (None), want {b.flatten()[0].item()}"
                )
            if a is not None and b is not None:
                _near(f"tangent of output {i}", a, b)


def _dual(op, sample, requires_grad):
    with forward_ad.dual_level():
        duals = {}
        for i, (key, t) in enumerate(sample.leaves().items()):
            duals[key] = forward_ad.make_dual(t.detach().requires_grad_(requires_grad), make_upstream(t, i))
        call = sample.replace(duals)
        kwargs = {k: v for k, v in call.kwargs.items() if k != "dtype"}
        return [forward_ad.unpack_dual(v).tangent for v in outputs(op(*call.args, **kwargs))]


@check("torch.func: grad, vjp, jvp, jacrev, jacfwd and hessian equal the definition's")
def check_torch_func(subject: Subject, sample: Sample) -> None:
    wide = sample.cast(torch.float64)
    (ours, tensors), (theirs, _) = functional(subject.op, wide), functional(subject.reference, wide)
    every = tuple(range(len(tensors)))
    tangents = tuple(make_upstream(t, i) for i, t in enumerate(tensors))

    def first(fn):
        return lambda *ts: outputs(fn(*ts))[0]

    upstream = make_upstream(first(theirs)(*tensors).detach())

    def total(fn):
        return lambda *ts: (first(fn)(*ts) * upstream).sum()

    def vjp(fn):
        value, pull = torch.func.vjp(first(fn), *tensors)
        return pull(upstream)

    for what, derive in {
        "func.grad": lambda fn: torch.func.grad(total(fn), every)(*tensors),
        "func.vjp": vjp,
        "func.jvp": lambda fn: torch.func.jvp(first(fn), tuple(tensors), tangents),
        "func.jacrev": lambda fn: torch.func.jacrev(first(fn), every)(*tensors),
        "func.jacfwd": lambda fn: torch.func.jacfwd(first(fn), every)(*tensors),
        "func.hessian": lambda fn: torch.func.hessian(total(fn), every)(*tensors),
    }.items():
        if what == "func.hessian" and sum(t.numel() for t in tensors) > 100:
            continue
        _near(what, derive(ours), derive(theirs))


def _batches(sample: Sample, count: int = 3) -> dict:
    """Every tensor operand, stacked with variations of itself: numbers scaled, masks and indices rolled."""
    stacked = {}
    for key, t in sample.operands().items():
        if not t.is_floating_point():
            stacked[key] = torch.stack([t.flatten().roll(b).reshape(t.shape) for b in range(count)])
        else:
            stacked[key] = torch.stack([t * (1 - b / 8) for b in range(count)])  # (a probability stays one)
    return stacked


def _batchings(keys):
    """Yield the operands that carry the batch: all of them, then each alone."""
    yield tuple(keys)
    if len(keys) > 1:
        yield from ((k,) for k in keys)


@check("vmap equals a loop, the batch in every operand or in one, in front or last: values and per-sample gradients")
def check_vmap(subject: Subject, sample: Sample) -> None:
    wide = sample.cast(torch.float64)
    stacked = _batches(wide)
    for chosen, place in itertools.product(_batchings(stacked), (0, -1)):
        fn, _ = functional(subject.op, wide, chosen)
        slices = [[stacked[k][b] for k in chosen] for b in range(3)]
        batched = [stacked[k].movedim(0, place) for k in chosen]
        label = f"over operands {chosen} at dim {place}"
        _near(f"vmap {label}", torch.vmap(fn, in_dims=place)(*batched), _loop(fn, slices))
        floats = tuple(i for i, k in enumerate(chosen) if k in wide.leaves())
        if floats:
            grad = torch.func.grad(lambda *ts, fn=fn: sum(v.sum() for v in outputs(fn(*ts))), argnums=floats)
            _near(f"vmap of grad {label}", torch.vmap(grad, in_dims=place)(*batched), _loop(grad, slices))


def _loop(fn, slices):
    return [torch.stack(parts) for parts in zip(*(outputs(fn(*one)) for one in slices))]


@check("batched upstream gradients (is_grads_batched, as jacobians use) equal one at a time")
def check_batched_gradients(subject: Subject, sample: Sample) -> None:
    wide = sample.cast(torch.float64)
    live, leaves = attach(wide)
    values = [v for v in outputs(subject.op(*live.args, **live.kwargs)) if v.requires_grad]
    if not values:
        raise NotApplicable("nothing is differentiable")
    batch = [torch.stack([make_upstream(v, seed) for seed in range(3)]) for v in values]
    tensors = list(leaves.values())
    got = torch.autograd.grad(values, tensors, batch, is_grads_batched=True, retain_graph=True)
    for seed in range(3):
        one = [b[seed] for b in batch]
        want = run(subject.op, wide, one).grads
        _near("batched gradient", [g[seed] for g in got], list(want.values()))
