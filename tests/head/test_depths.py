"""head_loss of several depths of hidden states: the sum of the losses of each depth, in one pass."""

import re

import pytest
import torch
from torch import nn

import safeops
from safeops.core.private_torch import TorchDispatchMode
from safeops.head import _chunks
from tests.head.heads import HEADS, Capped, LoRA

D, C = 8, 24
WEIGHTS = [1.0, 0.3, 0.1]
OF_LOGITS = {"cross_entropy": safeops.cross_entropy, "kl_div": safeops.kl_div_with_logits, "tv": safeops.tv_with_logits}


def example(loss="cross_entropy", dtype=torch.float64, seed=0):
    """Hidden states and targets of three depths, each shorter by a token; of the second half the rows are padding."""
    g = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(4, 10 - d, D, generator=g, dtype=torch.float64).to(dtype) for d in range(3)]
    if loss == "cross_entropy":
        target = [torch.randint(C, (4, 10 - d), generator=g) for d in range(3)]
        target[1][:2] = -100
    else:
        target = [torch.randn(4, 10 - d, C, generator=g, dtype=torch.float64).to(dtype) for d in range(3)]
    return hidden, target


def of_all_logits(head, hidden, target, loss="cross_entropy", depth_weight=WEIGHTS, **options):
    """The separate losses of each depth, from all logits."""
    losses = []
    for d, (x, y) in enumerate(zip(hidden, target)):
        own = {key: v[d] if isinstance(v, list) else v for key, v in options.items()}
        own = {key: v.flatten() if getattr(v, "dim", int)() == 2 else v for key, v in own.items()}
        losses.append(OF_LOGITS[loss](head(x.reshape(-1, D)), y.flatten(0, 1), **own))
    return sum(w * x for w, x in zip(depth_weight, losses)), torch.stack(losses)


def gradients(loss, hidden, head, *others):
    inputs = [*hidden, *(p for p in head.parameters() if p.requires_grad), *others]
    return torch.autograd.grad(loss, inputs)


