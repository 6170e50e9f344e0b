"""clip_grad_norm_: torch's result if torch is right, the right one if not; non-finite gradients; errors."""

import math

import pytest
import torch

import safeops
from safeops.testing import no_synchronisation
from tests.amp.gradients import clones, each_dtype, mixed, parameters, sets, true_norm
from tests.contract.lists.tensor_lists import FLOATS, many, scans

INF, NAN = math.inf, math.nan


def test_a_shared_gradient_counts_once_and_is_scaled_once():
    p = torch.nn.Parameter(torch.zeros(4))
    q = torch.nn.Parameter(torch.zeros(4))
    p.grad = q.grad = torch.full((4,), 3.0)
    assert safeops.clip_grad_norm_([p, q, p], 1.0) == 6.0
    assert torch.allclose(p.grad, torch.full((4,), 0.5))


def test_gradients_with_a_graph_are_read_and_written():
    x = torch.nn.Parameter(torch.full((3,), 2.0))
    (x.grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    version = x.grad._version
    norm = safeops.clip_grad_norm_([x], 1.0)
    assert not norm.requires_grad and abs(norm.item() - 12 * 3**0.5) < 1e-5
    assert x.grad._version > version  # so that autograd refuses a second backward with the old gradient
    x.grad = None


# ---- clipping


@each_dtype
@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 0, 1e6, INF], ids=str)
def test_clip_is_not_worse_than_torchs(dtype, max_norm):
    for gradients in sets(dtype):
        norm = true_norm(gradients)
        factor = min(max_norm / (norm.item() + 1e-6), 1.0)
        want = [g.double() * factor for g in gradients]
        mine, rival = parameters(clones(gradients)), parameters(clones(gradients))
        got = safeops.clip_grad_norm_(mine, max_norm)
        torch.nn.utils.clip_grad_norm_(rival, max_norm)
        assert torch.allclose(got.double(), norm, rtol=1e-6)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        for p, r, w, g in zip(mine, rival, want, gradients):
            assert p.grad.stride() == g.stride()
            error, theirs = (p.grad.double() - w).abs(), (r.grad.double() - w).abs()
            # Half is rounded once. fp32 also has the factor's rounding. fp64's truth is fp64, and rounded itself.
            roundings = {2: 1, 4: 3, 8: 8}[dtype.itemsize]
            room = torch.finfo(dtype).eps / 2 * w.abs() * roundings + smallest
            assert (error <= torch.minimum(theirs + room, room * 1.01)).all()


def test_clip_of_half_gradients_beyond_65504():
    """Half gradients with a norm beyond 65504 must be clipped: torch's norm is inf, its factor 0, and the step does
    nothing."""
    gradient = torch.full((1000,), 60000.0, dtype=torch.float16)
    mine, rival = parameters([gradient.clone()]), parameters([gradient.clone()])
    assert torch.nn.utils.clip_grad_norm_(rival, 1.0) == INF and not rival[0].grad.any()
    assert abs(safeops.clip_grad_norm_(mine, 1.0).item() / (60000 * 1000**0.5) - 1) < 1e-6
    assert torch.allclose(mine[0].grad.float().norm(), torch.tensor(1.0), rtol=1e-3)


def test_clip_of_fp32_gradients_whose_norm_is_beyond_fp32():
    mine = parameters([torch.full((10_000,), 3e38)])
    assert safeops.clip_grad_norm_(mine, 1.0, nonfinite="raise") == INF  # norm beyond fp32; no error
    assert torch.allclose(mine[0].grad, torch.full((10_000,), 0.01), rtol=1e-3)  # a subnormal factor


def test_a_factor_below_fp32s_numbers_keeps_its_digits():
    mine = parameters([torch.tensor([3e38, 1e20, 1.0])])
    safeops.clip_grad_norm_(mine, 1e-10)
    assert torch.allclose(mine[0].grad, torch.tensor([1e-10, 1e-10 / 3e18, 0]), rtol=1e-6, atol=0)


def test_clip_of_mixed_dtypes_uses_one_factor():
    gradients = mixed()
    mine = parameters(clones(gradients))
    norm = safeops.clip_grad_norm_(mine, 2.0)
    assert norm.dtype == torch.float64
    factor = 2.0 / (norm.item() + 1e-6)
    for p, g in zip(mine, gradients):
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        assert torch.equal(p.grad, (g.to(wide) * torch.tensor(factor, dtype=torch.float64).to(wide)).to(g.dtype))


