"""The losses of rows that are composed of other ops: parity with torch, rows that are left out, which ops they call."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.domain import box
from safeops.core.op import registry
from tests.contract.common import DEVICE, each_route, equal, flags, on, t
from tests.ops import RECORDS, definitions
from tests.test_routes import dispatched

NAN, INF = math.nan, math.inf
NAMES = [
    name
    for name, record in RECORDS.items()  # with one mask a row
    if record.of_rows and not record.definition.by_element and registry[name].family not in ("divergences", "routers")
]
KERNELS = all(registry[name].runs_on(DEVICE) for name in NAMES)
each_loss = pytest.mark.parametrize("name", NAMES)
OF_PAIRS = ("info_nce_loss", "supervised_contrastive_loss")  # a row's loss depends on other rows
each_of_single_rows = pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_PAIRS])
OF_CLASSES = ("multi_margin_loss", "multilabel_soft_margin_loss")  # `weight` is per class
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def vectors(*shape, count=2, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(DEVICE, dtype).requires_grad_() for _ in range(count)]


def operands(name, *shape, dtype=torch.float32):
    if name == "triplet_margin_loss":
        return vectors(*shape, count=3, dtype=dtype)
    rows = shape[:-1]
    if name == "box_iou_loss":
        return [box(x.detach()).requires_grad_() for x in vectors(*rows, 4, dtype=dtype)]
    if name in ("info_nce_loss", "multilabel_soft_margin_loss"):
        return vectors(*shape, dtype=dtype)
    if name == "multilabel_margin_loss":
        index = torch.randint(-1, max(shape[-1], 1), shape, generator=torch.Generator().manual_seed(1))
        index[..., :1] = 0
        return [*vectors(*shape, count=1, dtype=dtype), index.to(DEVICE)]
    if name == "supervised_contrastive_loss":
        return [*vectors(*shape, count=1, dtype=dtype), torch.arange(math.prod(rows), device=DEVICE).reshape(rows) % 2]
    if name == "multi_margin_loss":
        index = torch.randint(0, max(shape[-1], 1), rows, generator=torch.Generator().manual_seed(1))
        return [*vectors(*shape, count=1, dtype=dtype), index.to(DEVICE)]
    sign = torch.randint(0, 2, rows, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return [*vectors(*shape, dtype=dtype), sign.to(DEVICE)]


def leaves(operands):
    return [x for x in operands if x.is_floating_point()]


@each_route
@each_reduction
@pytest.mark.parametrize("margin", [0.0, 0.3, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosine_embedding_loss_is_torchs(route, reduction, margin, dtype):
    x, y, target = operands("cosine_embedding_loss", 9, 6, dtype=dtype)
    target = torch.where(torch.arange(9, device=DEVICE) == 4, 0, target)  # neither 1 nor -1: torch's loss is 0
    for a, b, signs in ((x, y, target), (x, y, target.to(dtype)), (x[0], y[0], target[0])):
        ours = on(route, "cosine_embedding_loss")(a, b, signs, margin=margin, reduction=reduction)
        theirs = F.cosine_embedding_loss(a, b, signs, margin=margin, reduction=reduction)
        torch.testing.assert_close(ours, theirs)
        got, want = (torch.autograd.grad(z.sum(), (x, y)) for z in (ours, theirs))
        torch.testing.assert_close(got, want)


@each_route
@each_reduction
@pytest.mark.parametrize(
    "options",
    [{}, {"margin": 2.5}, {"p": 1.0}, {"p": 3.0}, {"p": INF}, {"swap": True}, {"eps": 1e-2, "swap": True, "p": 1}],
    ids=str,
)
def test_triplet_margin_loss_is_torchs(route, reduction, options):
    for dtype in (torch.float32, torch.float64):
        a, b, c = vectors(9, 6, count=3, dtype=dtype)
        for triple in ((a, b, c), (a[0], b[0], c[0])):
            ours = on(route, "triplet_margin_loss")(*triple, reduction=reduction, **options)
            theirs = F.triplet_margin_loss(*triple, reduction=reduction, **options)
            torch.testing.assert_close(ours, theirs)
            got, want = (torch.autograd.grad(z.sum(), (a, b, c)) for z in (ours, theirs))
            torch.testing.assert_close(got, want)


@each_route
@pytest.mark.parametrize("shape", [(7, 1), (40, 20), (3, 300), (2, 9000), (1, 70_000), (3, 4, 33)], ids=str)
@pytest.mark.parametrize("swap", [False, True])
def test_triplet_margin_loss_of_sizes(route, shape, swap):
    """Results are right for rows read whole, in pieces and in slices, contiguous and strided. In the last row anchor
    and positive are equal, or differ in one number, which shows that eps is added to all numbers."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)):
        tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(DEVICE, dtype) for i in range(3)]
        upstream = torch.rand(shape[:-1], generator=torch.Generator().manual_seed(3)).to(DEVICE)
        for differs in (0.0, 2.0**-10):
            tensors[1].view(-1, shape[-1])[-1] = tensors[0].view(-1, shape[-1])[-1]
            if differs:
                tensors[0].view(-1)[-1], tensors[1].view(-1)[-1] = 0, differs
            for triple in (tensors, [x.transpose(0, -1).contiguous().transpose(0, -1) for x in tensors]):
                inputs = [x.clone().requires_grad_() for x in triple]
                wide = [x.detach().double().requires_grad_() for x in inputs]
                options = {"swap": swap, "margin": 2.0, "eps": 1e-2, "reduction": "none"}
                ours = on(route, "triplet_margin_loss")(*inputs, **options)
                truth = on("composite", "triplet_margin_loss")(*wide, **options)
                torch.testing.assert_close(ours.double(), truth, rtol=tolerance / 10, atol=tolerance / 10)
                got = torch.autograd.grad(ours, inputs, upstream.to(ours.dtype))
                want = torch.autograd.grad(truth, wide, upstream.double())
                for x, y in zip(got, want):
                    torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@each_route
