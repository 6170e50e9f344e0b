"""safeops.debug.compare names the module where a planted difference is, and none between runs that only round
differently. Most figures of docs/compare.md are asserted here."""

import copy

import pytest
import torch
from torch import nn

from safeops.debug import compare
from tests.debug.compared import NETWORKS, TF32, autocast, dropping, large, network, planted, transposed, wrong_mask

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# [network, module that is changed, how, module that must be named]
PLANTED = [
    ("perceptron", "layers.4", transposed, "layers.4 (Linear)"),
    ("perceptron", "drop", dropping, "drop (Dropout)"),
    ("convolutions", "stages.1.0", transposed, "stages.1.0 (Conv2d)"),
    ("convolutions", "square", transposed, "square (Linear)"),
    ("convolutions", "drop", dropping, "drop (Dropout)"),
    ("transformer", "blocks.1.square", transposed, "blocks.1.square (Linear)"),
    ("transformer", "blocks.1.drop", dropping, "blocks.1.drop (Dropout)"),
    ("transformer", "blocks.1.attention", wrong_mask, "blocks.1.attention.out (Linear)"),
]
SEEDS = [pytest.param(range(1), id="one"), pytest.param(range(1, 10), marks=pytest.mark.slow, id="nine more")]
KINDS = ["float32", *(pytest.param(kind, marks=pytest.mark.slow) for kind in HALF)]
LAYERS = [("perceptron", "layers.4"), ("convolutions", "stages.1.0"), ("transformer", "blocks.1.square")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, where, change, named", PLANTED, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_difference_is_named(name, where, change, named, kind):
    model, batch = network(name)
    changed = planted(model, where, change)
    g = autocast(changed, HALF[kind]) if kind in HALF else changed
    result = compare(model, g, batch, model=(model, changed))
    assert result.forward.module == named and not result.equal
    assert result.forward.ratio > (3.5 if kind == "bfloat16" else 25 if kind == "float16" else 2e4)


@pytest.mark.parametrize("name, where", LAYERS)
def test_tf32_in_one_layer_is_named(name, where):
    model, batch = network(name)
    changed = planted(model, where, TF32)
    # The wrapper has the layer's name; the layer's own forward is not called.
    result = compare(model, changed, batch)
    assert result.forward.module.startswith(f"{where} (") and result.forward.ratio > 20
    assert 1e-4 < result.forward.difference < 1e-3  # 2^-11 an operand


@pytest.mark.parametrize("name, where", LAYERS)
def test_half_that_saturates_is_named(name, where):
    model, batch = network(name)
    f, g = (planted(model, where, large(saturates)) for saturates in (False, True))
    result = compare(f, g, batch)
    assert result.forward.module == f"{where}.store (Store)" and result.forward.ratio > 10
    assert result.forward.a.dtype == "float32" and result.forward.b.dtype == "float16"


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_equal_runs_differ_nowhere(seeds, name):
    for seed in seeds:
        model, batch = network(name, seed)
        result = compare(model, copy.deepcopy(model), batch)
        assert result.equal and result.largest_ratio == 0, result


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_float32_and_half_agree(seeds, name, kind):
    ratios = []
    for seed in seeds:
        model, batch = network(name, seed)
        result = compare(model, autocast(model, HALF[kind]), batch, model=model)
        assert result.equal, result
        ratios.append(result.largest_ratio)
    assert 0.1 < max(ratios) < 0.75  # the budget is not so wide that it holds anything


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_float32_and_float64_agree(seeds, name):
    for seed in seeds:
        model, batch = network(name, seed)
        wide = copy.deepcopy(model).double()
        result = compare(model, in_float64(wide), batch, model=(model, wide))
        assert result.equal and 0.01 < result.largest_ratio < 0.4, result


def in_float64(model):
    return lambda x: model(x.double() if x.is_floating_point() else x)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class HalvedGradient(nn.Module):
    """A layer with a wrong backward: half the gradient reaches what is before it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(Halved.apply(x))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_wrong_backward_is_named_by_the_first_gradient_that_it_spoils(kind):
    model, batch = network("perceptron")
    changed = planted(model, "layers.6", HalvedGradient)
    g = autocast(changed) if kind == "bfloat16" else changed
    result = compare(model, g, batch, model=(model, changed))
    assert result.forward is None
    assert result.backward.module == "layers.5 (ReLU)" and result.backward.phase == "backward"
    assert result.backward.difference == pytest.approx(0.5, rel=0.15)


def test_the_gradient_of_parameters_is_compared():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    changed = copy.deepcopy(model)
    changed[0].weight.register_hook(lambda gradient: gradient * 1.01)
    result = compare(model, changed, torch.randn(16, 8))
    assert result.forward is None and result.backward.module == "0 (Linear)"
    assert result.backward.phase == "parameters" and result.backward.difference == pytest.approx(0.01, rel=0.3)


def test_nan_that_only_one_run_has_is_a_difference():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    changed = copy.deepcopy(model)
    changed[2].bias.data[:] = torch.nan
    result = compare(model, changed, torch.randn(16, 8))
    assert result.forward.module == "2 (Linear)" and result.forward.difference == float("inf")
    assert "none in a, 16 NaN in b" in str(result)
    assert compare(changed, changed, torch.randn(16, 8)).equal  # as many in both


def test_a_single_large_number_counts():
    class Clip(nn.Module):
        def __init__(self, most):
            super().__init__()
            self.most = most

        def forward(self, x):
            return x.clamp(max=self.most)

    x = torch.randn(100_000)
    x[7] = 5.0
    result = compare(Clip(5.0), Clip(4.99), x)
    assert result.forward.difference == pytest.approx(0.002, rel=0.01)  # 1e-4 of its length


def test_slack_is_a_factor():
    model, batch = network("transformer")
    assert not compare(model, autocast(model), batch, model=model, slack=0.05).equal
    changed = planted(model, "blocks.1.drop", dropping)
    assert compare(model, autocast(changed), batch, model=(model, changed), slack=20).equal