def test_gradients_that_are_small_enough_are_not_written():
    bits = torch.full((40_000,), 0x0001, dtype=torch.int16)
    mine = parameters([bits.view(torch.float16)])
    safeops.clip_grad_norm_(mine, 1.0)
    assert (bits == 1).all()


# ---- non-finite gradients


@pytest.mark.parametrize("bad", [NAN, INF])
def test_propagate_is_torchs(bad):
    gradients = [torch.ones(3), torch.tensor([1.0, bad, 2.0])]
    mine, rival = parameters(clones(gradients)), parameters(clones(gradients))
    got, want = safeops.clip_grad_norm_(mine, 1.0), torch.nn.utils.clip_grad_norm_(rival, 1.0)
    assert str(got.item()) == str(want.item())
    for p, r in zip(mine, rival):
        assert torch.equal(p.grad.nan_to_num(7), r.grad.nan_to_num(7))


@each_dtype
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_skip_leaves_all_gradients_as_they_are(dtype, bad):
    gradients = [torch.full((40_000,), 9.0, dtype=dtype), torch.tensor([1.0, bad, 2.0], dtype=dtype)]
    mine = parameters(clones(gradients))
    norm = safeops.clip_grad_norm_(mine, 1.0, nonfinite="skip")
    assert not norm.isfinite()
    for p, g in zip(mine, gradients):
        assert torch.equal(p.grad.view(torch.int16), g.view(torch.int16))
    mine = parameters([torch.full((4,), 9.0, dtype=dtype)])
    assert safeops.clip_grad_norm_(mine, 1.0, nonfinite="skip") == 18
    assert torch.allclose(mine[0].grad.float(), torch.tensor(0.5))  # the finite gradients are clipped


def test_grad_scaler_finds_what_skip_left():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for value, moved in ((INF, False), (3.0, True)):
        optimizer.zero_grad()
        scaler.scale((w * torch.tensor([1.0, value, 1.0])).sum()).backward()
        before, scale = w.detach().clone(), scaler.get_scale()
        scaler.unscale_(optimizer)
        safeops.clip_grad_norm_([w], 1.0, nonfinite="skip")
        scaler.step(optimizer)
        scaler.update()
        assert (w != before).any().item() == moved and w.isfinite().all()
        assert (scaler.get_scale() < scale) == (not moved)


def test_raise_names_the_gradient_before_anything_is_written():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model(torch.ones(5, 4)).square().sum().backward()
    model[1].weight.grad[1, 2], model[1].weight.grad[0, 0] = NAN, -INF
    before = [p.grad.clone() for p in model.parameters()]
    for argument, name in ((model, "1.weight"), (model.parameters(), r"parameters\[2\]")):
        with pytest.raises(ValueError, match=rf"the gradient of {name} \(2, 3\) has 1 NaN and 1 inf; the norm is nan"):
            safeops.clip_grad_norm_(argument, 1e-3, nonfinite="raise")
    assert all(torch.equal(p.grad.nan_to_num(7), b.nan_to_num(7)) for p, b in zip(model.parameters(), before))


def test_without_kernels_all_is_the_same(monkeypatch):
    """Where no kernels are built, the definitions must clip as the kernels do."""
    fine = [g for dtype in FLOATS for g in many(dtype, odd=0)]
    bad = [*fine, torch.tensor([INF])]
    results = []
    for kernels in (True, False):
        for op in (scans.NORM, scans.SCALE, scans.HEALTH):
            monkeypatch.setattr(op, "cpu", kernels)
        mine, skipped = parameters(clones(fine)), parameters(clones(bad))
        norms = [safeops.grad_norm(mine, ord) for ord in (1, 2, INF, 3)] + [safeops.clip_grad_norm_(mine, 0.1)]
        assert safeops.clip_grad_norm_(skipped, 0.1, nonfinite="skip") == INF
        assert all(torch.equal(p.grad, g) for p, g in zip(skipped, bad))
        with pytest.raises(ValueError, match=r"\(1,\) has 0 NaN and 1 inf; the norm is inf"):
            safeops.clip_grad_norm_(skipped, 0.1, nonfinite="raise")
        results.append((norms, [p.grad for p in mine]))
    for a, b in zip(results[0][0], results[1][0]):
        assert torch.allclose(a, b, rtol=1e-7)
    for a, b in zip(results[0][1], results[1][1]):
        # The norms may differ in fp32's last bit.
        assert torch.allclose(a, b, rtol=max(torch.finfo(a.dtype).eps, 1e-7), atol=0)


