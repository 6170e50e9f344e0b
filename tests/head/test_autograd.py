"""head_loss in autograd: hooks, second derivatives, writes before backward, transforms, torch.compile."""

import pytest
import torch
from torch.func import functional_call

from safeops.core.private_torch import counting_backend
from tests.head.heads import HEADS
from tests.head.steps import ROWS, STEPS, TARGET, C, D, InChunks, Whole, close, gradients


@pytest.mark.parametrize("step", STEPS)
def test_hooks_of_parameters_get_the_whole_gradient(step):
    head, hidden = HEADS["two layers"](D, C).double(), torch.randn(ROWS, D, dtype=torch.float64)
    seen = []
    head[0].weight.register_hook(lambda d: seen.append(d.clone()) or d * 2)
    head[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    both = []
    for losses in (InChunks(), Whole()):
        both.append(gradients(losses, STEPS[step], head, hidden))
    assert len(seen) == 4
    close(*both, 1e-13)
    close(sorted(seen[:2], key=lambda x: x.numel()), sorted(seen[2:], key=lambda x: x.numel()), 1e-13)


@pytest.mark.parametrize("step", STEPS)
def test_second_derivatives(step):
    head, hidden = HEADS["two layers"](D, C).double(), torch.randn(ROWS, D, dtype=torch.float64, requires_grad=True)
    leaves, results = [hidden, *head.parameters()], []
    for losses in (InChunks(), Whole()):
        first = torch.autograd.grad(STEPS[step](losses, head, hidden.tanh()).exp(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(d.square().sum() for d in first), leaves[:-1]))
    close(*results, 1e-11)
    tied = HEADS["tied"](D, C).double()
    loss = STEPS[step](InChunks(), tied, tied.embedding(TARGET))
    with pytest.raises(RuntimeError, match="^head_loss: no second derivative where hidden"):
        torch.autograd.grad(loss, tied.embedding.weight, create_graph=True)


def test_an_input_of_the_graph_that_was_written():
    """Parameters and hidden states must not be written before backward, as in torch."""
    for step in STEPS.values():
        for which in ("parameter", "hidden"):
            head, hidden = HEADS["two layers"](D, C), torch.randn(ROWS, D, requires_grad=True) * 1
            loss = step(InChunks(), head, hidden)
            with torch.no_grad():
                (head[0].weight if which == "parameter" else hidden).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_backward_twice():
    head, hidden = HEADS["lora"](D, C), torch.randn(ROWS, D, requires_grad=True)
    for step in STEPS.values():
        loss, leaves = step(InChunks(), head, hidden), [hidden, head.a.weight, head.b.weight]
        first = torch.autograd.grad(loss, leaves, torch.tensor(2.0), retain_graph=True)
        close(torch.autograd.grad(loss, leaves, torch.tensor(2.0)), first, 1e-12)


@pytest.mark.parametrize("step", STEPS)
def test_transforms(step):
    """torch.func.grad, vmap and jvp compute all logits at once."""
    head, hidden = HEADS["two layers"](D, C).double(), torch.randn(ROWS, D, dtype=torch.float64)
    parameters, results = dict(head.named_parameters()), []

    def loss(losses, parameters):
        return STEPS[step](losses, lambda hidden: functional_call(head, parameters, (hidden,)), hidden)

    for losses in (InChunks(), Whole()):
        d = torch.func.grad(lambda p: loss(losses, p))(parameters)  # noqa: B023
        _, tangent = torch.func.jvp(lambda p: loss(losses, p), (parameters,), (parameters,))  # noqa: B023
        results.append([tangent.detach(), *(x.detach() for x in d.values())])
    close(*results, 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["lora", "int8", "softcap", "tied", "linear"])
def test_compiled(name, step):
    """A compiled call must be one graph; a compiled head must be the same head."""
    head, hidden = HEADS[name](D, C).double(), torch.randn(ROWS, D, dtype=torch.float64)
    expected = gradients(Whole(), STEPS[step], head, hidden)
    torch.compiler.reset()
    counter = counting_backend("aot_eager")
    whole = torch.compile(lambda hidden: STEPS[step](InChunks(), head, hidden), backend=counter, fullgraph=True)
    close(gradients(None, lambda losses, head, hidden: whole(hidden), head, hidden), expected, 1e-12)
    assert counter.frame_count == 1
    compiled = torch.compile(head, backend="aot_eager")
    close(gradients(InChunks(), STEPS[step], compiled, hidden), expected, 1e-12)
