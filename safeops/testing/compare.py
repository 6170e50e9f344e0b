"""How results are judged: bitwise, within an error budget against float64, or by where they are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

# Output dtype: (relative, absolute) error that a result may have. Relative: one rounding for the halves, which are
# computed wide; a short blocked sum for fp32 and fp64. Absolute: half the smallest subnormal number for the halves,
# twice that number for fp32 and fp64.
TOLERANCES = {
    torch.float16: (1.02 * 2**-11, 1.02 * 2**-25),
    torch.bfloat16: (1.02 * 2**-8, 1.02 * 2**-134),
    torch.float32: (16 * 2**-24, 2**-148),
    torch.float64: (64 * 2**-53, 2**-1073),
}
# Output dtype: error relative to the size of terms that cancel. It is the rounding of the compute dtype (fp32 for the
# halves) over a short blocked sum.
COMPUTE_EPS = {
    torch.float16: 16 * 2**-24,
    torch.bfloat16: 16 * 2**-24,
    torch.float32: 16 * 2**-24,
    torch.float64: 64 * 2**-53,
}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: Tensor) -> Tensor:
    """The raw bits, so that NaN equals NaN and +0 differs from -0."""
    return t.detach().contiguous().view(_BITS[t.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def first_difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
    return _at(bits(a) != bits(b), a, b)


def _at(wrong: Tensor, got: Tensor, want: Tensor) -> str:
    """Text on the wrong elements: how many there are, and the first one's index and values."""
    index = tuple(wrong.nonzero()[0].tolist()) if wrong.dim() else ()
    here = f"at {index}: got {got[index].item()!r}, want {want[index].item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} wrong; {here}"


def assert_same_bits(what: str, got: Tensor, want: Tensor, because: str) -> None:
    if not same_bits(got, want):
        raise AssertionError(f"{what}: {because}: {first_difference(got, want)}")


def assert_outcomes_equal(got, want, because: str) -> None:
    """Raise unless the values and gradients of two runs are bitwise equal."""
    got, want = dict(got), dict(want)
    if got.keys() != want.keys():
        raise AssertionError(f"{because}: outputs {list(got)} against {list(want)}")
    for what, tensor in got.items():
        assert_same_bits(what, tensor, want[what], because)


def assert_outcomes_close(got, want, because: str) -> None:
    """Raise unless two routes of one op agree up to the order of summation, relative to the largest element."""
    got, want = dict(got), dict(want)
    if got.keys() != want.keys():
        raise AssertionError(f"{because}: outputs {list(got)} against {list(want)}")
    for what, a in got.items():
        b = want[what]
        if a.dtype != b.dtype:
            raise AssertionError(f"{what}: {because}: dtype {a.dtype} against {b.dtype}")
        if not a.is_floating_point():
            assert_same_bits(what, a, b, because)
            continue
        finite = b.detach()[b.isfinite()].double().abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        # Both are rounded once: near a tie of a half dtype, perhaps to different sides.
        assert_close(f"{what}: {because}", a, b.double(), scale=scale, roundings=2)


def assert_nonfinite_alike(what: str, got: Tensor, want: Tensor) -> None:
    """Raise unless both have NaN, +inf and -inf at the same places."""
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(want)
        if wrong.any():
            raise AssertionError(f"{what}: {name} in the wrong places: {_at(wrong, got, want)}")


def only_nan(t: Tensor) -> Tensor:
    """t with NaN in place of inf."""
    return torch.where(t.isfinite(), t, torch.nan)


def assert_close(
    what: str,
    got: Tensor,
    truth: Tensor,
    *,
    scale: float | Tensor = 0.0,
    computed=torch.float64,
    roundings: int = 1,
) -> None:
    """Raise unless `got` equals `truth` (float64) within the tables above. scale: the size of the terms that may have
    cancelled, one number or one for each element.

    computed: the dtype of the arithmetic, where it is narrower than `got` (a float64 operand's gradient in an fp32 op).
    roundings: 2 where `truth` has been rounded as well.
    """
    if got.shape != truth.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, want {tuple(truth.shape)}")
    got, truth = got.detach(), truth.detach()
    judged = computed if got.dtype == torch.float64 else got.dtype
    rtol, atol = (roundings * t for t in TOLERANCES[judged])
    rounded = truth.to(got.dtype)
    # On the edge of the dtype's range either the largest number or inf is a correct rounding of a wide sum.
    edge = (truth.abs() / torch.finfo(got.dtype).max - 1).abs() <= 2 * rtol
    assert_nonfinite_alike(what, torch.where(edge, rounded, got), rounded)
    error = torch.where(rounded.isfinite() & got.isfinite(), (got.double() - truth).abs(), 0.0)
    allowed = rtol * torch.where(rounded.isfinite(), truth.abs(), 0.0) + atol + COMPUTE_EPS[judged] * scale
    wrong = error > allowed
    if wrong.any():
        i = int((error / allowed).nan_to_num(0, float("inf")).argmax())
        worst, budget = error.flatten()[i].item(), allowed.flatten()[i].item()
        raise AssertionError(
            f"{what}: {_at(wrong, got, truth)}; worst error {worst:.3g}, allowed {budget:.3g} ({got.dtype})"
        )