# ---- errors, and what must not happen


def test_bad_arguments_are_named():
    p = parameters([torch.ones(2)])
    sparse = torch.nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1, 1])).sum().backward()

    class Sharded(torch.Tensor):
        pass

    subclass = parameters([torch.ones(2)])
    subclass[0].grad = torch.ones(2).as_subclass(Sharded)
    for argument, error, words in (
        (3, TypeError, "parameters must be a module, a tensor or an iterable of tensors, got int"),
        ([*p, None], TypeError, r"parameters\[1\] must be a tensor, got NoneType"),
        ([*p, torch.ones(2)], TypeError, r"parameters\[1\] has no gradient and requires none: pass the parameters"),
        (sparse, TypeError, "the gradient of weight must be a plain dense tensor or .*, got one torch.sparse_coo"),
        (
            subclass,
            TypeError,
            r"the gradient of parameters\[0\] must be .* or a DTensor, got one of type Sharded",
        ),
        (parameters([torch.ones(2, dtype=torch.complex64)]), TypeError, "must be floating point, got torch.complex64"),
    ):
        for function, arguments in ((safeops.grad_norm, ()), (safeops.clip_grad_norm_, (1.0,))):
            with pytest.raises(error, match=f"{function.__name__}: .*{words}"):
                function(argument, *arguments)
    for arguments, options, error, words in (
        ((-1.0,), {}, ValueError, "max_norm must be at least 0, got -1.0"),
        ((NAN,), {}, ValueError, "max_norm must be at least 0, got nan"),
        (("1",), {}, TypeError, "max_norm must be a number, got str"),
        ((1.0, 0), {}, ValueError, "norm_type must be greater than 0, got 0"),
        ((1.0, -INF), {}, ValueError, "norm_type must be greater than 0, got -inf"),
        ((1.0, "two"), {}, TypeError, "norm_type must be a number, got str"),
        ((1.0,), {"nonfinite": "ignore"}, ValueError, "nonfinite must be one of 'propagate', 'skip', 'raise'"),
    ):
        with pytest.raises(error, match=f"clip_grad_norm_: {words}"):
            safeops.clip_grad_norm_(p, *arguments, **options)
    assert (p[0].grad == 1).all()
    shared = parameters([torch.ones(2, 3), torch.ones(1).expand(3)])
    with pytest.raises(ValueError, match=r"parameters\[1\] cannot be scaled in place.*strides \(0,\)"):
        safeops.clip_grad_norm_(shared, 0.1)
    assert (shared[0].grad == 1).all() and safeops.grad_norm(shared) == 3


def test_an_exhausted_generator_is_told_as_by_torch():
    for clip in (torch.nn.utils.clip_grad_norm_, safeops.clip_grad_norm_):
        exhausted = (p for p in [])
        with pytest.warns(UserWarning, match="is an empty generator, no gradient clipping will occur") as warned:
            clip(exhausted, 1.0)
        assert warned[0].filename == __file__
        clip([], 1.0)  # an empty list is allowed: no warning


def test_no_synchronisation():
    """The host must read no value from the device, with or without kernels, unless nonfinite="raise"."""
    p = parameters(clones(mixed()))
    with no_synchronisation():
        safeops.grad_norm(p)
        safeops.clip_grad_norm_(p, 1.0)
        safeops.clip_grad_norm_(p, 1.0, 3.0, nonfinite="skip")


def test_compiles_whole():
    model = torch.nn.Linear(4, 3)
    model(torch.ones(5, 4)).square().sum().backward()
    want = safeops.grad_norm(model)
    torch._dynamo.reset()
    clip = torch.compile(lambda m: safeops.clip_grad_norm_(m.parameters(), 0.5), backend="aot_eager", fullgraph=True)
    assert torch.equal(clip(model), want)
    assert abs(safeops.grad_norm(model).item() - 0.5) < 1e-6
