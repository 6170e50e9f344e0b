"""The pointwise losses: reported failures that they answer, what is their own, and their modules."""

import copy
import inspect
import io
import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops._op import registry
from safeops.testing import CHECKS, Sample, Subject, no_synchronisation, run_check
from tests.contract.common import DEVICE, each_route, equal, flags, leaf, names, on, t
from tests.ops import RECORDS
from tests.ops.operands import data, mask, weights

KERNELS = all(op.cpu if DEVICE == "cpu" else op.cuda for op in registry.values())
MODULES = [n for n, m in vars(safeops.nn).items() if getattr(m, "__module__", 0) == "safeops.nn" and n[0] != "_"]


def test_masked_loss_by_multiplication_keeps_the_nan():
    x, y, keep = leaf([1.0, 2.0]), torch.tensor([0.0, math.nan], device=DEVICE), flags(True, False)
    plain = (F.mse_loss(x, y, reduction="none") * keep).sum() / keep.sum()
    assert plain.isnan() and torch.autograd.grad(plain, x)[0][1].isnan()
    ours = safeops.mse_loss(x, y, mask=keep)
    assert equal(ours, 1) and equal(torch.autograd.grad(ours, x)[0], [2, 0])


def test_pytorch_96813_smooth_l1_with_beta_zero():
    x, y = leaf([0.0, 1.0, -3.0]), torch.tensor([0.0, 0.0, 0.0], device=DEVICE)
    ours = safeops.smooth_l1_loss(x, y, beta=0.0, reduction="sum")
    grad = torch.autograd.grad(ours, x)[0]
    assert equal(ours, 4) and equal(grad, [0, 1, -1])


@pytest.mark.parametrize("name", names("losses"))
def test_liger_968_reduction_none_with_weights(name):
    torch.manual_seed(0)
    x, y, w = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5), torch.rand(4, 5) + 0.5
    upstream = torch.randn(4, 5)
    twin = RECORDS[name].fields["torch_equivalent"]
    want = torch.autograd.grad(twin(x, y, weight=w, reduction="none"), x, upstream)[0]
    x2 = x.detach().to(DEVICE).requires_grad_()
    ours = getattr(safeops, name)(x2, y.to(DEVICE), weight=w.to(DEVICE), reduction="none")
    torch.testing.assert_close(torch.autograd.grad(ours, x2, upstream.to(DEVICE))[0].cpu(), want)


def test_gradient_taken_in_the_forward_is_not_differentiated_silently():
    x, y = leaf([1.0, -2.0, 4.0]), torch.zeros(3, device=DEVICE)
    loss = safeops.huber_loss(x, y, delta=3.0, reduction="sum")
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert equal(first, [1, -2, 3])
    assert equal(torch.autograd.grad(first.square().sum(), x)[0], [2, -4, 0])


def test_a_backward_never_writes_the_incoming_gradient():
    x = leaf([1.0, 2.0])
    upstream = torch.tensor([1.0, math.nan], device=DEVICE)
    loss = safeops.mse_loss(x, torch.zeros(2, device=DEVICE), mask=flags(True, False), reduction="none")
    loss.backward(upstream)
    assert equal(upstream[0], 1) and upstream[1].isnan() and upstream._version == 0
    assert equal(x.grad, [2, 0])


def test_first_step_with_a_half_loss():
    torch.manual_seed(0)
    x = torch.randn(64, device=DEVICE).half().requires_grad_()
    target = torch.randn(64, device=DEVICE).half()
    assert (F.mse_loss(x, target) * 65536).isinf()
    loss = safeops.mse_loss(x, target)
    assert loss.dtype == torch.float32 and (loss * 65536).isfinite()
    grad = torch.autograd.grad(loss * 65536, x)[0]
    assert grad.dtype == torch.float16 and grad.isfinite().all() and grad.abs().max() > 1


def test_a_scaled_gradient_that_overflows_is_inf_so_that_the_scaler_sees_it():
    x = leaf([300.0], torch.float16)
    grad = torch.autograd.grad(safeops.mse_loss(x, torch.zeros_like(x)) * 65536, x)[0]
    assert grad.isposinf().all()


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_trl_6988_fp32_inputs_are_read_as_they_are_under_autocast(autocast):
    x, y = leaf([1.0001, 2.0]), torch.tensor([1.0, 2.0], device=DEVICE)
    outside = safeops.mse_loss(x, y)
    with torch.autocast(torch.device(DEVICE).type, dtype=autocast):
        inside = safeops.mse_loss(x, y)
        with_grad_inside = torch.autograd.grad(safeops.mse_loss(x, y), x)[0]
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    assert torch.equal(torch.autograd.grad(inside, x)[0], with_grad_inside)
    assert outside > 0  # in half 1.0001 is 1