@each_reduction
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("margin", [1.0, 0.3, -0.5])
def test_multi_margin_loss_is_torchs(route, reduction, p, margin):
    for dtype in (torch.float32, torch.float64):
        x, target = operands("multi_margin_loss", 9, 6, dtype=dtype)
        weight = torch.rand(6, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
        weight[2] = 0  # a class of weight 0 counts in torch's mean
        for a, index, w in ((x, target, None), (x, target, weight), (x[0], target[0], weight)):
            options = {"p": p, "margin": margin, "weight": w, "reduction": reduction}
            ours = on(route, "multi_margin_loss")(a, index, **options)
            theirs = F.multi_margin_loss(a, index, **options)
            torch.testing.assert_close(ours, theirs)
            got, want = (torch.autograd.grad(z.sum(), x)[0] for z in (ours, theirs))
            torch.testing.assert_close(got, want)


@each_route
@pytest.mark.parametrize("shape", [(7, 1), (600, 3), (3, 1024), (3, 1025), (2, 3000)], ids=str)
def test_multi_margin_loss_of_sizes(route, shape):
    """Results are right at lengths around that of one read, with the class first, last and in each piece, in both
    layouts."""
    for dtype in (torch.float32, torch.bfloat16):
        x, target = operands("multi_margin_loss", *shape, dtype=dtype)
        target[0], target[-1] = 0, shape[1] - 1
        across = x.detach().t().contiguous().t().requires_grad_()
        upstream = torch.rand(shape[0], generator=torch.Generator().manual_seed(3)).to(DEVICE)
        for p, a in ((1, x), (2, across)):
            wide = a.detach().double().requires_grad_()
            ours = on(route, "multi_margin_loss")(a, target, p=p, reduction="none")
            truth = F.multi_margin_loss(wide, target, p=p, reduction="none")
            torch.testing.assert_close(ours, truth.float())
            got, want = (
                torch.autograd.grad(ours, a, upstream)[0],
                torch.autograd.grad(truth, wide, upstream.double())[0],
            )
            torch.testing.assert_close(got, want.to(dtype))


@each_route
def test_a_class_of_weight_0_and_an_index_under_the_mask(route):
    x, target = operands("multi_margin_loss", 5, 4)
    weight = torch.tensor([1.0, 0.0, 2.0, 3.0], device=DEVICE)
    gone = target == 1
    dirty = torch.where(gone[:, None], NAN, x.detach()).requires_grad_()
    loss = on(route, "multi_margin_loss")(dirty, target, weight=weight, reduction="sum")
    assert gone.any() and loss.isfinite()
    assert (torch.autograd.grad(loss, dirty)[0][gone] == 0).all()
    keep = flags(True, False, True, True, False)
    want = on(route, "multi_margin_loss")(x, target, mask=keep)
    for garbage in (4, -1, 2**40):
        assert torch.equal(on(route, "multi_margin_loss")(x, torch.where(keep, target, garbage), mask=keep), want)
    if DEVICE == "cpu":
        with pytest.raises(IndexError, match="^multi_margin_loss: target 4 is out of range for the 4 classes"):
            on(route, "multi_margin_loss")(x, torch.where(keep, target, 4))


@each_route
def test_equal_and_zero_vectors_have_gradient_0(route):
    x = t(1.0, 2.0, 2.0).reshape(1, 3)
    anchor, positive, far = (y.clone().requires_grad_() for y in (x, x, x + 0.1))
    plain = torch.autograd.grad(F.triplet_margin_loss(anchor, positive, far), positive)[0]
    assert (plain != 0).all()  # torch adds eps to the difference, so equal vectors have a slope
    loss = on(route, "triplet_margin_loss")(anchor, positive, far, eps=0.0)
    da, dp, _ = torch.autograd.grad(loss, (anchor, positive, far))
    assert (dp == 0).all() and da.isfinite().all()
    assert equal(on(route, "triplet_margin_loss")(anchor, positive, positive), 1)
    zero, other = torch.zeros(1, 3, device=DEVICE, requires_grad=True), x.clone().requires_grad_()
    for sign in (1, -1):
        loss = on(route, "cosine_embedding_loss")(zero, other, torch.tensor([sign], device=DEVICE), margin=-0.5)
        assert equal(loss, 1 if sign == 1 else 0.5)
        assert all((d == 0).all() for d in torch.autograd.grad(loss, (zero, other)))


@each_route
def test_halves_whose_squares_do_not_fit(route):
    x = torch.full((2, 4), 300.0, dtype=torch.float16, device=DEVICE)
    y = torch.tensor([[300.0] * 4, [-300.0] * 4], dtype=torch.float16, device=DEVICE)
    signs = torch.tensor([1, 1], device=DEVICE)
    assert not torch.allclose(F.cosine_embedding_loss(x, y, signs, reduction="none").float(), t(0.0, 2.0))
    ours = on(route, "cosine_embedding_loss")(x, y, signs, reduction="none")
    assert ours.dtype == torch.float32 and torch.allclose(ours, t(0.0, 2.0), atol=1e-6)
    far = on(route, "triplet_margin_loss")(x, y, x, reduction="none", eps=0.0)
    assert torch.equal(far, t(1.0, 1201.0)) and far.dtype == torch.float32


@each_route
@each_loss
def test_a_masked_row_does_not_exist(route, name):
    keep = flags(True, False, True, True, False)
    function, clean = on(route, name), operands(name, 5, 6)
    rows = [x[keep] for x in clean]
    want = function(*rows)
    dwant = torch.autograd.grad(want, leaves(clean))
    weight = torch.where(keep, 2.0, 0.0)
    for garbage in (NAN, INF, 3e38):
        dirty = [torch.where(keep[:, None], x.detach(), garbage).requires_grad_() for x in leaves(clean)]
        tensors = [*dirty, *[x for x in clean if not x.is_floating_point()]]
        by_weight = [] if name in OF_CLASSES else [{"weight": weight}]
        for options in ({"mask": keep}, *by_weight):
            got = function(*tensors, **options)
            torch.testing.assert_close(got, want)
            for d, w in zip(torch.autograd.grad(got, dirty), dwant):
                assert (d[~keep] == 0).all()
                torch.testing.assert_close(d, w)
        none = function(*tensors, mask=keep, reduction="none")
        assert (none[~keep] == 0).all()
        upstream = torch.where(keep, 1.0, NAN)
        assert all((d[~keep] == 0).all() for d in torch.autograd.grad(none, dirty, upstream))
    assert function(*[x[:0] for x in clean], empty="nan").isnan()
    assert function(*clean, mask=~keep & keep, empty="nan").isnan()
    with pytest.raises(ValueError, match=f'^{name}: empty="raise"'):
        function(*clean, mask=~keep & keep, empty="raise")


@each_route
@each_of_single_rows
def test_a_kept_nan_shows(route, name):
    for i in range(len(leaves(operands(name, 3, 4)))):
        tensors = operands(name, 3, 4)
        with torch.no_grad():
            tensors[i][1, 2] = NAN
        none = on(route, name)(*tensors, reduction="none")
        assert none.isnan().tolist() == [False, True, False] and on(route, name)(*tensors).isnan()
        if name not in OF_CLASSES:  # OF_CLASSES may have finite slopes at NaN
            assert torch.autograd.grad(none.sum(), tensors[i])[0][1].isnan().any()


@each_route
@each_of_single_rows
@pytest.mark.parametrize("shape", [(4,), (0, 4), (3, 0), (1, 1), (2, 3, 7), (70, 130), (3, 5000)], ids=str)
def test_sizes(route, name, shape):
    if name == "multi_margin_loss" and shape[-1] == 0:
        pytest.skip("its rows have a class, and here is none: test_multi_margin_of_no_classes_has_none_for_a_row")
    tensors = operands(name, *shape)
    value = on(route, name)(*tensors, reduction="none")
    want = getattr(definitions, name)(*[x.double() if x.is_floating_point() else x for x in tensors], reduction="none")
    assert value.shape == shape[:-1] and torch.allclose(value.double(), want, rtol=1e-5, atol=1e-5)
    assert all(d.isfinite().all() for d in torch.autograd.grad(value.sum(), leaves(tensors)))


@each_loss
def test_a_mask_is_of_rows(name):
    tensors = operands(name, 5, 6)
    for shape in ((5, 1), (6,), (5, 6)):
        with pytest.raises(ValueError, match=rf"^{name}: mask \({shape[0]}.* does not broadcast to the rows \(5,\)"):
            getattr(safeops, name)(*tensors, mask=torch.ones(shape, dtype=torch.bool, device=DEVICE))


@pytest.mark.skipif(not KERNELS, reason="no kernels here")
@each_loss
def test_the_kernels_of_the_parts_run(name):
    tensors = operands(name, 5, 6)
    loss, forward = dispatched(lambda: getattr(safeops, name)(*tensors))
    _, backward = dispatched(lambda: torch.autograd.grad(loss, leaves(tensors)))
    part, *_ = registry[name].parts or [registry[name]]
    assert forward.count(f"safeops::_{part.name}") == (2 if name == "info_nce_loss" else 1)
    one = name == "multilabel_soft_margin_loss"  # one op, which also means over the classes
    assert ("safeops::_masked_mean" in forward) != one and any(op.startswith("safeops") for op in backward)
    kernels = [op for op in forward + backward if op.startswith("safeops")]
    assert not one or kernels == [f"safeops::_{part.name}", f"safeops::_{part.name}_backward"]


@each_route
@pytest.mark.parametrize("kind", ["plain", "masked", "weighted", "masked, weighted", "no class weighs"])
def test_the_mean_of_multilabel_soft_margin_loss_is_that_of_its_rows(route, kind):
    x, y = (z.detach() for z in operands("multilabel_soft_margin_loss", 5, 6))
    mask = flags(True, False, True, True, False) if "masked" in kind else None
    weight = torch.rand(6, device=DEVICE) + 0.5 if "weighted" in kind else None
    weight = torch.zeros(6, device=DEVICE) if kind.startswith("no") else weight
    loss = functools.partial(on(route, "multilabel_soft_margin_loss"), x, y, weight=weight)
    of_rows = loss(reduction="none")
    keep = torch.ones_like(of_rows, dtype=torch.bool) if mask is None else mask
    total, count = of_rows[keep].sum(), keep.sum()
    torch.testing.assert_close(loss(mask=mask), total / count)
    torch.testing.assert_close(loss(mask=mask, reduction="sum"), total)
    for denominator in (2.5, torch.tensor(3, device=DEVICE)):
        torch.testing.assert_close(loss(mask=mask, denominator=denominator), total / denominator)
    for empty, want in (("nan", NAN), ("zero", 0.0)):
        for reduction in ("mean", "sum"):
            got = loss(mask=~torch.ones_like(keep), reduction=reduction, empty=empty)
            torch.testing.assert_close(got, torch.full_like(got, want), equal_nan=True)
    with pytest.raises(ValueError, match="^multilabel_soft_margin_loss: empty=.raise.: nothing is kept"):
        loss(mask=~torch.ones_like(keep), empty="raise")
    torch.testing.assert_close(loss(mask=mask, empty="raise"), total / count)


@each_loss
def test_modules(name):
    op, call = registry[name], RECORDS[name].call
    tensors = operands(name, 5, 6)
    keep = flags(True, False, True, True, True)
    options = {key: call[key] for key in ("margin", "p", "eps", "swap", "temperature") if key in call}
    module = getattr(safeops.nn, op.module)(reduction="sum", **options)
    want = getattr(safeops, name)(*tensors, reduction="sum", mask=keep, **options)
    assert torch.equal(module(*tensors, mask=keep), want)
    assert module.state_dict().keys() == {key for key, value in options.items() if isinstance(value, torch.Tensor)}
    assert all(f"{key}={value!r}" in repr(module) for key, value in options.items())
    for key in {"margin", "temperature"} & options.keys():
        with pytest.raises(TypeError, match=rf"^{op.module}: {key} must be"):
            getattr(safeops.nn, op.module)(**{key: "1"})


def test_triplet_of_equal_vectors_is_at_distance_0_with_gradient_0():
    anchor = torch.ones(2, 3, requires_grad=True)
    positive, negative = torch.ones(2, 3, requires_grad=True), torch.tensor([[1.0, 1.0, 1.5]] * 2)
    loss = safeops.triplet_margin_loss(anchor, positive, negative, eps=0.25, reduction="none")
    far = torch.linalg.vector_norm(1 - negative + 0.25, dim=-1)
    torch.testing.assert_close(loss.detach(), (1 - far).clamp(min=0))
    assert not torch.autograd.grad(loss.sum(), positive)[0].any()


@each_route
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_multi_margin_row_of_a_class_without_weight(route, p, garbage):
    x = torch.tensor([[garbage, 0.0], [1.0, 0.5]], device=DEVICE, requires_grad=True)
    loss = on(route, "multi_margin_loss")(x, t(0, 1, dtype=torch.int64), p=p, weight=t(0.0, 1.0))
    assert torch.autograd.grad(loss, x)[0][0].tolist() == [0, 0] and loss.isfinite()


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_multi_margin_compiled_leaves_out_a_class_that_does_not_exist(backend):
    torch._dynamo.reset()
    x = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.2, 0.3]], device=DEVICE, requires_grad=True)
    compiled = torch.compile(safeops.multi_margin_loss, fullgraph=True, backend=backend)
    loss = compiled(x, t(0, 3, dtype=torch.int64))
    torch.testing.assert_close(loss, safeops.multi_margin_loss(x[:1], t(0, dtype=torch.int64)))
    assert torch.autograd.grad(loss, x)[0][1].tolist() == [0, 0, 0]


