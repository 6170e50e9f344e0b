"""The region losses: what the contract's clauses do not cover, and their modules."""

import copy
import math

import pytest
import torch

import safeops
from safeops.core.op import registry
from safeops.ops.losses._region import define
from safeops.testing import no_synchronisation
from safeops.testing.memory import _peak_bytes
from tests.contract.common import DEVICE, each_route, flags, on, t
from tests.ops import RECORDS, definitions
from tests.test_routes import dispatched

NAN, INF = math.nan, math.inf
KERNELS = all(registry[name].runs_on(DEVICE) for name in ("dice_loss", "tversky_loss"))
NAMES = ("dice_loss", "tversky_loss")
each_loss = pytest.mark.parametrize("name", NAMES)
kernels_only = pytest.mark.skipif(not KERNELS, reason="no kernels here")


def images(*shape, dtype=torch.float32, seed=0):
    """Returns (probabilities, class indices)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=g)
    x = (x.softmax(1) if shape[1] > 1 else x).to(dtype)
    index = torch.randint(shape[1], (shape[0], *shape[2:]), generator=g)
    return x.to(DEVICE), index.to(DEVICE)


def one_hot(index, classes, dtype=torch.float32):
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).movedim(-1, 1).to(dtype)


def value_and_gradient(function, x, *args, **kwargs):
    x = x.detach().requires_grad_()
    value = function(x, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


# ---- values


def test_known_values():
    x = t(0.75, 0.25, 0.25, 0.75).reshape(1, 2, 2)
    y = torch.tensor([[0, 1]], device=DEVICE)
    plain = {"smooth_nr": 0.0, "smooth_dr": 0.0}
    assert safeops.dice_loss(x, y, **plain) == 0.25  # 1 - 2 * 0.75 / (1 + 1)
    assert safeops.dice_loss(x, y, squared_pred=True, **plain).item() == pytest.approx(1 - 1.5 / 1.625)
    assert safeops.dice_loss(x, y, smooth_nr=1.0, smooth_dr=1.0).item() == pytest.approx(1 - 2.5 / 3)
    assert safeops.tversky_loss(x, y, alpha=1.0, beta=3.0, **plain).item() == pytest.approx(1 - 0.75 / 1.75)
    assert safeops.dice_loss(x, y, reduction="none", **plain).tolist() == [[0.25, 0.25]]
    assert safeops.dice_loss(x, y, reduction="sum", **plain) == 0.5
    assert safeops.dice_loss(x, y, denominator=4, **plain) == 0.125
    weight = t(3.0, 0.0)
    assert safeops.dice_loss(x, y, weight=weight, reduction="none", **plain).tolist() == [[0.75, 0]]
    assert safeops.dice_loss(x, y, weight=weight, **plain) == 0.25


@each_route
def test_tversky_of_a_half_is_dice(route):
    x, y = images(2, 3, 7, 9)
    dice = value_and_gradient(on(route, "dice_loss"), x, y, smooth_nr=1.0, smooth_dr=0.5)
    half = value_and_gradient(on(route, "tversky_loss"), x, y, smooth_nr=0.5, smooth_dr=0.25)
    torch.testing.assert_close(half, dice)


@each_route
@each_loss
@pytest.mark.parametrize("squared_pred", [False, True])
def test_the_same_target_in_any_form(route, name, squared_pred):
    """Class indices of any integer dtype and one-hot targets of any dtype give the same bits."""
    x, index = images(2, 5, 30, 41)
    function = on(route, name)
    want = value_and_gradient(function, x, index, squared_pred=squared_pred)
    targets = [index.to(d) for d in (torch.uint8, torch.int8, torch.int16, torch.int32)]
    targets += [one_hot(index, 5, d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64)]
    for target in targets:
        got = value_and_gradient(function, x, target, squared_pred=squared_pred)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), target.dtype


@each_route
@each_loss
def test_a_target_of_one_number(route, name):
    """A target with strides of 0 (one pixel, or an expanded index) gives the loss of its one-hot form."""
    p = torch.rand(2, 4, 5, device=DEVICE)
    for x, index in ((p[:1, :, 0], torch.tensor([2])), (p, torch.tensor(2).expand(2, 5))):
        index = index.to(DEVICE)
        want = one_hot(index.clone(), 4)
        torch.testing.assert_close(on(route, name)(x, index), on(route, name)(x, want))


@each_route
@each_loss
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (2, 3), (3, 2, 511), (1, 2, 513), (2, 1, 8192), (1, 3, 8193), (1, 20, 9000), (2, 9, 17, 3, 5),
     (40, 3, 2), (1, 700, 3), (1, 2, 70, 1, 131)],
    ids=str,
)  # fmt: skip
def test_sizes(route, name, shape):
    """Loss and gradient are right for sizes around the lengths of chunks, blocks and groups of classes."""
    x, index = images(*shape)
    keep = torch.rand(index.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7
    ignored = torch.where(keep, index, 77)
    upstream = torch.rand(shape[:2], generator=torch.Generator().manual_seed(2)).to(DEVICE)
    cases = [
        (one_hot(index, shape[1]), {"mask": keep}),
        (index, {}),
        (index, {"mask": keep.unsqueeze(1), "squared_pred": True}),
        (ignored, {"ignore_index": 77}),
    ]
    for target, options in cases[: None if shape[1] > 1 else 1]:  # with one class a target has no indices
        results = []
        for function, wide in ((on(route, name), x), (getattr(definitions, name), x.double())):
            wide = wide.clone().requires_grad_()
            if target.is_floating_point():
                target = target.to(wide.dtype)
            value = function(wide, target, reduction="none", **options)
            results.append((value, torch.autograd.grad(value, wide, upstream.to(value.dtype))[0]))
        (value, grad), (true_value, true_grad) = results
        assert (value - true_value).abs().max() < 1e-6
        assert (grad - true_grad).abs().max() <= 1e-6 * true_grad.abs().max()


@each_route
@each_loss
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 3, 4, 0)], ids=str)
def test_nothing_there(route, name, shape):
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    index = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64, device=DEVICE)
    for target in (torch.zeros_like(x), *([index] if shape[1] else [])):
        for empty, want in (("zero", 0.0), ("nan", NAN)):
            got = on(route, name)(x, target, empty=empty)
            assert str(got.item()) == str(want)
            assert torch.autograd.grad(got, x)[0].shape == x.shape
            none = on(route, name)(x, target, empty=empty, reduction="none")
            assert none.shape == shape[:2] and torch.equal(
                none.nan_to_num(5), none.new_full(shape[:2], want).nan_to_num(5)
            )
        with pytest.raises(ValueError, match=f'^{name}: empty="raise"'):
            on(route, name)(x, target, empty="raise")


@each_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("squared_pred", [False, True])
def test_sums_of_2048_x_2048_in_half_are_exact_to_fp32(route, dtype, squared_pred):
    """Sums over half inputs must be exact to fp32: in fp16 they are inf beyond 65504, and products rounded to half are
    off by 1e-3."""
    x = torch.rand(1, 1, 2048, 2048, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    y = (torch.rand(1, 1, 2048, 2048, generator=torch.Generator().manual_seed(1)).to(DEVICE) + x).div(2).to(dtype)
    power = 2 if squared_pred else 1
    if dtype == torch.float16:
        assert (x * y).sum(dtype=dtype).isinf()
    p, q = x.double(), y.double()
    want = 2 * (p * q).sum() / ((p**power).sum() + (q**power).sum())
    got = 1 - on(route, "dice_loss")(x, y, squared_pred=squared_pred, smooth_nr=0.0, smooth_dr=0.0).double()
    assert abs(got / want - 1) < 2**-23  # the sums' error, and one rounding of the loss, which is at most 1


@each_route
@pytest.mark.parametrize("pixels", [(1,), (31,), (33,), (8191,), (90, 91)], ids=str)
@pytest.mark.parametrize("special", [None, 3e38, 1e-39, INF, -INF, NAN])
def test_bf16_to_its_last_digit(route, pixels, special):
    """Kernels read bf16 in words of two and add in pairs: odd lengths, and values that are huge, subnormal, inf or NaN,
    must not change a result."""
    x, index = images(2, 3, *pixels, dtype=torch.bfloat16)
    soft = x.flip(0).contiguous()
    if special is not None:
        x[1, 0, ..., 0] = special
        soft[0, 1, ..., -1] = special
    keep = torch.rand(index.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7
    for target, options in ((index, {}), (soft, {}), (soft, {"mask": keep}), (index, {"mask": keep})):
        for scale in (1.0, 2.0**40, 2.0**-90):
            wide = target.double() if target is soft else target
            upstream = torch.full((2, 3), scale, device=DEVICE)
            results = []
            for function, z, y in ((on(route, "dice_loss"), x, target), (definitions.dice_loss, x.double(), wide)):
                z = z.clone().requires_grad_()
                value = function(z, y, reduction="none", **options)
                results += value.detach().double(), torch.autograd.grad(value, z, upstream.to(value.dtype))[0]
            value, grad, true_value, true_grad = results
            torch.testing.assert_close(value, true_value.float().double(), rtol=1e-6, atol=1e-6, equal_nan=True)
            want = true_grad.float().to(torch.bfloat16)
            torch.testing.assert_close(
                grad, want, rtol=2**-7, atol=1e-7 * scale / len(index[0].flatten()), equal_nan=True
            )


@kernels_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("special", [None, 1e200, INF, -INF, NAN])
def test_sums_by_indices_are_those_of_their_definition(dtype, squared, special):
    """Sums equal the definition's at lengths around a register's and a tile's, with a special value in a pixel's own
    class or in another."""
    for pixels in (1, 15, 16, 17, 40, 8192, 8201):
        x, index = images(1, 3, pixels, dtype=dtype)
        for ignored in (None, 1):
            for at in (0, pixels - 1) if special is not None else (None,):
                y = x.clone()
                if at is not None:
                    y[0, :2, at] = torch.tensor(special, dtype=torch.float64).to(dtype)
                want = define(y.double(), index, ignore_index=ignored, squared=squared)
                got = torch.ops.safeops._region_sums(y, index, ignore_index=ignored, squared=squared)
                tolerance = 1e-13 if DEVICE == "cpu" or dtype == torch.float64 else 1e-6
                torch.testing.assert_close(got, want, rtol=tolerance, atol=0, equal_nan=True)


# ---- pixels and regions that are left out


@each_route
@each_loss
def test_a_class_of_weight_0_does_not_exist(route, name):
    x, index = images(2, 3, 5, 6)
    weight = t(1.0, 0.0, 2.0)
    masked = torch.ones(1, 3, 1, 1, dtype=torch.bool, device=DEVICE)
    masked[:, 1] = False
    target = one_hot(index, 3)
    for squared_pred in (False, True):
        options = {"squared_pred": squared_pred}
        want = value_and_gradient(on(route, name), x, target, weight=weight, **options)
        by_mask = value_and_gradient(on(route, name), x, target, weight=t(1.0, 9.0, 2.0), mask=masked, **options)
        assert torch.equal(want[0], by_mask[0]) and torch.equal(want[1], by_mask[1])
        for garbage in (NAN, INF, -INF, 3e38):
            dirty, soft = x.clone(), target.clone()
            dirty[:, 1], soft[:, 1] = garbage, garbage
            got = value_and_gradient(on(route, name), dirty, soft, weight=weight, **options)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and (got[1][:, 1] == 0).all()


@each_route
@each_loss
def test_an_ignored_pixel_does_not_exist(route, name):
    x, index = images(2, 3, 5, 6)
    keep = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.6
    for ignored in (255, -100, 1):
        target = torch.where(keep & (index != ignored), index, ignored)
        dirty = torch.where((target == ignored).unsqueeze(1), NAN, x)
        got = value_and_gradient(on(route, name), dirty, target, ignore_index=ignored)
        masked = value_and_gradient(
            on(route, name), x, torch.where(target == ignored, 0, target), mask=target != ignored
        )
        assert torch.equal(got[0], masked[0]) and torch.equal(got[1], masked[1]) and got[0].isfinite()


@each_route
@each_loss
def test_an_index_out_of_range_under_the_mask_does_not_exist(route, name):
    x, index = images(2, 3, 40)
    keep = torch.arange(40, device=DEVICE) % 3 != 1
    want = value_and_gradient(on(route, name), x, index, mask=keep)
    for garbage in (3, -1, 2**31, 2**32, -(2**63), 2**63 - 1):
        got = value_and_gradient(on(route, name), x, torch.where(keep, index, garbage), mask=keep)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.skipif(DEVICE != "cpu", reason="on CUDA such a pixel is left out")
@each_route
@each_loss
@pytest.mark.parametrize("garbage", [3, -1, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
def test_an_index_out_of_range_is_an_index_error(route, name, garbage):
    x, index = images(2, 3, 9000)
    index[1, 8999] = garbage
    last = torch.ones(2, 3, 9000, dtype=torch.bool)
    last[1, :2, 8999] = False  # one class of that pixel is kept
    for options in (
        {},
        {"ignore_index": 1},
        *[{"ignore_index": -1}] * (garbage != -1),
        {"mask": last},
        {"mask": last[:, 2]},
        {"weight": t(0.0, 1.0, 1.0)},
    ):
        with pytest.raises(
            IndexError, match=rf"^{name}: target has the class index {garbage}, out of range for the 3 "
        ):
            on(route, name)(x, index, **options)
    assert on(route, name)(x, index, ignore_index=garbage).isfinite() if abs(garbage) < 2**31 else True


@each_route
def test_a_class_that_is_neither_there_nor_predicted(route):
    """Without smoothing such a class is 0 / 0: the prediction is right, and the loss is 0."""
    x = t(0.0, 0.0, 0.5, 0.5).reshape(1, 2, 2).requires_grad_()
    loss = on(route, "dice_loss")(x, torch.ones(1, 2, dtype=torch.int64, device=DEVICE), smooth_nr=0.0, smooth_dr=0.0,
                                  reduction="none")  # fmt: skip
    assert loss[0, 0] == 0 and loss[0, 1].item() == pytest.approx(1 / 3)
    assert torch.autograd.grad(loss.sum(), x)[0].isfinite().all()


@each_route
@each_loss
def test_a_region_without_a_pixel_counts_for_nothing(route, name):
    x, index = images(3, 2, 10)
    keep = flags(True, False, True)[:, None].expand(3, 10)
    expected = on(route, name)(x[::2], index[::2])
    assert torch.equal(on(route, name)(x, index, mask=keep), expected)
    none = on(route, name)(x, index, mask=keep, reduction="none", empty="nan")
    assert none[1].isnan().all() and torch.equal(none[::2], on(route, name)(x[::2], index[::2], reduction="none"))
    with pytest.raises(ValueError, match=f'^{name}: empty="raise": nothing is kept for 2 of 6 results'):
        on(route, name)(x, index, mask=keep, reduction="none", empty="raise")
    on(route, name)(x, index, mask=keep, empty="raise")  # no error: the mean over all regions keeps some


@each_route
@each_loss
def test_a_mask_of_pixels_is_one_of_all_classes(route, name):
    """A mask (N, *spatial) applies to all classes, also where N = C and broadcasting would read its N as classes."""
    x, index = images(3, 3, 4, 5)
    keep = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.6
    want = on(route, name)(x, index, mask=keep.unsqueeze(1).expand(3, 3, 4, 5).clone())
    assert torch.equal(on(route, name)(x, index, mask=keep), want)
    row = keep[0, 0]
    assert torch.equal(on(route, name)(x, index, mask=row), on(route, name)(x, index, mask=row.expand(3, 4, 5)))


# ---- execution


@each_loss
def test_gradient_accumulation_with_a_denominator_is_exact(name):
    x, index = images(4, 3, 20)
    function = getattr(safeops, name)
    _, expected = value_and_gradient(function, x, index)
    parts = [value_and_gradient(function, x[p], index[p], denominator=12)[1] for p in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-6, atol=0)


@kernels_only
@each_loss
def test_two_kernels_in_each_direction(name):
    x, index = images(2, 3, 8, 9)
    x.requires_grad_()
    loss, forward = dispatched(lambda: getattr(safeops, name)(x, index))
    _, backward = dispatched(lambda: torch.autograd.grad(loss, x))
    ours = "safeops::_region_sums", "safeops::_region_loss"
    assert [op for op in forward if "region" in op] == [*ours]
    assert [op for op in backward if "region" in op] == [f"{op}_backward" for op in reversed(ours)]
    assert not any("one_hot" in op or "scatter" in op or op == "aten::eq" for op in forward + backward)
    for transform in (
        lambda: torch.func.grad(lambda x: getattr(safeops, name)(x, index))(x.detach()),
        lambda: torch.func.jvp(lambda x: getattr(safeops, name)(x, index), (x.detach(),), (x.detach(),)),
    ):
        assert not any(op.startswith("safeops") for op in dispatched(transform)[1])


@kernels_only
@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_are_neither_saved_nor_copied(name, dtype):
    """Beside its inputs the graph saves a few numbers per region; class indices become no one-hot tensor."""
    x, index = images(2, 4, 256, 256, dtype=dtype)
    keep = torch.ones(2, 1, 256, 256, dtype=torch.bool, device=DEVICE)
    weight = torch.ones(4, device=DEVICE)
    for target in (index, one_hot(index, 4, torch.float16)):
        leaves = [z.detach().requires_grad_() for z in (x, target) if z.is_floating_point()]
        operands = (leaves[0], leaves[-1] if target.is_floating_point() else target)
        inputs, kept = {z.untyped_storage().data_ptr() for z in (*operands, keep)}, {}

        def note(z, kept=kept):
            kept[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
            return z

        def forward(operands=operands):
            return getattr(safeops, name)(*operands, mask=keep, weight=weight)

        with torch.autograd.graph.saved_tensors_hooks(note, lambda z: z):
            loss = forward()
        assert sum(size for data, size in kept.items() if data not in inputs) < 4096
        assert _peak_bytes(DEVICE, forward) < 32768

        def backward(loss=loss, leaves=leaves):
            return torch.autograd.grad(loss, leaves, retain_graph=True)

        assert _peak_bytes(DEVICE, backward) < sum(z.nbytes for z in leaves) + 32768


@each_loss
def test_nobody_waits(name):
    x, index = images(2, 3, 8, 9)
    for function in (on("kernel", name), on("composite", name)):
        with no_synchronisation(DEVICE):
            value_and_gradient(function, x, index, ignore_index=2, mask=x[:, 0] > 0.2, weight=x[0, :, 0, 0])


@pytest.mark.parametrize("shape", [(2, 5, 33, 47), (1, 2, 64, 130), (2, 20, 40, 31), (1, 130, 9, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_channels_last_is_read_as_it_lies(shape, dtype):
    x, index = images(*shape, dtype=dtype)
    keep = torch.rand(index.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7
    last, soft = {"memory_format": torch.channels_last}, x.flip(2)
    for target, options in (
        (index, {"mask": keep}),
        (index, {"squared_pred": True}),
        (soft, {}),
        (soft, {"mask": keep, "squared_pred": True}),
        (soft, {"mask": (x > 0.1).contiguous(**last)}),
    ):
        results = []
        for layout in ({}, last):
            z = x.detach().clone().contiguous(**layout).requires_grad_()
            for y in [target] if target is index else [target, target.contiguous(**last)]:
                live = [z] if y is index else [z, y.detach().clone().requires_grad_()]
                loss = safeops.dice_loss(*live, *([y] if y is index else []), **options)
                results.append((loss, *torch.autograd.grad(loss, live)))
                assert results[-1][1].stride() == z.stride()
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])


# ---- modules


@each_loss
def test_modules(name):
    op, call = registry[name], RECORDS[name].call
    x, index = images(2, 3, 6, 7)
    weight = t(1.0, 2.0, 0.5)
    extra = {key: call[key] for key in ("squared_pred", "smooth_nr", *op.parameters)}
    module = getattr(safeops.nn, op.module)(weight=weight, ignore_index=1, batch=True, reduction="none", **extra)
    want = getattr(safeops, name)(x, index, weight=weight, ignore_index=1, batch=True, reduction="none", **extra)
    assert torch.equal(module(x, index), want) and want.shape == (3,)
    assert list(module.state_dict()) == ["weight"] and torch.equal(copy.deepcopy(module)(x, index), want)
    assert module.double().weight.dtype == torch.float64
    for option, value in {"reduction": "'none'", "ignore_index": 1, **extra}.items():
        assert f"{option}={value}" in repr(module)
    keep = x[:, 0] > 0.3
    module = getattr(safeops.nn, op.module)()
    got = module(x, index, mask=keep, denominator=3.0)
    assert torch.equal(got, getattr(safeops, name)(x, index, mask=keep, denominator=3.0))
    for options in ({"smooth_nr": -1.0}, {"reduction": "average"}, {"weight": weight.long()}, {"ignore_index": 0.5}):
        with pytest.raises((TypeError, ValueError), match=rf"^{op.module}: {next(iter(options))} must be"):
            getattr(safeops.nn, op.module)(**options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'smooth'"):
        getattr(safeops.nn, op.module)(smooth=1.0)


@each_route
def test_a_perfect_region_has_no_power(route):
    """With gamma, loss^gamma of a perfect region is 0 with gradient 0: not NaN, though the loss may round to -1e-17 and
    the power has an infinite slope at 0 for gamma < 1."""
    x = torch.eye(3, device=DEVICE)[:, :, None].clone().requires_grad_()
    for gamma in (0.5, 0.75, 3.0):
        loss = on(route, "tversky_loss")(x, x.detach(), alpha=0.3, beta=0.7, gamma=gamma)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss == 0 and (grad == 0).all()
    half = on(route, "tversky_loss")(x / 2, x.detach(), reduction="none", smooth_nr=0.0, smooth_dr=0.0)
    torch.testing.assert_close(
        on(route, "tversky_loss")(x / 2, x.detach(), reduction="none", smooth_nr=0.0, smooth_dr=0.0, gamma=2.0), half**2
    )
