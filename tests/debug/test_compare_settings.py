"""compare sees names, calls, structures and checkpointing, puts all back, and refuses what it cannot run."""

import collections
import copy
import dataclasses
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from safeops.debug import compare
from tests.debug.compared import network, planted, transposed


class Checkpointed(nn.Module):
    """Calls one layer three times, in segments that `how` runs."""

    def __init__(self, how):
        super().__init__()
        self.first, self.layer, self.drop, self.how = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.2), how

    def segment(self, x):
        return self.drop(self.layer(x).tanh())

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.how(self.segment, x)
        return x.square().mean()


def plainly(function, x):
    return function(x)


def non_reentrant(function, x):
    return checkpoint(function, x, use_reentrant=False)


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def both_calls_in_one(function, x):
    return checkpoint(lambda x: function(function(x)), x, use_reentrant=True)


def twice(function, x):
    return function(function(x))


@pytest.mark.parametrize("f, g", [(plainly, non_reentrant), (plainly, reentrant), (twice, both_calls_in_one)])
def test_a_recomputation_is_no_call(f, g):
    model = Checkpointed(f)
    other = copy.deepcopy(model)
    other.how = g
    result = compare(model, other, torch.randn(16, 8))
    assert result.equal and result.largest_ratio < 1e-3 and not (result.only_a or result.only_b or result.shapes)
    seen = collections.Counter((d.phase, d.module) for d in result.differences)
    calls = 6 if f is twice else 3
    assert seen["forward", "layer (Linear)"] == seen["backward", "layer (Linear)"] == calls
    other.layer.weight.data[0] *= 1.1
    result = compare(model, other, torch.randn(16, 8))
    assert (result.forward.module, result.forward.call) == ("layer (Linear)", 0)


def test_the_call_is_named():
    class Thrice(nn.Module):
        def __init__(self, wrong):
            super().__init__()
            self.layer, self.wrong = nn.Linear(8, 8), wrong

        def forward(self, x):
            for i in range(3):
                x = self.layer(x + (i == self.wrong))
            return x

    model = Thrice(None)
    other = Thrice(1)
    other.load_state_dict(model.state_dict())
    result = compare(model, other, torch.randn(16, 8))
    assert (result.forward.module, result.forward.call) == ("layer (Linear)", 1)
    assert "call        2 of this module" in str(result)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    rest: list


Pair = collections.namedtuple("Pair", "left right")


class Structured(nn.Module):
    def __init__(self, kind, wrong=0.0):
        super().__init__()
        self.layer, self.kind, self.wrong = nn.Linear(4, 4), kind, wrong

    def forward(self, x):
        x = self.layer(x)
        y = x * 2 + self.wrong
        return {
            "tuple": (x, y), "list": [x, [y]], "dict": {"a": x, "b": {"c": y}}, "pair": Pair(x, y),
            "dataclass": Output(x, [y, None, "text"]),
        }[self.kind]  # fmt: skip


@pytest.mark.parametrize("kind, path", [
    ("tuple", "[1]"), ("list", "[1][0]"), ("dict", "['b']['c']"), ("pair", ".right"), ("dataclass", ".rest[0]"),
])  # fmt: skip
def test_structures_are_opened(kind, path):
    f, g = Structured(kind), Structured(kind, wrong=0.01)
    g.load_state_dict(f.state_dict())
    result = compare(f, g, torch.randn(5, 4))
    assert (result.forward.module, result.forward.path) == ("Structured", path)
    assert {d.phase for d in result.differences} == {"forward", "backward", "parameters"}


def test_shared_modules_and_tensors_that_are_passed_on():
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Identity(), nn.ReLU(inplace=True), shared, nn.Dropout(0.0))
    result = compare(model, copy.deepcopy(model), torch.randn(3, 6))
    assert result.equal
    backward = [d.module for d in result.differences if d.phase == "backward"]
    assert backward.count("0 (Linear)") == 2 and "1 (Identity)" not in backward


def test_modules_of_one_run_are_listed():
    model, batch = network("perceptron")
    other = copy.deepcopy(model)
    other.layers[1] = nn.Sequential(nn.ReLU(), nn.Identity())
    other.layers[3] = nn.Identity()
    model.layers[3] = nn.Sequential(nn.Identity())
    result = compare(model, other, batch)
    assert result.equal and result.only_b == ["layers.1.0 (ReLU)", "layers.1.1 (Identity)"]
    assert result.only_a == ["layers.3.0 (Identity)"] and "only in a: layers.3.0 (Identity)" in str(result)


