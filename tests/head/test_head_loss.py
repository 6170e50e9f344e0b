"""head_loss: values, operands, memory and random numbers. Its gradients are in test_head_gradients.py."""

import weakref

import pytest
import torch
from torch import nn

import safeops
from safeops.core.private_torch import TorchDispatchMode, tree_leaves
from tests.head.heads import HEADS, Capped, LoRA

D, C, ROWS = 8, 24, 40
OF_LOGITS = {
    "cross_entropy": safeops.cross_entropy,
    "token_log_probs": safeops.token_log_probs,
    "kl_div": safeops.kl_div_with_logits,
    "reverse_kl_div": safeops.reverse_kl_div_with_logits,
    "js_div": safeops.js_div_with_logits,
    "tv": safeops.tv_with_logits,
}
OF_LAYER = {
    "cross_entropy": safeops.linear_cross_entropy,
    "token_log_probs": safeops.linear_token_log_probs,
    "kl_div": safeops.linear_kl_div,
    "tv": safeops.linear_tv,
}


def operands(loss="cross_entropy", *shape, dtype=torch.float32):
    shape = shape or (ROWS,)
    hidden = torch.randn(*shape, D, dtype=dtype)
    indices = loss in ("cross_entropy", "token_log_probs")
    return hidden, torch.randint(C, shape) if indices else torch.randn(*shape, C, dtype=dtype)


def parts(result):
    return result if isinstance(result, tuple) else (result,)


