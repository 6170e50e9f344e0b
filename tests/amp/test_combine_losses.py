"""combine_losses: the sum is wide, a non-finite term can be left out, and nothing waits."""

import math

import pytest
import torch

import safeops
from safeops.testing import no_synchronisation
from tests.contract.common import DEVICE, t

INF, NAN = math.inf, math.nan
MODES = ("propagate", "skip", "raise")


def leaf(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype, device=DEVICE, requires_grad=True)


def grads(total, *leaves):
    return [g.item() for g in torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("nonfinite", MODES)
def test_the_weighted_sum_and_its_terms(nonfinite):
    a, b, c, w = leaf(2.0), leaf(3.0), leaf(5.0), leaf(0.25)
    losses = {"a": a, "b": (b, 10), "c": [c, w]}
    total, terms, finite, names = result = safeops.combine_losses(losses, nonfinite=nonfinite)
    assert total.item() == 33.25 and total.shape == () and total.dtype == torch.float32
    assert terms.tolist() == [2, 30, 1.25] and not terms.requires_grad and terms.device == total.device
    assert finite.tolist() == [True] * 3 and finite.dtype == torch.bool and names == ("a", "b", "c")
    assert result.total is total and result.terms is terms and result.finite is finite and result.names is names
    assert grads(total, a, b, c, w) == [1, 10, 0.25, 5]


def test_the_order_is_that_of_the_dict():
    losses = {name: torch.tensor(float(i), device=DEVICE) for i, name in enumerate("zmaqb")}
    combined = safeops.combine_losses(losses)
    assert combined.names == tuple("zmaqb") and combined.terms.tolist() == [0, 1, 2, 3, 4]


def test_half_losses_are_read_wide_before_the_weight():
    a, b = leaf(700.0, torch.float16), leaf(1.0009765625, torch.float16)
    assert (a * 100).isinf()  # in plain torch the term overflows
    total, terms, finite, _ = safeops.combine_losses({"a": (a, 100), "b": (b, 1 / 3)}, nonfinite="raise")
    assert total.dtype == terms.dtype == torch.float32 and finite.all()
    assert terms[0] == 70000 and abs(terms[1].item() - 1.0009765625 / 3) < 1e-7  # half is off by 1e-4
    da, db = torch.autograd.grad(total, (a, b))
    assert da.dtype == torch.float16 and da == 100 and db == torch.tensor(1 / 3).half()


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float16), (torch.float32, torch.float64)])
def test_fp64_where_a_loss_is(dtypes):
    a, b = (leaf(1 / 3, dtype) for dtype in dtypes)
    combined = safeops.combine_losses({"a": a, "b": b})
    assert combined.total.dtype == combined.terms.dtype == torch.float64
    assert combined.total.item() == a.item() + b.item()


def test_an_fp64_weight_is_read_as_it_is():
    a = leaf(1e-30)
    weight = torch.tensor(1e60, dtype=torch.float64, device=DEVICE)
    total, terms, finite, _ = safeops.combine_losses({"a": (a, weight), "b": (a, 1 / weight)})
    assert total.dtype == torch.float32 and finite.all() and total.item() == pytest.approx(1e30)
    # A term that fp32 cannot hold counts as non-finite.
    total, terms, finite, _ = safeops.combine_losses({"a": (a, weight * 1e20), "b": a}, nonfinite="skip")
    assert terms[0].isinf() and finite.tolist() == [False, True] and total == 1e-30


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_propagate_shows_it(bad):
    a, b = leaf(1.0), leaf(bad)
    total, terms, finite, _ = safeops.combine_losses({"a": a, "b": (b, 0.5)})
    assert str(total.item()) == str(bad) == str(terms[1].item()) and finite.tolist() == [True, False]
    assert grads(total, a, b) == [1, 0.5]


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("weight", [2.0, "tensor", "nan", "inf"])
def test_skip_leaves_it_out_with_gradient_0(bad, weight):
    w = leaf({"tensor": 2.0, "nan": NAN, "inf": INF}[weight]) if isinstance(weight, str) else weight
    a, b = leaf(1.0), leaf(bad)
    leaves = (a, b, w) if isinstance(weight, str) else (a, b)
    total, terms, finite, _ = safeops.combine_losses({"a": (a, 3.0), "b": (b, w)}, nonfinite="skip")
    assert total == 3 and finite.tolist() == [True, False] and not terms[1].isfinite()
    assert grads(total, *leaves) == [3, 0, 0][: len(leaves)]
    for upstream in (NAN, INF):  # also under a non-finite upstream gradient
        _, db = torch.autograd.grad(
            safeops.combine_losses({"a": a, "b": (b, w)}, nonfinite="skip").total,
            (a, b),
            torch.tensor(upstream, device=DEVICE),
        )
        assert db == 0


