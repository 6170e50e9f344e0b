"""A rewrite must accept operands of all the shapes that the replaced code accepts, without a warning."""

import warnings

import pytest
import torch

import safeops
from safeops_lint.check import fix_source, lint_source
from safeops_lint.rules import RULES
from tests.lint.programs import EVERY, program


@pytest.mark.parametrize("hidden", ["hidden", "hidden == 1", "hidden[0]", "~hidden", "(scores > 0) | hidden"])
def test_a_softmax_whose_mask_may_be_larger_is_left_alone(hidden):
    """--fix must not write masked_softmax where a mask may be larger than the scores: torch's masked_fill broadcasts
    them, masked_softmax refuses the mask."""
    fills = ["scores.masked_fill({}, -math.inf).softmax(-1)", "F.log_softmax(scores.masked_fill({}, -math.inf), -1)"]
    for fill in fills:
        source = program("scores, hidden", f"return {fill.format(hidden)}")
        assert fix_source(source, rules=EVERY) == (source, 0)
        assert "SO207" in {f.code for f in lint_source(source)}
    scores, larger = torch.randn(4, 4), torch.rand(2, 1, 4, 4) > 0.5
    assert scores.masked_fill(larger, -torch.inf).softmax(-1).shape == (2, 1, 4, 4)
    with pytest.raises(ValueError, match="does not broadcast"):
        safeops.masked_softmax(scores, ~larger)


# differences whose operands broadcast: mse_loss would warn, torch's arithmetic does not
BROADCAST = [
    "a[:, :1] - b",
    "a[:, None] - b",
    "a.unsqueeze(1) - b",
    "a - b.mean(1, keepdim=True)",
    "a - b.mean()",
    "a.view(-1, 1) - b.reshape(1, -1)",
    "a.squeeze() - b",
    "a.expand(2, 3, 4, 5) - b",
    "2 * a[0].abs() - b",
    "a - torch.tensor(0.5, dtype=a.dtype)",
    "(a * b[:1])[:2] - b",
]
ALIKE = ["a - b", "a[:, :1] - b[:, :1]", "a[1:] - a[:-1]", "a.mean(1) - b.sum(1)", "(a - a.mean(1, keepdim=True)) - b"]
ALIKE += ["a.view(-1) - b.view(-1)", "a.detach() - b.contiguous()", "a.exp() * 2 - torch.zeros_like(b)", "a[0] - b[1]"]
ALIKE += ["b.expand_as(a) - a", "a.unsqueeze(1) - b.unsqueeze(1)", "a[1:, 1:-1] - b[:-1, :-2]"]


def evaluated(source, *inputs):
    scope = {}
    exec(source, scope)
    return scope["loss"](*inputs)


def error_loss(difference, named):
    left, _, right = difference.rpartition(" - ")
    names = f"p = {left}\nt = {right}\n" if named else ""
    return program("a, b", f"{names}return (({'p - t' if named else difference}) ** 2).mean()")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("difference", BROADCAST)
def test_an_error_of_what_has_visibly_two_shapes_is_left_alone(difference, named):
    source = error_loss(difference, named)
    assert fix_source(source, rules=[RULES["SO201"]]) == (source, 0)
    assert [f.code for f in lint_source(source, rules=[RULES["SO201"]])] == ["SO201"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("difference", ALIKE)
def test_an_error_of_one_shape_is_rewritten_without_a_warning(difference, named):
    source, inputs = error_loss(difference, named), [torch.rand(4, 5), torch.rand(4, 5)]
    new, _ = fix_source(source, rules=[RULES["SO201"]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(evaluated(new, *inputs), evaluated(source, *inputs))
    assert "safeops.mse_loss(" in new