MASK = torch.arange(ROWS) % 3 > 0
KEPT = (torch.rand(ROWS, C) < 0.7) | (torch.arange(C) == 5)
SAMPLER = {"support": torch.rand(ROWS, C), "support_threshold": torch.rand(ROWS) / 2}
OPTIONS = {
    "cross_entropy": [
        {"weight": torch.rand(C), "label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0, "temperature": 0.7},
        {"mask": MASK, "denominator": 17},
        {"row_weight": torch.rand(ROWS) * MASK, "reduction": "sum", "ignore_index": 3},
        {"row_weight": torch.rand(ROWS), "weight": torch.rand(C), "z_loss": 0.1},
        {"reduction": "none", "mask": MASK},
        {"support": KEPT, "outside": "mask", "weight": torch.rand(C), "label_smoothing": 0.1, "z_loss": 0.1},
        {**SAMPLER, "outside": "mask", "row_weight": torch.rand(ROWS), "reduction": "none"},
    ],
    "token_log_probs": [
        {"mask": MASK, "temperature": 0.5},
        {"with_argmax": True, "softcap": 3.0, "ignore_index": 1},
        {"support": KEPT, "outside": "mask", "mask": MASK},
        {**SAMPLER, "outside": "mask"},
    ],
    "kl_div": [{"mask": MASK, "temperature": 2.0}, {"weight": torch.rand(ROWS), "reduction": "none"}],
    "reverse_kl_div": [{"weight": torch.rand(ROWS)}, {"support": KEPT, "mask": MASK}],
    "js_div": [{"beta": 0.25, "reduction": "sum"}, SAMPLER],
    "tv": [{"denominator": torch.tensor(12.0)}],
}
CALLS = [(loss, options) for loss, several in OPTIONS.items() for options in ({}, *several)]


@pytest.mark.parametrize("loss, options", CALLS, ids=[f"{loss} {' '.join(options)}" for loss, options in CALLS])
def test_the_value_is_that_of_all_logits(loss, options):
    head, (hidden, target) = LoRA(D, C), operands(loss)
    results = safeops.head_loss(head, hidden, target, loss=loss, **options)
    expected = OF_LOGITS[loss](head(hidden), target, **options)
    assert type(results) is type(expected)
    for x, y in zip(parts(results), parts(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("loss", OF_LOGITS)
@pytest.mark.parametrize("shape", [(), (1,), (4, 10), (2, 0)], ids=str)
def test_rows_of_any_shape(loss, shape):
    head, hidden = HEADS["two layers"](D, C), torch.randn(*shape, D)
    target = torch.randint(C, shape) if loss in ("cross_entropy", "token_log_probs") else torch.randn(*shape, C)
    results = parts(safeops.head_loss(head, hidden, target, loss=loss, **NONE.get(loss, {})))
    target = target.reshape(-1, *target.shape[len(shape) :])
    expected = parts(OF_LOGITS[loss](head(hidden.reshape(-1, D)), target, **NONE.get(loss, {})))
    for x, y in zip(results, expected, strict=True):
        assert x.shape == shape
        torch.testing.assert_close(x.flatten(), y, rtol=2e-6, atol=2e-6)


NONE = dict.fromkeys(set(OF_LOGITS) - {"token_log_probs"}, {"reduction": "none"})


def test_class_probabilities():
    head, hidden = LoRA(D, C), torch.randn(4, 10, D)
    target = torch.rand(4, 10, C).softmax(-1)
    mask = torch.rand(4, 10) > 0.3
    expected = safeops.cross_entropy(head(hidden).transpose(1, 2), target.transpose(1, 2), mask=mask)
    torch.testing.assert_close(safeops.head_loss(head, hidden, target, mask=mask), expected)


def test_a_teacher_of_hidden_states():
    """The teacher's logits come from a weight, from a module, or from its best classes."""
    head, hidden, states = LoRA(D, C), torch.randn(ROWS, D), torch.randn(ROWS, 6)
    states[1] = torch.nan
    teacher, mask = nn.Linear(6, C), torch.arange(ROWS) != 1
    expected = safeops.kl_div_with_logits(head(hidden), teacher(states).detach(), mask=mask)
    weights = {"target_weight": teacher.weight.detach(), "target_bias": teacher.bias.detach()}
    for options in (weights, {"target_head": teacher}):
        result = safeops.head_loss(head, hidden, states, loss="kl_div", mask=mask, **options)
        torch.testing.assert_close(result, expected)
        result.backward()
        assert teacher.weight.grad is None and all(p.grad.isfinite().all() for p in head.b.parameters())
    values, indices = teacher(torch.randn(ROWS, 6)).detach().log_softmax(-1).topk(5)
    best = {"target_values": values, "target_indices": indices}
    expected = safeops.kl_div_with_logits(head(hidden), **best)
    torch.testing.assert_close(safeops.head_loss(head, hidden, None, loss="kl_div", **best), expected)


@pytest.mark.parametrize("loss", OF_LAYER)
@pytest.mark.parametrize("case", ["bias", "no bias", "frozen", "bf16", "tied"])
def test_a_plain_layer_takes_the_linear_function(loss, case):
    """Bits, and the name of the node, must be those of the function of a linear layer."""
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    head, (hidden, target) = nn.Linear(D, C, bias=case != "no bias").to(dtype), operands(loss, 4, 10, dtype=dtype)
    if case == "tied":
        head.weight = nn.Embedding(C, D).weight
    head.requires_grad_(case != "frozen")
    hidden.requires_grad_()
    extra = {} if loss in ("cross_entropy", "token_log_probs") else {"target_weight": None}
    results = parts(safeops.head_loss(head, hidden, target, loss=loss))
    expected = parts(OF_LAYER[loss](hidden, head.weight, target=target, linear_bias=head.bias, **extra))
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    for got, want in ((results, expected), *[[torch.autograd.grad(sum(x.sum() for x in results), inputs) for results in
                                              (results, expected)]]):  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_best_classes_of_a_teacher(tail):
    """A plain layer has the bits of the function of a linear layer; a head in chunks the value of all logits."""
    hidden, layer, head = torch.randn(4, 10, D).bfloat16(), nn.Linear(D, C).bfloat16(), LoRA(D, C)
    values, indices = torch.randn(4, 10, C).log_softmax(-1).topk(5)
    options = {"target_values": values, "target_indices": indices, "tail": tail, "temperature": 2.0}
    wide = {"logits_dtype": torch.float32, **options}
    expected = safeops.linear_kl_div(hidden, layer.weight, linear_bias=layer.bias, **wide)
    assert torch.equal(safeops.head_loss(layer, hidden, None, loss="kl_div", **wide), expected)
    result = safeops.head_loss(head, hidden.float(), loss="kl_div", **options)
    torch.testing.assert_close(result, safeops.kl_div_with_logits(head(hidden.float()), **options))


@pytest.mark.parametrize("change", ["hook", "forward", "subclass", "parametrization", "global hook"])
def test_a_layer_that_is_more_is_not_plain(change):
    head, (hidden, target) = nn.Linear(D, C), operands()
    if change == "hook":
        head.register_forward_hook(lambda module, args, output: output * 3)
    elif change == "forward":
        head.forward = lambda hidden: hidden @ head.weight.T * 3
    elif change == "subclass":
        head.__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: nn.Linear.forward(self, x) * 3})
    elif change == "parametrization":
        head = nn.utils.parametrizations.weight_norm(head)
        head.parametrizations.weight.original0.data *= 3
    handle = change == "global hook" and nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 3)
    try:
        expected = safeops.cross_entropy(head(hidden), target)
        torch.testing.assert_close(safeops.head_loss(head, hidden, target), expected)
    finally:
        handle and handle.remove()


