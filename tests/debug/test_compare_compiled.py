"""compare looks into compiled functions, names what only compiled code does wrong, and leaves their code as it was."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from safeops.debug import compare
from tests.debug.compared import NETWORKS, TF32, autocast, dropping, network, planted, transposed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_modules_inside_are_seen_and_the_graph_stays_whole():
    model, batch = network("transformer")
    result = compare(model, torch.compile(model, backend="aot_eager", fullgraph=True), batch)
    eager = compare(model, model, batch)
    assert result.equal and not (result.only_a or result.only_b)
    assert [(d.phase, d.module) for d in result.differences] == [(d.phase, d.module) for d in eager.differences]


@pytest.mark.parametrize("how", ["blocks", "module", "function"])
@pytest.mark.parametrize("change", [transposed, TF32])
def test_a_planted_difference_is_named_however_it_is_compiled(how, change):
    model, batch = network("transformer")
    changed = planted(model, "blocks.1.square", change)
    g = changed
    if how == "blocks":  # the three blocks share their code
        for block in changed.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    elif how == "module":
        changed.compile(backend="aot_eager")
    else:
        g = torch.compile(lambda batch: changed(batch), backend="aot_eager")
    result = compare(model, g, batch, model=(model, changed))
    assert result.forward.module.startswith("blocks.1.square (")


def test_the_code_from_before_is_used_again():
    model, batch = network("perceptron")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    fast = torch.compile(model, backend=backend)
    fast(batch)
    assert len(graphs) == 1
    assert compare(model, fast, batch).equal and len(graphs) == 3  # the network, and the hook of its outermost module
    assert ["probe" in graph.code for graph in graphs] == [False, True, True]
    fast(batch)
    assert len(graphs) == 3
    assert compare(model, fast, batch).equal and len(graphs) == 3  # the code with sketches inside serves again, too


def test_checkpointing_inside_compiled_code_is_no_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
            return x.square().mean()

    model = Net()
    result = compare(model, torch.compile(model, backend="aot_eager"), torch.randn(16, 8))
    assert result.equal and {d.call for d in result.differences} == {0}
    assert len([d for d in result.differences if d.phase == "backward"]) == 4


def wrong_backend(module_code):
    """A compiler that makes a mistake: it computes gelu's other approximation."""

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch._C._nn.gelu and module_code(graph):
                node.kwargs = {**node.kwargs, "approximate": "tanh"}
        graph.recompile()
        return graph

    return backend


def test_what_only_the_compiler_does_wrong_is_named():
    model, batch = network("transformer")
    result = compare(model, torch.compile(model, backend=wrong_backend(lambda graph: True)), batch)
    assert result.forward.module == "blocks.0.down (Linear)"  # gelu is a function, and this its first reader


def test_what_goes_wrong_only_without_sketches_inside_is_named_at_the_compiled_module():
    def fused(graph):  # a fusion that the sketches prevent
        return not any("probe" in str(node.target) for node in graph.graph.nodes)

    model, batch = network("transformer")
    model.blocks[1] = torch.compile(model.blocks[1], backend=wrong_backend(fused))
    eager = copy.deepcopy(model)
    eager.blocks[1] = eager.blocks[1]._orig_mod
    result = compare(eager, model, batch)
    assert result.forward.module == "blocks.1 (Block)" and "as it was compiled" in result.notes[0]


def test_dropout_draws_the_same_numbers():
    model, batch = network("transformer")
    model.train()
    result = compare(model, torch.compile(model, backend="aot_eager"), batch)
    assert result.equal and "draws random numbers" in result.notes[0]


def test_deterministic_algorithms_stay_on():
    model, batch = network("perceptron")
    with contextlib.ExitStack() as stack:
        torch.use_deterministic_algorithms(True)
        stack.callback(torch.use_deterministic_algorithms, False)
        fast = torch.compile(model, backend="aot_eager")
        fast(batch)
        result = compare(model, fast, batch)
        assert result.equal and not result.only_a and torch.are_deterministic_algorithms_enabled()


# ---- Inductor


@pytest.mark.parametrize("name", ["perceptron", pytest.param("convolutions", marks=pytest.mark.exhaustive),
                                  pytest.param("transformer", marks=pytest.mark.exhaustive)])  # fmt: skip
def test_inductor_agrees_with_eager_ten_times_of_ten(name):
    fast = None
    for seed in range(10):
        model, batch = network(name, seed)
        if fast is None:
            under, fast = model, torch.compile(model)
        under.load_state_dict(model.state_dict())
        result = compare(model, fast, batch)
        assert result.equal and result.largest_ratio < 0.5, result


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NETWORKS)
def test_inductor_in_bfloat16_agrees_with_eager_float32_and_bfloat16(name):
    model, batch = network(name)
    fast = torch.compile(autocast(model))
    assert compare(autocast(model), fast, batch, model=model).equal
    result = compare(model, fast, batch, model=model)
    assert result.equal and result.largest_ratio < 0.75
    changed = planted(model, {"convolutions": "drop", "perceptron": "drop"}.get(name, "blocks.1.drop"), dropping)
    result = compare(model, torch.compile(autocast(changed)), batch, model=(model, changed))
    assert result.forward.module.endswith("drop (Dropout)")
