"""In safe mode each loss of torch has its twin's value and gradients, which equal torch's where those are finite."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.safe.losses import NAMES


def reals(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def probabilities(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 0.9 + 0.05


def signs(*shape):
    return reals(*shape).sign()


def classes(*shape, count=3):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % count


def samples():
    """Returns [(name, operands, options)]: calls with defaults, by torch's positional arguments, with weights, and with
    all options."""
    x, y, p, q, w = reals(4, 3) * 3, reals(4, 3), probabilities(4, 3), probabilities(4, 3), probabilities(4, 3)
    hits = (p > 0.5).double()
    return [
        ("binary_cross_entropy", (p, q), {}),
        ("binary_cross_entropy", (p, q, w), {}),
        ("binary_cross_entropy", (p, q), {"weight": w[0]}),
        ("binary_cross_entropy_with_logits", (x, q), {}),
        ("binary_cross_entropy_with_logits", (x, q), {"weight": w[:, :1], "pos_weight": p[0]}),
        ("cosine_embedding_loss", (x, y, signs(4)), {"margin": 0.1}),
        ("cross_entropy", (x, classes(4)), {}),
        ("cross_entropy", (x, classes(4), p[0]), {}),
        ("cross_entropy", (x, classes(4)), {"label_smoothing": 0.1}),
        ("cross_entropy", (x, q), {}),
        ("cross_entropy", (x, q), {"weight": p[0]}),
        ("cross_entropy", (reals(4, 3, 5), classes(4, 5)), {"ignore_index": 1}),
        ("ctc_loss", (reals(5, 2, 4).log_softmax(-1), torch.tensor([[1, 2], [3, 3]]), (5, 4), (2, 1)), {}),
        ("gaussian_nll_loss", (x, y, p), {"full": True, "eps": 0.2}),
        ("gaussian_nll_loss", (x, y, p), {}),
        ("gaussian_nll_loss", (x, y, p[:, 0]), {}),
        ("gaussian_nll_loss", (x, y, 0.5), {}),
        ("hinge_embedding_loss", (x, signs(4, 3)), {"margin": 0.7}),
        ("huber_loss", (x, y), {"delta": 0.7}),
        ("huber_loss", (x, y), {"weight": w}),
        ("kl_div", (x, p), {}),
        ("kl_div", (x, y), {"log_target": True}),
        ("l1_loss", (x, y), {}),
        ("l1_loss", (x, y), {"weight": w}),
        ("margin_ranking_loss", (x[0], y[0], signs(3)), {"margin": 0.3}),
        ("mse_loss", (x, y), {}),
        ("mse_loss", (x, y), {"weight": w}),
        ("multi_margin_loss", (x, classes(4)), {}),
        ("multi_margin_loss", (x, classes(4)), {"p": 2, "margin": 0.4, "weight": p[0]}),
        ("multilabel_margin_loss", (x, classes(4, 3) - 1), {}),
        ("multilabel_soft_margin_loss", (x, hits), {}),
        ("multilabel_soft_margin_loss", (x, hits), {"weight": p[0]}),
        ("nll_loss", (x, classes(4)), {}),
        ("nll_loss", (x, classes(4)), {"weight": p[0], "ignore_index": 1}),
        ("poisson_nll_loss", (x, p * 9), {}),
        ("poisson_nll_loss", (p, q * 9), {"log_input": False, "full": True}),
        ("smooth_l1_loss", (x, y), {"beta": 0.5}),
        ("soft_margin_loss", (x, signs(4, 3)), {}),
        ("triplet_margin_loss", (x, y, reals(4, 3)), {}),
        ("triplet_margin_with_distance_loss", (x, y, reals(4, 3)), {"margin": 0.5}),
        ("triplet_margin_loss", (x, y, reals(4, 3)), {"swap": True, "p": 1.0, "margin": 2.0}),
    ]


def test_every_loss_is_tried():
    assert {name for name, *_ in samples()} == set(NAMES)


def value_and_gradients(name, operands, options):
    leaves = [x.clone().requires_grad_() if i == 0 else x for i, x in enumerate(operands)]
    value = getattr(F, name)(*leaves, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaves[:1])
    return value, gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_value_and_gradient_are_torchs(reduction):
    for name, operands, options in samples():
        options = options | {"reduction": reduction}
        expected = value_and_gradients(name, operands, options)
        with safeops.safe_mode() as report:
            result = value_and_gradients(name, operands, options)
        assert [x.function for x in report.replacements if x.function == name] == [name], (name, options)
        for a, b in zip(result, expected):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12), (name, options, a, b)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_of_the_callers_is_in_the_mode(compiled):
    """The distance function's own torch calls must be replaced, and its operands must stay bf16, since it multiplies
    them by bf16 weights."""
    project = torch.nn.Linear(4, 4).bfloat16()
    a, p, n = (x.bfloat16() for x in (torch.zeros(3, 4), torch.randn(3, 4), torch.randn(3, 4)))
    hidden = torch.full((3, 4), -torch.inf).bfloat16()

    def distance(x, y):
        return (project(x) - project(y)).square().sum(-1) + (x + hidden).softmax(-1).sum(-1)

    call = torch.nn.TripletMarginWithDistanceLoss(distance_function=distance)
    with safeops.safe_mode() as report:
        result = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(a, p, n)
    assert result.isfinite() and "softmax" in {x.function for x in report.replacements}
    assert call(a, p, n).isnan()
    hidden.zero_()
    torch.testing.assert_close(result - 1, call(a, p, n) - 1, rtol=2e-2, atol=2e-2)


def test_batchmean():
    x, p = reals(4, 3), probabilities(4, 3)
    expected = F.kl_div(x, p, reduction="batchmean")
    with safeops.safe_mode() as report:
        assert torch.allclose(F.kl_div(x, p, reduction="batchmean"), expected, rtol=1e-12)
    assert len(report.replacements) == 1


def test_a_half_loss_is_the_twins():
    x, y = torch.full((4,), 300.0, dtype=torch.float16), torch.zeros(4, dtype=torch.float16)
    assert F.mse_loss(x, y).isinf()
    with safeops.safe_mode():
        loss = F.mse_loss(x, y)
    assert loss.dtype == torch.float32 and loss == safeops.mse_loss(x, y) == 90000


def test_a_module_calls_its_function():
    x = torch.randn(4, 3)
    with safeops.safe_mode() as report:
        loss = torch.nn.CrossEntropyLoss()(x, torch.full((4,), -100))  # all targets are ignored
    assert loss == 0 and report.replacements[0].twin == "cross_entropy"


def test_an_empty_mean_is_zero():
    x = torch.randn(4, requires_grad=True)
    nothing = torch.zeros(4, dtype=torch.bool)
    with safeops.safe_mode():
        F.mse_loss(x[nothing], torch.zeros(4)[nothing]).backward()
    assert torch.equal(x.grad, torch.zeros(4))


def integers(name):
    return getattr(F, name)(torch.randn(3), torch.arange(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.mse_loss(torch.ones(3), torch.zeros(3), reduce=False),
        lambda: F.mse_loss(torch.ones(3), torch.zeros(3), size_average=False),
        lambda: F.l1_loss(torch.ones(3), torch.arange(3)),
        lambda: F.cross_entropy(
            torch.ones(3, 2), torch.tensor([0, 1, 0]), torch.tensor([0.0, 1.0]), label_smoothing=0.1
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_what_a_twin_does_not_take_is_torchs(call):
    expected = call()
    with safeops.safe_mode() as report:
        assert torch.equal(call(), expected)
    assert not report.replacements


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: F.mse_loss(torch.ones(3), torch.zeros(3), reduction="nope"), ValueError),
        (lambda: F.l1_loss(torch.ones(2, 3), torch.zeros(2, 3), weight=torch.ones(3)), ValueError),
        (lambda: F.binary_cross_entropy(torch.ones(2, 3), torch.zeros(3)), ValueError),
        (lambda: F.cross_entropy(torch.ones(2, 3), torch.tensor([1, 7])), IndexError),
    ],
)
def test_torchs_errors_stay(call, error):
    with pytest.raises(error) as torchs:
        call()
    with safeops.safe_mode(), pytest.raises(error) as ours:
        call()
    assert str(ours.value) == str(torchs.value)


def _what_is_said(call):
    """Returns (the result or the error's text, the warnings' texts)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call().item()
        except RuntimeError as error:
            result = str(error)
    return result, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize(
    "name",
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss hinge_embedding_loss kl_div".split(),
)
def test_torch_broadcasts_refuses_and_warns_as_ever(name, shape):
    x, y = torch.linspace(0.1, 0.8, 2).reshape(2, 1), torch.linspace(0.2, 0.9, 2).reshape(shape)
    want, got = _what_is_said(lambda: getattr(F, name)(x, y)), ()
    with safeops.safe_mode():
        got = _what_is_said(lambda: getattr(F, name)(x, y))
    assert got[1] == want[1] and got[0] == (pytest.approx(want[0]) if isinstance(want[0], float) else want[0])
