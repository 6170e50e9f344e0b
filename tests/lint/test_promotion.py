"""No rewrite returns fp32 where torch requires equal dtypes, or 0 where the result is a divisor."""

import re
import textwrap

import pytest
import torch

from safeops_lint.check import fix_source, lint_source
from tests.lint.programs import EVERY, HEADER, program

# Expressions that raise if n is fp32, as a rewrite would make it, while h is half. i holds indices, m is a mask. The
# first two dims of all tensors are 4 x 4.
RAISES = """
torch.matmul(n, h)
h @ n
torch.mm(h, n)
torch.bmm(h[None], n[None])
n.mv(h[0])
torch.dot(h[0], n[0])
torch.vdot(n[0], h[0])
torch.linalg.vecdot(h, n)
torch.inner(h, n)
torch.addmm(n, h, h)
h.clone().addmm_(h, n)
torch.addmv(h[0], h, n[0])
torch.addbmm(h, h[None], n[None])
torch.baddbmm(h[None], n[None], h[None])
torch.tensordot(h, n)
torch.einsum("ij,jk->ik", n, h)
torch.linalg.multi_dot([h, n, h])
torch.chain_matmul(h, n)
F.linear(h, n)
F.bilinear(n, h, h[None].expand(4, 4, 4))
F.prelu(h, n[0])
F.conv1d(h[None], n[:, :, None])
F.conv2d(n[None, None], h[None, None])
F.conv3d(h[None, None, None], n[None, None, None])
F.conv_transpose1d(h[None], n[:, :, None])
F.conv_transpose2d(h[None, None], n[None, None])
F.conv_transpose3d(n[None, None, None], h[None, None, None])
torch.conv_tbc(h[None], n[None], h[0])
torch.linalg.cross(h[:, :3], n[:, :3])
torch.lerp(h, n, 0.5)
n.lerp_(h, 0.5)
h.index_add(0, i, n)
h.index_copy(0, i, n)
h.index_put((i,), n)
h.index_reduce(0, i, n, "amax")
h.put(i, n[0])
h.scatter(0, i[None], n)
h.scatter_add(0, i[None], n)
h.scatter_reduce(0, i[None], n, "sum")
h.masked_scatter(m, n)
F.binary_cross_entropy(torch.exp(-n), h)
F.scaled_dot_product_attention(h[None], n[None], h[None])
F.grid_sample(h[None, None], n[None, :, :2, None].expand(1, 4, 2, 2))
torch.heaviside(h, n)
torch.complex(h, n)
torch.cartesian_prod(h[0], n[0])
torch.meshgrid(h[0], n[0], indexing="ij")
torch.isclose(h, n)
torch.allclose(h, n)
F.cross_entropy(h, i, weight=n[0])
F.nll_loss(n, i, h[0])
F.layer_norm(n, (4,), h[0])
F.group_norm(n, 2, weight=h[0])
F.batch_norm(n, None, None, h[0], h[0], True)
F.instance_norm(n[None], weight=h[0], bias=h[0])
F.embedding_bag(i[None], h, per_sample_weights=n[:1], mode="sum")
""".strip().splitlines()

PROMOTES = """
n * h + torch.where(m, n, h)
torch.cat([n, h])
torch.stack([n, h])
F.cross_entropy(n, i)
F.cross_entropy(n, h)
F.nll_loss(n, i)
F.mse_loss(n, h)
F.kl_div(n, h)
F.binary_cross_entropy_with_logits(n, h)
F.cosine_similarity(n, h)
torch.outer(n[0], h[0])
h[n.argmin(1)] @ h
h[(n > 1).all(1)].mean() + h[: n.shape[0]] @ h
n.half() @ h
n.to(h.dtype) @ h
n.type_as(h) @ h
h.masked_fill(m, n.sum())
""".strip().splitlines()


def evaluate(expression, dtype):
    torch.manual_seed(0)
    h = torch.rand(4, 4).half()
    scope = dict(torch=torch, F=torch.nn.functional, nn=torch.nn, h=h, n=h.to(dtype), i=torch.arange(4), m=h > 0.5)
    return eval(expression, scope)


def made_wide(source):
    """Returns True if --fix writes a safeops call, which returns fp32, where the source has a finding of SO201."""
    assert "SO201" in {f.code for f in lint_source(source, rules=EVERY)}
    return "safeops." in fix_source(source, rules=EVERY)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", RAISES)