def test_masked_rows_do_not_exist():
    """Their NaN must reach neither the loss nor a gradient, also of a head that divides by the norm of a row."""
    hidden, target = operands()
    weight = torch.randn(C, D, requires_grad=True)

    def head(hidden):
        return hidden / hidden.norm(dim=-1, keepdim=True) @ weight.T

    expected = torch.autograd.grad(safeops.cross_entropy(head(hidden[MASK]), target[MASK]), weight)[0]
    hidden[~MASK] = torch.nan
    hidden.requires_grad_()
    for reduction in ("mean", "none"):
        loss = safeops.head_loss(head, hidden, target, mask=MASK, reduction=reduction)
        upstream = torch.tensor(1.0) if reduction == "mean" else torch.where(MASK, 1 / MASK.sum(), torch.nan)
        d_hidden, d_weight = torch.autograd.grad(loss, [hidden, weight], upstream)
        torch.testing.assert_close(d_weight, expected)
        assert (d_hidden[~MASK] == 0).all() and d_hidden.isfinite().all()
    loss = safeops.head_loss(head, hidden, target.fill_(-100))
    assert loss == 0 and all((d == 0).all() for d in torch.autograd.grad(loss, [hidden, weight]))


class Alive(TorchDispatchMode):
    """Counts how many tensors of a chunk of logits exist at once, views of the same memory as one."""

    def __init__(self):
        super().__init__()
        self.results, self.most = [], 0

    def count(self):
        self.results = [x for x in self.results if x() is not None]
        return len({x().untyped_storage().data_ptr() for x in self.results})

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.shape in ((7, C), (5, C))]
        self.results += map(weakref.ref, tensors)
        self.most = max(self.most, self.count())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_chunks_of_logits_exist_at_most(reduction):
    head, (hidden, target) = nn.Sequential(nn.Linear(D, C)), operands()
    with Alive() as alive:
        loss = safeops.head_loss(head, hidden.requires_grad_(), target, reduction=reduction).sum()
        assert alive.count() == 0 and alive.most == (2 if reduction == "mean" else 1)
        loss.backward()
    assert alive.most == 2


def test_random_numbers():
    """Backward must see the forward's dropout, and leave the generator as it was. A single dropout has the numbers of
    the whole, if the CPU's generator draws them one by one."""
    head, (hidden, target) = LoRA(D, C, dropout=0.5), operands()
    inputs = [hidden.requires_grad_(), head.a.weight, head.b.weight]
    results = []
    for reduction in ("sum", "none"):  # gradients with the loss, and by running the head again
        torch.manual_seed(3)
        loss = safeops.head_loss(head, hidden, target, reduction=reduction)
        state = torch.get_rng_state()
        torch.manual_seed(4)
        other = torch.get_rng_state()
        results.append((loss.sum().detach(), state, *torch.autograd.grad(loss.sum(), inputs)))
        assert torch.equal(torch.get_rng_state(), other)
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
    torch.manual_seed(3)
    ones = torch.ones(ROWS, D)
    whole = nn.functional.dropout(ones)
    torch.manual_seed(3)
    if torch.equal(torch.cat([nn.functional.dropout(x) for x in ones.split(7)]), whole):
        torch.manual_seed(3)
        torch.testing.assert_close(safeops.cross_entropy(head(hidden), target, reduction="sum"), results[0][0])
        assert torch.equal(torch.get_rng_state(), results[0][1])


def test_check():
    """check=True must refuse heads that mix rows, and leave others, their buffers and the generator as they were."""
    hidden, target = operands()
    mixing = {
        "batch norm": nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, C)),
        "mean": lambda hidden: hidden @ torch.ones(D, C) - hidden.mean(),
    }
    for head in mixing.values():
        with pytest.raises(ValueError, match="^head_loss: head mixes rows, so that it cannot run in chunks"):
            safeops.head_loss(head, hidden, target, check=True)
    assert mixing["batch norm"][0].num_batches_tracked == 0
    mixing["batch norm"].eval()
    for dtype in (torch.float32, torch.bfloat16):
        for head in (mixing["batch norm"].to(dtype), LoRA(D, C, dropout=0.5).to(dtype), Capped(D, C).to(dtype)):
            state = torch.get_rng_state()
            safeops.head_loss(head, hidden.to(dtype), target, check=True)
            torch.set_rng_state(state)
