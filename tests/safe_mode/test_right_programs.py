"""A program that is right in torch keeps its dtypes, graph, hooks, exceptions and in-place writes in safe mode."""

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.private_torch import tree_leaves
from safeops.safe import gradients, values

MASK = torch.tensor([True, False, True])


@pytest.fixture(autouse=True, params=["cpu", "device that would be waited for"])
def look(request, monkeypatch):
    """Runs a test as on the CPU, where the mode looks for NaN in a product, and as on a GPU, where it does not look and
    sums the product with the twin."""
    if request.param != "cpu":
        for module in (gradients, values):
            monkeypatch.setattr(module, "is_readable", lambda x: False)


def ones():
    return torch.ones(3, requires_grad=True)


def product(x):
    return x * MASK


def read(x):
    return x[MASK]


def quotient(x):
    return x / (x + 1)


def reduced(y):
    return (torch.where(MASK, y, 0.0) if y.shape == MASK.shape else y).sum()


MADE = pytest.mark.parametrize("make", [product, read, quotient])


def same(call):
    """Asserts that a call's results have equal values, dtypes and requires_grad without the mode and in it."""
    expected = tree_leaves(call())
    with safeops.safe_mode():
        result = tree_leaves(call())
    for a, b in zip(result, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b)  # the dtype, too
        else:
            assert a == b


# ---- gradients


@MADE
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_constant_has_no_gradient(make, guard):
    def call():
        x = ones()
        with guard():
            baseline = reduced(make(x))
            y = make(x)
        loss = x.square().sum() / baseline.item() - reduced(y.clone() if guard is torch.inference_mode else y)
        return baseline, torch.autograd.grad(loss, x)

    same(call)


@MADE
def test_the_gradient_of_an_intermediate(make):
    def call():
        x = ones()
        y = make(x)
        return torch.autograd.grad(reduced(y), (y, x))

    same(call)


@MADE
def test_a_retained_gradient_and_hooks(make):
    def call():
        seen, x = [], ones()
        y = make(x)
        y.retain_grad()
        y.register_hook(lambda g: (seen.append("tensor"), 2 * g)[1])
        y.grad_fn.register_hook(lambda *_: seen.append("node"))
        y.grad_fn.register_prehook(lambda *_: seen.append("pre"))
        reduced(y).backward()
        return seen, y.grad, x.grad

    same(call)


@MADE
def test_a_leaf_from_an_intermediate(make):
    def call():
        y = make(torch.ones(3)).requires_grad_()
        reduced(y).backward()
        return y.grad

    same(call)


def test_a_mask_of_numbers_that_is_learned():
    def call():
        gate = MASK.float().requires_grad_()
        y = torch.full((3,), 2.0) * gate
        y.sum().backward()
        return gate.grad

    same(call)


def test_second_derivatives():
    def call():
        x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        loss = torch.where(MASK, (x * x) / (x + 1), 0.0).sum() + (x**3 * MASK).mean()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return g, torch.autograd.grad(g.square().sum(), x)

    same(call)


# ---- writes in place


@MADE
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "write", [lambda y: y.clamp_(min=1), lambda y: y.data.fill_(7), lambda y: y.detach().numpy().__setitem__(0, 3)]
)
def test_what_is_written_counts(make, guard, write):
    def call():
        with guard():
            y = make(torch.arange(3.0) + 1)
            write(y)
            return y.sum(), y.mean(), reduced(y)

    same(call)


@pytest.mark.parametrize("as_mask", [lambda m: m, lambda m: m.float()])
def test_operands_that_are_written_afterwards(as_mask):
    def call():
        x, array = torch.arange(3.0) + 1, MASK.numpy().copy()
        m = as_mask(torch.from_numpy(array))
        y = x * m
        x.numpy()[:] = 5
        array[:] = False
        m.data.zero_()
        return y.sum(), y.mean(0)

    same(call)


def test_numbers_of_a_mask_that_are_written():
    def call():
        m = MASK.float()
        m.numpy()[0] = 0.25
        return (torch.ones(3) * m).sum()

    same(call)


# ---- dtypes