def check(head, hidden, target, loss="cross_entropy", others=(), tolerance=1e-12, **options):
    hidden = [x.detach().requires_grad_() for x in hidden]
    weight = {"depth_weight": options.pop("depth_weight", WEIGHTS)}
    got = safeops.head_loss(head, hidden, target, loss=loss, **weight, **options)
    want, losses = of_all_logits(head, hidden, target, loss, **weight, **options)
    assert not got.depth_losses.requires_grad
    torch.testing.assert_close(got, type(got)(want, losses), rtol=tolerance, atol=tolerance)
    pair = (gradients(x, hidden, head, *others) for x in (got.loss, want))
    for x, y in zip(*pair, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    return got


@pytest.mark.parametrize("name", ["linear", "two layers", "LoRA", "capped"])
def test_the_sum_of_the_losses_of_each_depth(name):
    head = {"linear": nn.Linear, "LoRA": LoRA, "capped": Capped}.get(name, HEADS["two layers"])(D, C).double()
    hidden, target = example()
    keep = [torch.rand(4, 10 - d) > 0.3 for d in range(3)]
    check(head, hidden, target)
    check(head, hidden, target, depth_weight=None or [1.0] * 3, mask=keep)
    check(head, hidden, target, reduction="sum", label_smoothing=0.1)
    check(head, hidden, target, denominator=17, weight=torch.rand(C, dtype=torch.float64))
    check(head, hidden, target, denominator=[30, torch.tensor(15.0), 20], z_loss=0.1)
    check(head, hidden, target, row_weight=[torch.rand(4, 10 - d, dtype=torch.float64) for d in range(3)])


@pytest.mark.parametrize("loss", ["kl_div", "tv"])
def test_divergences(loss):
    head, (hidden, target) = HEADS["two layers"](D, C).double(), example(loss)
    check(head, hidden, target, loss, temperature=2.0, weight=[torch.rand(4, 10 - d).double() for d in range(3)])
    best = [y.log_softmax(-1).topk(3) for y in target]
    best = {"target_values": [x.values for x in best], "target_indices": [x.indices for x in best]}
    got = safeops.head_loss(head, hidden, None, loss=loss, **best)
    want = [
        OF_LOGITS[loss](head(x), target_values=v, target_indices=i)
        for x, v, i in zip(hidden, best["target_values"], best["target_indices"])
    ]
    torch.testing.assert_close(got.depth_losses, torch.stack(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_further_from_fp64_than_the_depths_one_by_one(dtype):
    head, (hidden, target) = nn.Sequential(nn.Linear(D, C)).to(dtype), example(dtype=dtype)
    hidden = [x.requires_grad_() for x in hidden]
    got = safeops.head_loss(head, hidden, target, depth_weight=WEIGHTS)
    apart = sum(w * safeops.head_loss(head, x, y) for w, x, y in zip(WEIGHTS, hidden, target))
    results = [[loss.detach(), *gradients(loss * 64, hidden, head)] for loss in (got.loss, apart)]
    wide, of_fp64 = nn.Sequential(nn.Linear(D, C)).double(), [x.detach().double().requires_grad_() for x in hidden]
    wide.load_state_dict({key: x.double() for key, x in head.state_dict().items()})
    truth, _ = of_all_logits(wide, of_fp64, target)
    truth = [truth.detach(), *gradients(truth * 64, of_fp64, wide)]
    eps = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    for x, y, z in zip(*results, truth):
        assert x.dtype == y.dtype
        errors = [float((t.double() - z).abs().max()) for t in (x, y)]
        assert errors[0] <= errors[1] + eps * float(z.abs().max()), errors


def test_a_count_of_its_own_for_each_depth():
    """torchtitan#4682: a depth whose targets are mostly padding is divided by its own count, or by the one given."""
    head, (hidden, target) = nn.Linear(D, C).double(), example()
    for y in target[1:]:
        y.view(-1)[:-3] = -100
    counts = [int((y != -100).sum()) for y in target]
    assert counts[1:] == [3, 3]
    own = safeops.head_loss(head, hidden, target)
    torch.testing.assert_close(own, safeops.head_loss(head, hidden, target, denominator=counts))
    one = safeops.head_loss(head, hidden, target, denominator=counts[0])
    torch.testing.assert_close(one.depth_losses[1], own.depth_losses[1] * 3 / counts[0])
    target[2].fill_(-100)
    empty = safeops.head_loss(head, [x.requires_grad_() for x in hidden], target)
    assert empty.depth_losses[2] == 0 and not torch.autograd.grad(empty.loss, hidden[2])[0].any()


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_weight_of_0_masks_a_depth_out(kind):
    head, (hidden, target) = nn.Sequential(nn.Linear(D, C)).double(), example()
    want, losses = of_all_logits(head, hidden, target, depth_weight=[1.0, 0.0, 0.5])
    hidden = [x.requires_grad_() for x in hidden[:1] + [torch.full_like(hidden[1], torch.nan)] + hidden[2:]]
    for mask in (None, torch.tensor(True)):
        got = safeops.head_loss(head, hidden, target, depth_weight=kind([1.0, 0.0, 0.5]), mask=mask)
        torch.testing.assert_close(got.loss, want)
        torch.testing.assert_close(got.depth_losses, losses * torch.tensor([1, 0, 1]))
        grads = gradients(got.loss, hidden, head)
        assert not grads[1].any() and all(d.isfinite().all() for d in grads)


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_all_weights_0(one_by_one, kind):
    """The loss is 0, and on the graph: backward gives gradients of 0."""
    head, (hidden, target) = nn.Linear(D, C).double(), example()
    hidden, options = [x.requires_grad_() for x in hidden], {"logits_dtype": torch.float64} if one_by_one else {}
    got = safeops.head_loss(head, hidden, target, depth_weight=kind([0.0, 0.0, 0.0]), **options)
    assert got.loss == 0 and not any(d.any() for d in gradients(got.loss, hidden, head))


def test_a_gradient_to_the_weights():
    head, (hidden, target) = nn.Sequential(nn.Linear(D, C)).double(), example()
    weight = torch.tensor(WEIGHTS, dtype=torch.float64, requires_grad=True)
    check(head, hidden, target, depth_weight=weight, others=[weight])


def test_a_weight_of_0_has_the_gradient_0_beside_a_loss_of_nothing():
    head, (hidden, target) = nn.Sequential(nn.Linear(D, C)).double(), example()
    hidden, weight = [x.requires_grad_() for x in hidden], torch.tensor([0.0, 1.0, 0.5], requires_grad=True)
    got = safeops.head_loss(head, hidden, target, depth_weight=weight, empty="nan")
    assert got.depth_losses[0].isnan() and got.loss.isfinite()
    *grads, d_weight = gradients(got.loss, hidden, head, weight)
    assert d_weight[0] == 0 and (d_weight[1:] > 0).all() and all(d.isfinite().all() for d in grads)


def test_second_derivatives():
    head, (hidden, target) = nn.Sequential(nn.Linear(D, C), nn.Tanh()).double(), example()
    hidden = [x.requires_grad_() for x in hidden]
    losses = safeops.head_loss(head, hidden, target, depth_weight=WEIGHTS), of_all_logits(head, hidden, target)
    results = []
    for loss, _ in losses:
        first = torch.autograd.grad(loss, hidden, create_graph=True)
        results.append(gradients(sum(d.square().sum() for d in first), hidden, head))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", ["option of a layer", "gradient of an option", "transform"])
def test_one_by_one(case):
    """A call that the chunks do not take must be the sum of the depths' own calls."""
    head, (hidden, target) = nn.Linear(D, C).double(), example()
    if case == "option of a layer":
        got = safeops.head_loss(head, hidden, target, depth_weight=WEIGHTS, logits_dtype=torch.float64)
    elif case == "gradient of an option":
        weight = torch.rand(C, dtype=torch.float64, requires_grad=True)
        check(head, hidden, target, weight=weight, others=[weight])
        return
    else:
        d_hidden, got = torch.func.grad_and_value(lambda x: safeops.head_loss(head, [x, *hidden[1:]], target)[0])(
            hidden[0]
        )
        want = of_all_logits(head, hidden, target, depth_weight=[1.0] * 3)[0]
        torch.testing.assert_close(got, want)
        return
    torch.testing.assert_close(got.loss, of_all_logits(head, hidden, target)[0])


@pytest.mark.slow
def test_compiled_whole():
    head, (hidden, target) = nn.Linear(D, C), example(dtype=torch.float32)
    function = torch.compile(
        lambda *hidden: safeops.head_loss(head, hidden, target, depth_weight=WEIGHTS), fullgraph=True
    )
    got, want = function(*hidden), safeops.head_loss(head, hidden, target, depth_weight=WEIGHTS)
    torch.testing.assert_close(tuple(got), tuple(want))


def test_a_module():
    head, (hidden, target) = LoRA(D, C).double(), example()
    module = safeops.nn.HeadLoss(head, depth_weight=torch.tensor(WEIGHTS, dtype=torch.float64))
    torch.testing.assert_close(module(hidden, target), safeops.head_loss(head, hidden, target, depth_weight=WEIGHTS))
    assert "depth_weight" in module.state_dict()


class Largest(TorchDispatchMode):
    """The sizes of chunks of logits, and how many tensors of a weight's shape in fp32 are made."""

    def __init__(self):
        super().__init__()
        self.rows, self.sums = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == C and "mm" in op.name():
            self.rows.append(len(out))
        if op.name() == "aten::_to_copy" and out.shape == (C, D) and out.dtype == torch.float32:
            self.sums += 1
        return out


def test_chunks_of_all_depths_and_one_sum_of_the_gradients(monkeypatch):
    """Chunks go over the depths' ends; the gradient of the weight has one fp32 buffer."""
    monkeypatch.setattr(_chunks, "CHUNK", C * 30)
    head, (hidden, target) = nn.Linear(D, C, bias=False).bfloat16(), example(dtype=torch.bfloat16)
    with Largest() as seen:
        safeops.head_loss(head, hidden, target)
    assert seen.rows == [7, 26, 26, 26, 23] and seen.sums == 1, (seen.rows, seen.sums)


HIDDEN, TARGET = example()
LAYER = nn.Sequential(nn.Linear(D, C)).double()
BAD = [
    (([], []), {}, ValueError, "hidden must have a tensor for each depth, got none"),
    ((HIDDEN, TARGET[0]), {}, TypeError, "target must be a list or tuple of one a depth, as hidden is, got a tensor"),
    ((HIDDEN, TARGET[:2]), {}, ValueError, "target must have one a depth, 3 as hidden has, got 2"),
    (([HIDDEN[0], 1.0], TARGET[:2]), {}, TypeError, "hidden must be a tensor"),
    (
        ([HIDDEN[0], HIDDEN[1].float()], TARGET[:2]),
        {},
        ValueError,
        "one width, dtype and device, got torch.float64 (4,",
    ),
    (([HIDDEN[0], HIDDEN[1][..., :3]], TARGET[:2]), {}, ValueError, "one width, dtype and device"),
    ((HIDDEN, TARGET[::-1]), {}, ValueError, "target (4, 8) must have the shape of hidden's rows (4, 10) (of depth 0)"),
    ((HIDDEN, [*TARGET[:2], TARGET[2] + C]), {}, IndexError, "(of depth 2)"),
    ((HIDDEN, TARGET), {"mask": [None, None]}, ValueError, "mask must have one a depth, 3 as hidden has, got 2"),
    ((HIDDEN, TARGET), {"mask": [None, TARGET[1], None]}, TypeError, "mask must be a bool tensor"),
    ((HIDDEN, TARGET), {"denominator": [3, 2, "x"]}, TypeError, "(of depth 2)"),
    ((HIDDEN, TARGET), {"reduction": "none"}, ValueError, "reduction='none' has no sum over depths"),
    ((HIDDEN, TARGET), {"loss": "token_log_probs"}, ValueError, "loss='token_log_probs' has no sum over depths"),
    ((HIDDEN, TARGET), {"support": torch.ones(3) > 0}, ValueError, "support is for the hidden states of one depth"),
    ((HIDDEN, TARGET), {"depth_weight": 0.3}, TypeError, "depth_weight must be numbers or a tensor of one a depth"),
    (
        (HIDDEN, TARGET),
        {"depth_weight": [1.0]},
        ValueError,
        "depth_weight must have one a depth, 3 as hidden has, got 1",
    ),
    ((HIDDEN, TARGET), {"depth_weight": [1, 1, -1.0]}, ValueError, "depth_weight must be at least 0"),
    ((HIDDEN, TARGET), {"depth_weight": torch.ones(2)}, ValueError, "depth_weight (2,) must be (3,), one a depth"),
    ((HIDDEN, TARGET), {"depth_weight": torch.ones(3).long()}, TypeError, "depth_weight must be a floating"),
    ((HIDDEN, TARGET), {"depth_weight": torch.ones(3, device="meta")}, ValueError, "depth_weight is on meta"),
    ((HIDDEN[0], TARGET[0]), {"depth_weight": [1.0]}, TypeError, "depth_weight needs a list or tuple of hidden states"),
]


@pytest.mark.parametrize("args, options, error, words", BAD, ids=[words[:40] for *_, words in BAD])
def test_bad_calls(args, options, error, words):
    with pytest.raises(error, match="^head_loss: .*" + re.escape(words)):
        safeops.head_loss(LAYER, *args, **options)


@pytest.mark.parametrize("head", [nn.Linear(D, C).double(), Capped(D, C).double()])
def test_a_tensor_of_denominators_is_a_list(head):
    hidden, target = example()
    got, want = (
        safeops.head_loss(head, hidden, target, denominator=n) for n in (torch.tensor([9.0, 8, 7]), [9.0, 8, 7])
    )
    assert torch.equal(got.loss, want.loss) and torch.equal(got.depth_losses, want.depth_losses)


def test_a_negative_weight_in_a_tensor_raises():
    hidden, target = example()
    with pytest.raises(ValueError, match=r"^head_loss: depth_weight must be at least 0, got \[1.0, -1.0, 0.0\]"):
        safeops.head_loss(LoRA(D, C).double(), hidden, target, depth_weight=torch.tensor([1.0, -1.0, 0.0]))