def test_piq_range_checks_synchronise_and_ours_do_not():
    x = leaf([0.1, 0.9])
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            assert x.min() >= 0
    with no_synchronisation(DEVICE):
        safeops.huber_loss(x, torch.zeros_like(x), mask=x > 0.5, weight=x.detach())


def test_gradient_accumulation_with_a_denominator_is_exact():
    """The mean over two micro-batches of unequal kept counts is not the mean of their means."""
    x, y = leaf([1.0, 2.0, 3.0, 10.0]), torch.zeros(4, device=DEVICE)
    keep = flags(True, True, True, True)
    whole = torch.autograd.grad(safeops.mse_loss(x, y, mask=keep), x)[0]
    parts = [slice(0, 3), slice(3, 4)]
    plain = sum(F.mse_loss(x[p], y[p]) for p in parts) / 2
    assert not torch.allclose(torch.autograd.grad(plain, x)[0], whole)
    count = keep.sum().float()
    ours = sum(safeops.mse_loss(x[p], y[p], mask=keep[p], denominator=count) for p in parts)
    assert torch.equal(torch.autograd.grad(ours, x)[0], whole)


@pytest.mark.skipif(not KERNELS, reason="the composite would need 16 GiB")
@pytest.mark.parametrize("name", ["masked_mean", "mse_loss"])
def test_fla_1080_triton_1058_more_than_2_to_the_31_elements(name):
    """Offsets and counts beyond int32. The operands are expanded: they touch no memory."""
    shape = (3, 2**30)
    x = torch.tensor([[2.0], [4.0], [6.0]], dtype=torch.bfloat16, device=DEVICE).expand(shape)
    keep = flags(True, False, True)[:, None].expand(shape)
    if name == "masked_mean":
        assert safeops.masked_mean(x, keep) == 4
        assert torch.equal(safeops.masked_mean(x, keep, 1), torch.tensor([2.0, 0.0, 6.0], device=DEVICE))
    else:
        y = torch.zeros((), dtype=torch.bfloat16, device=DEVICE).expand(shape)
        assert safeops.mse_loss(x, y, mask=keep) == 20


@each_route
@pytest.mark.parametrize(
    "beta, at, upstream",
    [
        (1e30, 1e25, 1.0),
        (3e38, 1e38, 65536.0),
        (3.4e38, 3.3e38, 1.0),
        (2.0**-126, 2.0**-127, 1.0),  # the smallest that is no 0
        (1e-30, 5e-31, 1.0),
        (1e-36, 0.0, 65536.0),
        (1.3e-38, 1e-38, 1.0),
        (0.75, 0.5, 1e-30),
    ],
)
def test_the_parabola_of_an_extreme_beta(route, beta, at, upstream):
    op = on(route, "smooth_l1_loss")
    for dtype in (torch.float32, torch.float64):
        x = t(at, -at, dtype=dtype).requires_grad_()
        for create_graph in (False, True):
            loss = op(x, torch.zeros_like(x), beta=beta, reduction="none")
            assert loss.tolist() == pytest.approx([at / beta * at / 2] * 2, rel=1e-6, abs=1e-45)
            (dx,) = torch.autograd.grad(loss, x, torch.full_like(x, upstream), create_graph=create_graph)
            assert dx.tolist() == pytest.approx([upstream * at / beta, -upstream * at / beta], rel=1e-6, abs=0)


def test_a_subnormal_beta_counts_as_zero():
    for x in (t(1.0), t(0.0), t(1e-44)):
        assert torch.equal(safeops.smooth_l1_loss(x, t(0.0), beta=1e-44), safeops.l1_loss(x, t(0.0)))