def largest_error(got: Tensor, truth: Tensor) -> float:
    """The largest error over the elements that should be finite in `got`'s dtype; inf if one of them is not finite."""
    got, truth = got.detach(), truth.detach()
    due = truth.to(got.dtype).isfinite()
    error = torch.where(due, (got.double() - truth).abs(), 0.0).nan_to_num(float("inf"), float("inf"))
    return float(error.max()) if error.numel() else 0.0


def scale_of(scale) -> float:
    """The largest scale, from a number or a tensor."""
    if not isinstance(scale, Tensor):
        return scale
    return float(scale.max()) if scale.numel() else 0.0


def assert_no_worse(what: str, got: Tensor, theirs: Tensor, truth: Tensor, *, scale: float = 0.0) -> None:
    """Raise unless our largest error is at most that of torch in the same dtype, up to one rounding."""
    ours, other = largest_error(got, truth), largest_error(theirs, truth)
    rtol, atol = TOLERANCES[got.dtype]
    finite = truth[truth.to(got.dtype).isfinite()].abs()
    allowed = (
        other
        + atol
        + rtol * (float(finite.max()) if finite.numel() else 0.0)
        + COMPUTE_EPS[got.dtype] * scale_of(scale)
    )
    if not ours <= allowed:
        raise AssertionError(f"{what}: error {ours:.3g} against float64, torch in the same dtype has {other:.3g}")


def cancellation(sample, truth) -> tuple[float, dict]:
    """Returns (size of the terms that the value is summed from, {operand: such a size for its gradient}). Rounding
    errors are relative to these."""
    if truth.terms is not None:
        return truth.terms

    def size(t):
        return t.double().nan_to_num(0, 0, 0).abs()

    def largest(tensors):
        return max((float(size(t).max()) for t in tensors if t.numel()), default=0.0)

    numel, leaves = sample.shape().numel(), sample.leaves()
    reduced = any(v.numel() < numel for v in truth.values)
    values = sum(float((size(t) * size(truth.grads[k])).sum()) for k, t in leaves.items()) if reduced else 0.0
    biggest, out = largest(truth.grads.values()), largest(truth.values) * largest(truth.upstream)
    grads = {}
    for key, t in leaves.items():
        # A broadcast operand's gradient is a sum over the broadcast, of terms of the size of the other gradients;
        # a weight's or a denominator's (they are keywords) may be a difference of terms of the size value / operand.
        terms = numel / t.numel() if 0 < t.numel() < numel else 0.0
        part = 0.0 if truth.elementwise or isinstance(key, int) else out / max(largest([t]), 1e-300)
        grads[key] = max(biggest * terms, part)
    return values, grads


def assert_right(sample, got, truth, because: str = "") -> None:
    """Raise unless the values and gradients of a run match the float64 reference."""
    value_scale, grad_scales = cancellation(sample, truth)
    got, truths = list(got), dict(truth)
    scales = {f"gradient of operand {k!r}": scale for k, scale in grad_scales.items()}
    wide = any(t.dtype == torch.float64 for what, t in got if what.startswith("value"))
    computed = torch.float64 if wide or got[0][0].startswith("gradient") else torch.float32
    for what, tensor in got:
        if not tensor.is_floating_point():
            assert_same_bits(what, tensor, truths[what], because or "against the reference")
            continue
        scale, want = scales.get(what, value_scale), truths[what]
        if truth.several_terms and what.startswith("gradient"):
            tensor, want = only_nan(tensor), torch.where(want.to(tensor.dtype).isfinite(), want, torch.nan)
        assert_close(f"{what} {because}".rstrip(), tensor, want, scale=scale, computed=computed)