def test_a_mask_in_fp64():
    x, mask = torch.full((3000,), 0.1), torch.ones(3000, dtype=torch.bool)
    same(lambda: ((x * mask.double()).sum(), (x * mask.double()).mean(0), (x.half() * mask.float()).sum()))


def test_numbers_in_a_division():
    half, x = torch.ones(3, dtype=torch.float16, requires_grad=True), ones()
    zero = torch.zeros((), dtype=torch.float16)
    same(lambda: torch.where(MASK, half / 70000.0, zero))
    same(lambda: torch.where(MASK, 1e5 / (2 * half), zero))
    same(lambda: torch.where(MASK, x / 1e39, 0.0))
    same(lambda: torch.where(MASK, x.double() / x, 0.0))


def test_bfloat16_is_torchs():
    """bf16 sums and norms stay torch's: they have fp32's range, and torch rounds them only once."""
    x, w = torch.randn(3, 4).bfloat16(), torch.ones(2, 2).bfloat16()

    def call():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.zeros(5).bfloat16()
            y[torch.tensor([0, 1, 2])] = x.sum(-1)
        return y, torch.stack([x.mean(), x.sum()]) @ w, x.norm(), (x * (x > 0)).sum(), (x * (x > 0)).mean(0)

    same(call)


@pytest.mark.parametrize("autocast", [False, True])
def test_rows_of_half_are_torchs(autocast):
    x, out = torch.randn(3, 4).half(), torch.zeros(5).half()

    def call():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            y = out.clone()
            y[torch.tensor([0, 1, 2])] = x.sum(-1)
            y.index_add_(0, torch.tensor([0, 1, 2]), (x * (x > 0)).mean(-1))
        return y, x.norm(dim=0), torch.linalg.vector_norm(x, dim=1)

    same(call)


@pytest.mark.parametrize("norm", [lambda x: x.norm(0), lambda x: torch.linalg.vector_norm(x, ord=0)])
def test_the_order_0_counts(norm):
    x = torch.tensor([1.0, float("nan"), 0.0, float("inf"), 2.0]).half()
    same(lambda: norm(x))


# ---- modules


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("hidden", [1, 3])
def test_an_encoder_with_padding(hidden):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, x = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 3, 8)
    padding = torch.arange(3) >= torch.tensor([[3], [3 - hidden]])
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()

    @torch.no_grad()
    def call():
        ours = encoder(x, src_key_padding_mask=padding), layer.eval()(nested).to_padded_tensor(0.0)
        return *ours, attention(nested, nested, nested, need_weights=False)[0].to_padded_tensor(0.0)

    same(call)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        y = F.log_softmax(self.linear(x), dim=1)
        triplet = F.triplet_margin_with_distance_loss(y, y + 1, y * 2)
        return (y * (y > -1).float()).sum() + F.triplet_margin_loss(y, y + 1, y * 2) + triplet


def test_what_is_traced_is_torchs():
    net, x = Net(), torch.randn(2, 4)
    expected = torch.jit.trace(net, x)
    with safeops.safe_mode() as report:
        result = torch.jit.trace(net, x)
        assert [x.remark for x in report.remarks] == ["torch's own: torch.jit traces"] * 4
    graphs = [[node.kind() for node in traced.graph.nodes()] for traced in (result, expected)]
    assert graphs[0] == graphs[1] and torch.equal(result(x), expected(x))


# ---- clipping


def clipped(gradient, **options):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=gradient.dtype))
    weight.grad = gradient.clone()
    try:
        return torch.nn.utils.clip_grad_norm_([weight], 1.0, **options), weight.grad
    except RuntimeError as error:
        return str(error), weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_raises_where_torchs_does(dtype):
    for value in (1e200 if dtype == torch.float64 else 1e38, 1e30, 3.0):
        same(lambda value=value: clipped(torch.full((4,), value, dtype=dtype), error_if_nonfinite=True))
    same(lambda: clipped(torch.full((4,), 3.0, dtype=dtype), foreach=True))


def test_clipping_warns_where_torchs_does():
    parameters = torch.nn.Linear(2, 2).parameters()
    list(parameters)
    with safeops.safe_mode(), pytest.warns(UserWarning, match="is an empty generator"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