@each_route
def test_cosine_embedding_target_of_nan_shows(route):
    loss = on(route, "cosine_embedding_loss")(*vectors(3, 3), t(NAN, 5.0, 1.0), reduction="none")
    assert loss.isnan().tolist() == [True, False, False] and loss[1] == 0


@each_route
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_cosine_embedding_is_fp32_whatever_the_default_dtype(route, default):
    operands = *vectors(3, 3), t(1.0, -1.0, 5.0)
    want = on(route, "cosine_embedding_loss")(*operands, reduction="none")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        loss = on(route, "cosine_embedding_loss")(*operands, reduction="none")
    finally:
        torch.set_default_dtype(before)
    assert loss.dtype == torch.float32 and torch.equal(loss, want)


@pytest.mark.parametrize("masked", [False, True])
def test_multi_margin_of_no_classes_has_none_for_a_row(masked):
    x, target = torch.zeros(3, 0, device=DEVICE), torch.ones(3, dtype=torch.int64, device=DEVICE)
    if masked or DEVICE != "cpu":  # the class of a masked row is not checked
        mask = torch.zeros(3, dtype=torch.bool, device=DEVICE)
        assert safeops.multi_margin_loss(x, target, mask=mask) == 0
    else:
        with pytest.raises(IndexError, match="multi_margin_loss: target 1 is out of range for the 0 classes"):
            safeops.multi_margin_loss(x, target)


def test_multi_margin_is_exported_for_any_number_of_rows():
    class Loss(torch.nn.Module):
        def forward(self, x, target):
            return safeops.multi_margin_loss(x, target)

    def sample(n):
        return torch.randn(n, 7, device=DEVICE), torch.randint(7, (n,), device=DEVICE)

    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Loss(), sample(6), dynamic_shapes=({0: rows}, {0: rows})).module()
    x, target = sample(9)
    torch.testing.assert_close(program(x, target), safeops.multi_margin_loss(x, target))