def test_other_shapes_are_listed():
    f, g = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, n), nn.Flatten(0)) for n in (3, 5))
    g[0].load_state_dict(f[0].state_dict())
    result = compare(f, g, torch.ones(2, 4))
    assert ("1 (Linear), forward", (2, 3), (2, 5)) in result.shapes
    assert "other shapes, not compared: 1 (Linear), forward: (2, 3) and (2, 5)" in str(result)


# ---- what it leaves as it was


def test_all_is_put_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
    model(torch.randn(3, 4)).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    values = [x.clone() for x in (*model.state_dict().values(), *gradients)]
    versions = [p._version for p in model.parameters()]
    batch, hooks = torch.randn(3, 4), [dict(m._forward_hooks) for m in model.modules()]

    def step(batch):
        batch.mul_(2)
        random.random(), numpy.random.rand()
        with torch.no_grad():
            model[0].weight += 1
        return model(batch)

    kept, expected = batch.clone(), [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()]
    result = compare(step, step, batch, model=model)
    assert result.equal and result.largest_ratio == 0  # both drew the same, and had the same weights
    for x, value in zip((*model.state_dict().values(), *gradients), values):
        assert torch.equal(x, value)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients))
    assert torch.equal(batch, kept) and [dict(m._forward_hooks) for m in model.modules()] == hooks
    assert random.getstate() == expected[0] and numpy.random.get_state()[1].tolist() == expected[1]
    assert torch.equal(torch.get_rng_state(), expected[2])
    assert [p._version for p in model.parameters()][1:] == versions[1:]  # what did not change is not written
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_all_is_put_back_after_an_exception():
    model = nn.Linear(2, 2)

    def step(batch):
        model.weight.data.zero_()
        raise KeyError("mine")

    weight = model.weight.clone()
    with pytest.raises(KeyError, match="mine"):
        compare(step, model, torch.ones(1, 2), model=model)
    assert torch.equal(model.weight, weight) and not model._forward_hooks


def test_without_gradients_only_the_forward_pass_is_compared():
    model = nn.Linear(2, 2)
    result = compare(torch.no_grad()(lambda x: model(x)), model, torch.ones(1, 2), model=model)
    assert "backward: nothing to compare" in str(result)
    assert result.notes == ["f returned nothing that requires a gradient"]


# ---- bad calls


def backward_inside(batch):
    MODEL(batch).sum().backward()


def update_inside(batch):
    torch.optim.SGD(MODEL.parameters(), 0.1).step()


MODEL = nn.Linear(2, 2)
BAD = [
    (lambda: compare(3, MODEL, 0), TypeError, "f must be callable, got int"),
    (lambda: compare(MODEL, lambda x: x, 0), TypeError, "g is a function: say which modules it calls, by model="),
    (lambda: compare(MODEL, MODEL, 0, model=[MODEL, 1]), TypeError, "model must be a torch.nn.Module, or two of them"),
    (lambda: compare(MODEL, MODEL, 0, slack=0), ValueError, "slack must be a positive number, got 0"),
    (lambda: compare(MODEL, MODEL, 0, html="/no/such/x.html"), FileNotFoundError, "html='/no/such/x.html': no such"),
    (lambda: compare(MODEL, backward_inside, torch.ones(2, 2), model=MODEL), ValueError, "g ran backward: return"),
    (lambda: compare(MODEL, update_inside, torch.ones(2, 2), model=MODEL), ValueError, "g ran an optimizer: return"),
    (lambda: compare(MODEL, lambda x: x, torch.ones(2, 2), model=MODEL), ValueError, "called no module of Linear"),
]


@pytest.mark.parametrize("call, error, words", BAD)
def test_bad_calls(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith("compare: ") and words in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_in_common():
    f, g = nn.Linear(2, 2), nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"nothing to compare: Linear, forward: \(1, 2\) and \(1, 3\)"):
        compare(f, g, torch.ones(1, 2))


def test_the_first_difference_is_not_hidden_by_a_later_one():
    model, batch = network("transformer")
    both = planted(planted(model, "blocks.0.square", transposed), "blocks.2.square", transposed)
    assert compare(model, both, batch).forward.module == "blocks.0.square (Linear)"