@pytest.mark.parametrize("weight", [1e-50, 1e-46, 1e300])
def test_an_fp64_weight_is_read_as_it_is(weight):
    weights = t(weight, weight, dtype=torch.float64)
    x = t(1.0, 3.0, grad=True)
    for f in (safeops.masked_mean, lambda x, weight: safeops.l1_loss(x, torch.zeros_like(x), weight=weight)):
        assert f(x, weight=weights).item() == 2
        assert f(x, weight=weights).dtype == torch.float32
        assert torch.autograd.grad(f(x, weight=weights), x)[0].tolist() == [0.5, 0.5]
    assert safeops.masked_sum(t(1.0, float("nan")), weight=t(1.0, weight, dtype=torch.float64)).isnan()
    assert safeops.l1_loss(t(1.0, 2.0), t(0.0, 0.0), weight=weights, reduction="none").dtype == torch.float32


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_the_second_derivative_where_input_equals_target(name):
    x = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64, device=DEVICE, requires_grad=True)
    for function in (getattr(safeops, name), getattr(F, name)):
        (dx,) = torch.autograd.grad(function(x, torch.zeros_like(x), reduction="sum"), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
        assert second.tolist() == ([2, 2, 2] if name == "mse_loss" else [1, 1, 0]), function


# ---- their modules: options in the constructor, tensors in the call

# What a module could break by itself; the rest is its function's.
OWN = "value gradient dtypes masked_garbage nothing_kept torch_func vmap no_sync autocast compile".split()


def build(name, **options):
    """(module, its function, the function's own options)"""
    module = getattr(safeops.nn, name)
    call = RECORDS[module.function.__name__].call
    parameters = {key: call[key] for key in inspect.signature(module).parameters if key in call}
    return module(**parameters, **options).to(DEVICE), module.function, parameters


def test_every_loss_has_a_module():
    losses = {name for name, record in RECORDS.items() if record.family == "losses"}
    assert {getattr(safeops.nn, name).function.__name__ for name in MODULES} == losses


@pytest.mark.parametrize("check", [c for c in OWN if c in CHECKS])
@pytest.mark.parametrize("name", MODULES)
def test_module(name, check):
    module, function, parameters = build(name)
    sample = Sample((data(3, 5), data(3, 5, seed=1)), {"mask": mask(3, 5), "weight": weights(5)}, differentiable=(0, 1))

    def reference(input, target, **tensors):
        return RECORDS[function.__name__].definition(input, target, **tensors, **parameters)

    run_check(Subject(module, reference, [sample], data=(0, 1), device=DEVICE, name=name), check)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("empty", ["zero", "nan"])
@pytest.mark.parametrize("name", MODULES)
def test_options_reach_the_function(name, reduction, empty):
    module, function, parameters = build(name, reduction=reduction, empty=empty)
    x, y = data(4, 3).to(DEVICE), data(4, 3, seed=1).to(DEVICE)
    for keep in (mask(4, 3).to(DEVICE), torch.zeros(4, 3, dtype=torch.bool, device=DEVICE)):
        got = module(x, y, mask=keep, weight=weights(3).to(DEVICE))
        want = function(x, y, mask=keep, weight=weights(3).to(DEVICE), reduction=reduction, empty=empty, **parameters)
        assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1)) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("name", MODULES)
def test_denominator_reaches_the_function(name):
    module, function, parameters = build(name)
    x, y = data(4, 3).to(DEVICE), data(4, 3, seed=1).to(DEVICE)
    for denominator in (7.0, torch.tensor(7.0, device=DEVICE)):
        assert torch.equal(module(x, y, denominator=denominator), function(x, y, denominator=denominator, **parameters))


@pytest.mark.parametrize("name", MODULES)
def test_modules_copy_save_and_print(name):
    module, _, parameters = build(name, reduction="sum")
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    x = data(4, 3).to(DEVICE)
    for twin in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x, x + 1), module(x, x + 1))
    assert not list(module.parameters()) and not module.state_dict()
    for option, value in {"reduction": "'sum'", **parameters}.items():
        assert f"{option}={value}" in repr(module)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_inside_a_compiled_function(name):
    torch._dynamo.reset()
    make = getattr(safeops.nn, name)
    compiled = torch.compile(lambda x, y: make(reduction="sum")(x, y), backend="aot_eager", fullgraph=True)
    x, y = data(4, 3).to(DEVICE), data(4, 3, seed=1).to(DEVICE)
    torch.testing.assert_close(compiled(x, y), make(reduction="sum")(x, y))