def test_a_loss_that_is_not_finite_spoils_no_parameter():
    x = leaf(2.0)
    losses = {"a": x.square(), "b": (x * 1e30).square()}  # b and its slope overflow
    assert torch.autograd.grad(sum(losses.values()), x, retain_graph=True)[0].isinf()
    total = safeops.combine_losses(losses, nonfinite="skip").total
    assert total == 4 and torch.autograd.grad(total, x)[0] == 4


def test_what_the_backward_of_a_skipped_loss_receives_is_0():
    seen = []
    x = leaf(1.0)
    bad = (x / 0).clone()
    bad.register_hook(lambda g: seen.append(g.item()))
    safeops.combine_losses({"a": x, "b": (bad, 7)}, nonfinite="skip").total.backward()
    assert seen == [0]


def test_nothing_finite_is_nan_with_gradients_of_0():
    a, b = leaf(NAN), leaf(INF)
    total, _, finite, _ = safeops.combine_losses({"a": a, "b": b}, nonfinite="skip")
    assert total.isnan() and not finite.any() and grads(total, a, b) == [0, 0]


@pytest.mark.parametrize("nonfinite", MODES)
@pytest.mark.parametrize("weight", [0, 0.0, "tensor"])
def test_weight_0_means_that_the_loss_does_not_exist(nonfinite, weight):
    a, b = leaf(1.0), leaf(NAN)
    w = torch.zeros((), device=DEVICE) if weight == "tensor" else weight
    total, terms, finite, _ = safeops.combine_losses({"a": a, "b": (b, w)}, nonfinite=nonfinite)
    assert total == 1 and terms.tolist() == [1, 0] and finite.all() and grads(total, a, b) == [1, 0]


def test_raise_names_it():
    losses = {"l1": leaf(1.0), "ssim": (leaf(NAN), 0.5), "depth": leaf(3e38), "far": (leaf(3e38), -2)}
    with pytest.raises(FloatingPointError) as error:
        safeops.combine_losses(losses, nonfinite="raise")
    text = str(error.value)
    assert text.startswith("combine_losses:") and "'ssim' is nan" in text and "'far' is -inf" in text
    assert "l1" not in text and "depth" not in text


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_nobody_waits(nonfinite):
    a, b, w = leaf(1.0, torch.float16), leaf(NAN), leaf(0.5)
    with no_synchronisation(DEVICE):
        total = safeops.combine_losses({"a": (a, 0.1), "b": (b, w)}, nonfinite=nonfinite).total
        torch.autograd.grad(total, (a, b, w))
    with pytest.raises((AssertionError, RuntimeError), match="synchroni"):
        with no_synchronisation(DEVICE):
            safeops.combine_losses({"a": a}, nonfinite="raise")


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole(nonfinite, backend):
    torch._dynamo.reset()

    def step(x, y, w):
        losses = {"l1": safeops.l1_loss(x, y), "inverse": ((1 / x).mean(), w), "mse": (safeops.mse_loss(x, y), 0.3)}
        return safeops.combine_losses(losses, nonfinite=nonfinite)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    y = torch.zeros(4, device=DEVICE)
    for values in ([1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]):
        results = []
        for run in (step, compiled):
            x, w = leaf(values), leaf(0.5)
            combined = run(x, y, w)
            results.append((*combined[:3], *torch.autograd.grad(combined.total, (x, w))))
            assert combined.names == ("l1", "inverse", "mse")
        for got, want in zip(*results):
            torch.testing.assert_close(got, want, equal_nan=True)


def test_a_weight_that_changes_at_each_step_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: safeops.combine_losses({"x": (x, w)}).total, backend="aot_eager",
                             fullgraph=True, dynamic=True)  # fmt: skip
    for w in (0.5, 0.25, 3.0):
        assert compiled(torch.tensor(2.0, device=DEVICE), w) == 2 * w


