"""The region losses' sums and their backward agree with fp64."""

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)
import triton.runtime.interpreter as interpreter
from safeops.kernels.engine import buffers, indexing, launch, tiling
from safeops.kernels.engine.kernel import Config
from safeops.kernels.losses import region_sums as sums
from safeops.kernels.losses.region_sums import region_sums
from safeops.kernels.losses.region_sums_backward import region_sums_backward

from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, shifted

NAN, INF = float("nan"), float("inf")
SOFT, INDICES = "soft", "indices"


def random(shape, dtype, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def last(x):
    """Returns a copy of the tensor (N, C, ...) in which the classes are contiguous in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


# name -> (shape, function applied to the prediction)
LAYOUTS = {
    "pixels": ((2, 3, 6, 32), None),
    "odd": ((3, 5, 7, 9), None),
    "shifted": ((2, 3, 96), shifted),
    "many classes": ((1, 20, 64), None),
    "one class": ((2, 1, 384), None),
    "one class, cropped": ((2, 1, 11, 24), lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]),
    "one image, odd": ((1, 1, 385), None),
    "channels last": ((2, 8, 9, 11), last),
    "channels last, odd": ((2, 3, 9, 11), last),
    "channels last, many": ((2, 70, 5), last),
    "pixels transposed": ((2, 3, 9, 16), lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    "expanded": ((2, 4, 48), lambda x: x[:, :1].expand(x.shape)),
    "classes of images": ((6, 4), None),
    "one pixel": ((1, 1, 1), None),
}
# name -> the mask's shape, from (N, C, pixels)
MASKS = {
    "none": None,
    "pixels": lambda n, c, p: (n, 1, *p),
    "all": lambda n, c, p: (n, c, *p),
    "of images": lambda n, c, p: (n, 1, *[1] * len(p)),
    "of classes": lambda n, c, p: (c, *[1] * len(p)),
}


def build(layout, kind=SOFT, mask=None, dtypes=(F32, F32), garbage=True):
    """Returns (prediction, target, mask)."""
    shape, arrange = LAYOUTS[layout]
    x, n, c, pixels = random(shape, dtypes[0], 1), shape[0], shape[1], shape[2:]
    target = (
        random(shape, dtypes[1], 2)
        if kind == SOFT
        else torch.randint(c, (n, *pixels), generator=torch.Generator().manual_seed(4))
    )
    keep = None
    if mask is not None:
        keep = random(MASKS[mask](n, c, pixels), F32, 3) < 0.6
        if garbage:  # masked pixels hold garbage
            out = ~keep.expand(shape)
            x = torch.where(out, NAN, x)
            if kind == SOFT:
                target = torch.where(out, INF, target)
            elif out.all(1).any():
                target = torch.where(out.all(1), 2**40, target)
    return x if arrange is None else arrange(x), target, keep


def truth(x, target, mask=None, exists=None, ignored=None, squared=False):
    """Returns (sums, keep, prediction, target); prediction and target are in fp64, and 0 where not kept."""
    keep = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape).clone()
    if exists is not None:
        keep &= exists.reshape(-1, *[1] * (x.dim() - 2))
    if target.dtype == torch.int64:
        index = target.unsqueeze(1)
        keep &= (index >= 0) & (index < x.shape[1])
        if ignored is not None:
            keep &= index != ignored
        target = index == torch.arange(x.shape[1]).reshape(-1, *[1] * (x.dim() - 2))
    p, t = (torch.where(keep, y.double(), 0) for y in (x, target))
    power = 2 if squared else 1
    terms = (p * t, p**power, t**power, keep.double())
    return torch.stack([y.flatten(2).sum(2) if x.dim() > 2 else y for y in terms]), keep, p, t


def check(x, target, mask=None, exists=None, ignored=None, squared=False, each=False):
    """Check the sums, and the backward for random upstream gradients of each region's sums. each: also check the
    backward for one operand alone."""
    expected, keep, p, t = truth(x, target, mask, exists, ignored, squared)
    arguments = (x, target, mask, exists, ignored, squared)
    dtype = F64 if F64 in (x.dtype, target.dtype) else F32
    result = region_sums(*arguments)
    close(result[:3], expected[:3], expected[:3], dtype)
    assert torch.equal(result[3], expected[3])

    grad = torch.randn(4, *x.shape[:2], dtype=F64, generator=torch.Generator().manual_seed(5))
    grad[:, ~keep.flatten(2).any(2) if x.dim() > 2 else ~keep] = NAN  # regions without a pixel
    soft = target.dtype != torch.int64
    both, marginal, marginal_target = (g.reshape(*g.shape, *[1] * (x.dim() - 2)) for g in grad[:3])
    wanted = []
    for other, x_own, factor in ((t, p, marginal), (p, t, marginal_target)):
        terms = both * other, factor * 2 * x_own if squared else factor.expand(x.shape)
        wanted.append([torch.where(keep, y, 0) for y in (sum(terms), terms[0].abs() + terms[1].abs())])
    for needs in ((True, soft), *[(True, False), (False, True)] * (each and soft)):
        got = region_sums_backward(grad, *arguments, *needs)
        for gradient, like, need, (want, size) in zip(got, (x, target), needs, wanted):
            if not need:
                assert gradient.numel() == 0
                continue
            assert gradient.dtype == like.dtype and gradient.stride() == torch.empty_like(like).stride()
            close(gradient, want, size if like.dtype in (F32, F64) else want, like.dtype)
            assert not gradient[~keep].any()
    return result


@pytest.mark.parametrize("kind", [SOFT, INDICES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, kind):
    check(*build(layout, kind), each=layout == "pixels")
    check(*build(layout, kind, "pixels"), squared=True, each=layout == "pixels")


@pytest.mark.parametrize("kind", [SOFT, INDICES])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, kind):
    layout = "channels last" if kind == SOFT else "pixels"
    x, target, keep = build(layout, kind, None if mask == "none" else mask)
    exists = torch.arange(2 * x.shape[1])[::2] != 2
    dirty = torch.where(exists.reshape(-1, 1, 1), x, INF)
    assert torch.equal(check(dirty, target, keep, exists), region_sums(x, target, keep, exists))


@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, F32), (F32, F16), (F64, F64), (F32, F64)], ids=str)
@pytest.mark.parametrize("layout", ["pixels", "channels last"])
def test_every_dtype(layout, dtypes):
    for squared in (False, True):
        check(*build(layout, SOFT, "pixels", dtypes), squared=squared)
        check(*build(layout, INDICES, "pixels", dtypes), squared=squared)


@pytest.mark.parametrize("layout", ["pixels", "channels last", "odd"])
def test_an_index_that_is_no_class_is_left_out(layout):
    """An index that is no class is left out, also 2^32 + 1, whose low 32 bits are a class."""
    x, target, _ = build(layout, INDICES)
    strange = torch.tensor([-1, x.shape[1], 255, 2**32, 2**32 + 1, -(2**32) + 2, 2**63 - 1, -(2**63)])
    is_dirty = random(target.shape, F32, 4) < 0.3
    dirty = torch.where(is_dirty, strange[torch.randint(len(strange), target.shape)], target)
    for ignored in (None, 255, -1, 1):
        check(torch.where(is_dirty.unsqueeze(1), NAN, x), dirty, ignored=ignored)
    want = region_sums(x, target, ~(is_dirty | (target == 1)).unsqueeze(1))
    assert torch.equal(region_sums(x, dirty, None, None, 1), want)


def test_nothing_there():
    for shape in ((2, 3, 0), (2, 3, 4, 0), (0, 3, 4), (2, 0, 4)):
        x = torch.zeros(shape)
        result = region_sums(x, torch.zeros_like(x))
        assert result.shape == (4, *shape[:2]) and not result.any()
        dx, dy = region_sums_backward(torch.ones(4, *shape[:2], dtype=F64), x, x, need_target=True)
        assert dx.shape == dy.shape == shape


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_sums_of_a_constant_are_exact(dtype, monkeypatch):
    """Sums of a constant, as of a network's first prediction, are exact. Summed in fp32, sixteen successive tiles would
    all round in one direction."""
    config = Config(threads=64, tile_bytes=2048)
    monkeypatch.setitem(sums.REGION_SUMS.configs, None, config)
    monkeypatch.setattr(tiling, "POLICY", tiling.POLICY._replace(blocks=2, widest=1024))
    x, target = torch.full((1, 1, 16384), 1 / 3, dtype=dtype), torch.full((1, 1, 16384), 0.7, dtype=dtype)
    for squared in (False, True):
        p, t = x.double()[0, 0, 0], target.double()[0, 0, 0]
        marginals = (p * p, t * t) if squared else (p, t)
        expected = 16384 * torch.stack([p * t, *marginals, torch.ones((), dtype=F64)])
        assert torch.equal(region_sums(x, target, squared=squared).flatten(), expected)
    assert next(iter(launch._plans.values())).grid[:2] == (1, 1)


def test_slopes_that_cancel():
    """A derivative keeps its digits where target and prediction agree, so that its two terms nearly cancel."""
    x = random((1, 2, 256), F32, 1)
    grad = torch.zeros(4, 1, 2, dtype=F64)
    grad[0], grad[1], grad[2] = -1.2345678912345678, 0.6172839456172839 * (1 + 1e-7), 0.3
    for squared in (False, True):
        target = x if squared else torch.full_like(x, 0.5)
        dx, _ = region_sums_backward(grad, x, target, squared=squared)
        marginal = grad[1].unsqueeze(2) * (2 * x.double() if squared else 1)
        wanted = grad[0].unsqueeze(2) * target.double() + marginal
        assert wanted.abs().max() < 2e-7
        assert ((dx - wanted).abs() <= 1e-5 * wanted.abs()).all()


def test_kept_infinities_show():
    x, target, _ = build("pixels")
    x[0, 0, 0, 0], x[1, 2, 3, 4] = INF, NAN
    result = region_sums(x, target)
    assert result[0, 0, 0] == INF and result[1, 0, 0] == INF and result[2, 0, 0].isfinite()
    assert result[0, 1, 2].isnan() and result[1, 1, 2].isnan()
    assert result.isfinite().sum() == result.numel() - 4
    grad = torch.zeros(4, 2, 3, dtype=F64)
    grad[0, 0, 0], grad[1, 0, 1], grad[1, 1, 1] = INF, 1e300, NAN
    dx, _ = region_sums_backward(grad, random(x.shape, F16, 1), target.clamp(min=0.1))
    assert (dx[0, 0] == INF).all() and (dx[0, 1] == INF).all() and dx[1, 1].isnan().all() and not dx[1, 2].any()


def test_gradients_through_any_strides():
    x, target, mask = build("channels last", INDICES, "pixels")
    for grad in (torch.rand(8, 2, 4, dtype=F64).permute(2, 1, 0), torch.rand(8, dtype=F64).expand(4, 2, 8)):
        expected = region_sums_backward(grad.contiguous(), x, target, mask)[0]
        assert torch.equal(region_sums_backward(grad, x, target, mask)[0], expected)


def run():
    return [region_sums(*build(layout, INDICES, "pixels")) for layout in ("pixels", "channels last", "odd")]


def test_whoever_finishes_last(monkeypatch):
    """The result has the same bits whichever block finishes last."""
    monkeypatch.setattr(tiling, "POLICY", tiling.POLICY._replace(blocks=16))  # so that blocks share regions
    first = run()
    assert min(plan.grid[1] for plan in launch._plans.values()) > 1
    assert all(map(torch.equal, first, run()))
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *index: in_order(*(n - 1 - i for i, n in zip(index, builder.grid_dim)))
    )
    assert all(map(torch.equal, first, run()))


def test_counters_are_left_at_zero(monkeypatch):
    counters = torch.zeros(buffers.COUNTERS, dtype=torch.int32)
    monkeypatch.setattr(tiling, "split_counters", lambda device: counters)
    first = run()
    assert not counters.any() and all(map(torch.equal, first, run()))


@pytest.mark.parametrize("layout", ["pixels", "odd", "channels last"])
def test_wide_indices(monkeypatch, layout):
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    check(*build(layout, INDICES, "pixels"))
    check(*build(layout, SOFT, "pixels"), squared=True)
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())


def test_unsafe_operands_are_refused():
    x, index, grad = torch.rand(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64), torch.ones(4, 2, 3, dtype=F64)
    for target in (index[:1], index[:, :3], x[:, :1], x[0], index.unsqueeze(1)):
        with pytest.raises(ValueError, match="region_sums: target"):
            region_sums(x, target)
    for exists in (torch.ones(2, dtype=torch.bool), torch.ones(3)):
        with pytest.raises(ValueError, match="exists must be 3 bools"):
            region_sums(x, index, None, exists)
    with pytest.raises(ValueError, match="does not broadcast"):
        region_sums(x, index, torch.ones(2, 2, 4, dtype=torch.bool))
    for wrong in (grad[:3], grad.float(), grad[:, :1], grad.flatten()):
        with pytest.raises(ValueError, match="grad must be float64"):
            region_sums_backward(wrong, x, index)
    with pytest.raises(ValueError, match="class indices have no gradient"):
        region_sums_backward(grad, x, index, need_target=True)


@triton.jit
def in_fp32(high, low, x):
    return high + x, low


@triton.jit
def a_little_off(high, low, x):
    return high + x * (1 + 2**-20), low


def test_a_wrong_sum_is_caught(monkeypatch):
    monkeypatch.setattr(sums, "add", a_little_off)
    with pytest.raises(AssertionError):
        check(*build("pixels"))
    monkeypatch.setattr(sums, "add", in_fp32)
    with pytest.raises(AssertionError):
        test_sums_of_a_constant_are_exact(F16, monkeypatch)