def test_what_takes_one_dtype_is_given_no_other(expression):
    evaluate(expression, torch.float16)
    with pytest.raises((RuntimeError, ValueError)):
        evaluate(expression, torch.float32)
    assert not made_wide(program("x, h, i, m", f"n = (x * x).sum(-1)\nreturn {expression}"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", PROMOTES)
def test_what_takes_both_keeps_no_rewrite_back(expression):
    evaluate(expression, torch.float32)
    assert made_wide(program("x, h, i, m", f"n = (x * x).sum(-1)\nreturn {expression}"))


# Files with a function loss(x, h) that gets half tensors. S(x) stands for (x * x).sum(-1).
MEETS = {
    "a helper": "def _sq(x):\n    return S(x)\n\n\ndef loss(x, h):\n    return _sq(x) @ h\n",
    "two helpers": """
        def _sq(x):
            return S(x)

        def _energy(x):
            n = 2 * _sq(x)
            return n, 1

        def loss(x, h):
            n, _ = _energy(x)
            return h.index_add_(0, torch.arange(4), n)
    """,
    "a function within": """
        def loss(x, h):
            def sq(i):
                return S(x[i])

            return torch.dot(sq(0), h[0])
    """,
    "a method": """
        class EnergyLoss(nn.Module):
            def _energy(self, x):
                return S(x)

            def forward(self, x, h):
                return torch.dot(self._energy(x)[0], h[0])

        loss = EnergyLoss()
    """,
    "an attribute": """
        class EnergyLoss(nn.Module):
            def forward(self, x, h):
                self.energy = S(x)
                return self.last(h)

            def last(self, h):
                return self.energy @ h

        loss = EnergyLoss()
    """,
    "a layer": """
        class ProjectedLoss(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = nn.Linear(4, 4).half()

            def forward(self, x, h):
                return self.proj(S(x)).sum()

        loss = ProjectedLoss()
    """,
    "what a class makes": """
        class SquareLoss(nn.Module):
            def forward(self, x):
                return S(x)

        class BothLoss(nn.Module):
            def __init__(self):
                super().__init__()
                self.square = SquareLoss()

            def forward(self, x, h):
                return self.square(x) @ h

        loss = BothLoss()
    """,
    "an argument": "def _product(h, n):\n    return h @ n\n\n\ndef loss(x, h):\n    return _product(h, n=S(x))\n",
    "one of many arguments": """
        def _product(h, *parts):
            return h @ parts[0]

        def loss(x, h):
            return _product(h, S(x))
    """,
    "a list": """
        def loss(x, h):
            out = []
            for i in range(4):
                out.append(S(x[i]))
            return torch.stack(out) @ h
    """,
    "a list of operands": "def loss(x, h):\n    both = [S(x), h]\n    return torch.matmul(*both)\n",
    "a pair": "def loss(x, h):\n    both = [S(x), h]\n    a, b = both\n    return a @ b\n",
    "a dict": "def loss(x, h):\n    out = {}\n    out['n'] = S(x)\n    return out['n'] @ h\n",
    "a loop": "def loss(x, h):\n    for n in [S(x)]:\n        return n @ h\n",
    "a comprehension": "def loss(x, h):\n    return sum([n @ h for n in (S(x), h)])\n",
    "another's dtype": "def loss(x, h):\n    n = S(x)\n    return h.new_ones(4, 4).to(n.dtype) @ h\n",
    "a mask": "def loss(x, h):\n    h = h.clone()\n    h[h > 0] = S(x)[h > 0]\n    return h\n",
}


@pytest.mark.parametrize("source", MEETS.values(), ids=MEETS)
def test_ways_to_what_takes_one_dtype(source):
    source = HEADER + re.sub(r"\bS\((\S+?)\)", r"(\1 * \1).sum(-1)", textwrap.dedent(source))
    scope = {}
    exec(source, scope)
    scope["loss"](torch.rand(4, 4, 4).half(), torch.rand(4, 4).half())
    assert not made_wide(source)


def test_what_stays_fp32_on_its_way_is_rewritten():
    square = program("x, h", "n = (x * x).sum(-1)\nself.log('loss', n)\nreturn n.mean()")
    step = (
        "\n\ndef train(model, x, h, scaler):\n    total = 0\n    total += {} / 4\n    scaler.scale(total).backward()\n"
    )
    assert made_wide(square + step.format("loss(model(x), h)"))
    assert not made_wide(square + step.format("loss(model(x), h) @ h"))
    assert not made_wide(square + step.format("apply(loss, x)"))  # loss is an argument: its callers are unknown


# Expressions under autocast: e is the fp16 output of a layer.
SEEN = """
torch.dot(e, torch.sqrt(e - x))
torch.dot(e, e / e.norm())
torch.inner(e / e.std(), e)
torch.lerp(e, torch.log(x), 0.5)
m.mv(e / e.norm())
e.index_add(0, i, e / e.norm())
e.scatter_add(0, i, torch.log(1 - e))
"""
WRITES = ["a = e.clone()\na[i > 1] = (e / e.norm())[i > 1]\nreturn a.sum()"]


@pytest.mark.parametrize("body", [f"return ({line}).sum()" for line in SEEN.split("\n")[1:-1]] + WRITES)
def test_a_line_that_runs_under_autocast_runs_after_fix(body):
    source = HEADER + f"def some_loss(e, x, m, i):\n    {body.replace(chr(10), chr(10) + '    ')}\n"
    assert lint_source(source, rules=EVERY) != []
    scope = {}
    exec(fix_source(source, rules=EVERY)[0], scope)
    e, i = torch.rand(3).half().requires_grad_(), torch.arange(3)
    with torch.autocast("cpu", torch.float16):
        scope["some_loss"](e * 1, torch.zeros(3).half(), torch.rand(3, 3).half(), i).backward()


def test_a_division_too():
    source = HEADER + "def loss(x, h):\n    w = x / x.sum()\n    return w @ h\n"
    assert fix_source(source, rules=EVERY) == (source, 0)
    assert fix_source(source.replace("w @ h", "w * h"), rules=EVERY)[1] == 1