def test_transforms_and_second_derivatives():
    def total(x):
        return safeops.combine_losses({"a": (x[0] ** 3, 2.0), "b": (x[1] / 0, 1.0)}, nonfinite="skip").total

    x = torch.tensor([[2.0, 1.0], [3.0, 1.0]], dtype=torch.float64, device=DEVICE)
    first = torch.func.vmap(torch.func.grad(total))(x)
    assert first[:, 0].tolist() == [24, 54]
    value, tangent = torch.func.jvp(lambda a: total(torch.stack([a, a])), (x[0, 0],), (torch.ones_like(x[0, 0]),))
    assert value == 16 and tangent == 24
    leaves = x[0].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x: safeops.combine_losses({"a": (x[0] ** 3, 2.0), "b": (x[1].sin(), x[0])}).total, leaves
    )


def test_autocast_changes_nothing():
    a, b = leaf(1.0009765625, torch.float16), leaf(1.0001)
    outside = safeops.combine_losses({"a": (a, 0.3), "b": b})
    with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
        inside = safeops.combine_losses({"a": (a, 0.3), "b": b})
    assert torch.equal(inside.total, outside.total) and torch.equal(inside.terms, outside.terms)
    assert inside.total.dtype == torch.float32


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    "losses, error, words",
    [
        ({}, ValueError, ("empty",)),
        ([ONE], TypeError, ("dict", "list")),
        (ONE, TypeError, ("dict", "Tensor")),
        ({1: ONE}, TypeError, ("name", "string", "1")),
        ({"a": 1.0}, TypeError, ("'a'", "tensor", "float")),
        ({"a": torch.ones(2)}, ValueError, ("'a'", "0-dim", "(2,)")),
        ({"a": torch.tensor(1)}, TypeError, ("'a'", "floating", "torch.int64")),
        ({"a": torch.tensor(1j)}, TypeError, ("'a'", "floating", "complex")),
        ({"a": (ONE,)}, ValueError, ("'a'", "(tensor, weight)", "1 items")),
        ({"a": (0.5, ONE)}, TypeError, ("'a'", "tensor", "float")),
        ({"a": (ONE, "0.5")}, TypeError, ("weight", "'a'", "number", "str")),
        ({"a": (ONE, None)}, TypeError, ("weight", "'a'", "number", "NoneType")),
        ({"a": (ONE, True)}, TypeError, ("weight", "'a'", "number", "bool")),
        ({"a": (ONE, ONE > 0)}, TypeError, ("weight", "'a'", "number", "torch.bool")),
        ({"a": (ONE, torch.ones(2))}, ValueError, ("weight", "'a'", "(2,)")),
        ({"a": (ONE, 10**400)}, ValueError, ("weight", "'a'", "1.8e+308")),
        ({"a": ONE, "b": ONE.to("meta")}, ValueError, ("'a'", "'b'", "cpu", "meta")),
        ({"a": ONE, "b": (ONE, ONE.to("meta"))}, ValueError, ("weight", "'b'", "cpu", "meta")),
    ],
)
def test_bad_calls(losses, error, words):
    with pytest.raises(error) as caught:
        safeops.combine_losses(losses)
    assert str(caught.value).startswith("combine_losses: ") and all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("nonfinite", ["ignore", None, 0])
def test_an_unknown_name_in_nonfinite(nonfinite):
    with pytest.raises(ValueError, match="combine_losses: nonfinite must be one of 'propagate', 'skip', 'raise'"):
        safeops.combine_losses({"a": t(1.0).sum()}, nonfinite=nonfinite)


def test_a_weight_beyond_fp32_is_read_as_it_is():
    for weight in (1e40, 1e-50):
        x = torch.tensor(1 / weight, dtype=torch.float64, requires_grad=True)
        total = safeops.combine_losses({"a": (x, weight), "b": (torch.tensor(1.0), 1e-50)}).total
        assert total == 1 and torch.autograd.grad(total, x)[0] == weight


def test_a_loss_of_one_number_is_a_loss():
    """nn.DataParallel and `keepdim` return losses of shape (1,), which must count as scalars."""
    x = torch.tensor([3.0], dtype=torch.float16, device=DEVICE, requires_grad=True)
    total = safeops.combine_losses({"a": (x * 2, 0.5), "b": x.sum()}).total
    assert total.shape == () and total.item() == 6 and torch.autograd.grad(total, x)[0].item() == 2
