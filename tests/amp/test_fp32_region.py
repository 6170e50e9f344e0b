"""fp32_region: inside, forward and backward run in fp32, whatever the dtype outside; after it, all is as before."""

import collections
import dataclasses
import functools
import inspect
import threading
import types

import pytest
import torch

import safeops
from safeops.amp._nested import map_tensors
from safeops.amp.fp32_region import DEVICE_TYPES

HALVES = [torch.float16, torch.bfloat16]
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int = 3
    total: object = dataclasses.field(default=None, init=False)


@dataclasses.dataclass
class Open:
    x: object


class Attributed(dict):
    """A dict with attributes beside its items."""


class Numbers(list):
    pass


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype)


def product(a, b):
    return a @ b


# ---- what runs in which dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_loss_that_overflows_in_half(dtype):
    def loss(x, y):
        return (x - y).pow(2).sum()

    x = torch.full((5000,), 200.0, dtype=dtype, requires_grad=True)
    y = torch.zeros(5000, dtype=dtype)
    safe = safeops.fp32_region(loss)
    with autocast(dtype):
        got = safe(x, y)
    assert got.dtype == torch.float32 and got.item() == 2e8
    got.backward()
    assert x.grad.dtype == dtype and (x.grad == 400).all()
    if dtype == torch.float16:
        assert (x.detach() - y).pow(2).sum() == torch.inf  # in plain torch it overflows


def test_autocast_ops_run_in_fp32_inside():
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with autocast():
        assert product(a, b).dtype == torch.bfloat16
        inside = safeops.fp32_region(product)(a, b)
        with safeops.fp32_region():
            context = product(a, b)
        assert product(a, b).dtype == torch.bfloat16
    for got in (inside, context):
        assert got.dtype == torch.float32 and torch.equal(got, a @ b)


def test_autocast_is_off_for_every_device_type():
    assert {"cpu", "cuda"} <= set(DEVICE_TYPES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        was = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)  # as torch.autocast("cuda"), which does nothing without a GPU
        try:
            with safeops.fp32_region():
                assert not any(map(torch.is_autocast_enabled, DEVICE_TYPES))
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled("cpu")
        finally:
            torch.set_autocast_enabled("cuda", was)


def test_backward_computes_in_fp32():
    """The backward must run in fp32: d/dx (4 w^2 x) = 4 * 200^2 = 160000 does not fit fp16, but divided by 1000 it
    does."""
    x = torch.full((3,), 1e-3, dtype=torch.float16, requires_grad=True)
    w = torch.full((3,), 200.0, dtype=torch.float16, requires_grad=True)
    with autocast(torch.float16):
        loss = safeops.fp32_region(lambda x, w: (x * w * w * 4).sum())(x, w)
    loss.backward()
    assert torch.allclose(w.grad.float(), 8 * x.detach().float() * 200, rtol=1e-3)
    assert (x.grad == torch.inf).all()  # beyond fp16 it must be inf, not saturated: GradScaler looks for inf
    x.grad = None
    with autocast(torch.float16):
        loss = safeops.fp32_region(lambda x, w: (x * w * w * 4 / 1000).sum())(x, w)
    loss.backward()
    assert torch.allclose(x.grad, torch.full((3,), 160.0, dtype=torch.float16))  # 160000 in the region


def test_gradients_come_back_in_each_dtype():
    leaves = [torch.ones(3, dtype=d, requires_grad=True) for d in (*HALVES, torch.float32, torch.float64)]
    safeops.fp32_region(lambda xs: sum((x * 2).sum().double() for x in xs))(leaves).backward()
    assert all(x.grad.dtype == x.dtype and (x.grad == 2).all() for x in leaves)


# ---- what is upcast


def test_every_nesting_is_upcast_and_the_rest_left_alone():
    seen = []
    spy = safeops.fp32_region(lambda *args, **kwargs: seen.append((args, kwargs)))
    half, double, index, word = torch.ones(2).half(), torch.ones(2).double(), torch.tensor([1]), object()
    default = collections.defaultdict(list, a=half)
    attributed = Attributed(a=half)
    attributed.note = "kept"
    packed = torch.nn.utils.rnn.pack_sequence([half, half[:1]])
    spy(
        half, double, index, word, None, 7, "name",
        [half, (half, {"deep": [half, double]})], Pair(half, index), Frozen(half), Open([Frozen(half)]),
        collections.OrderedDict(b=half, a=index), default, attributed, Numbers([half]), packed,
        types.SimpleNamespace(x=half), types.MappingProxyType({"a": half}), key=half, torch_size=half.shape,
    )  # fmt: skip
    args, kwargs = seen[0]
    single = lambda x: x.dtype == torch.float32 and torch.equal(x, torch.ones(2))  # noqa: E731
    assert single(args[0]) and args[1] is double and args[2] is index and args[3] is word
    assert args[4:7] == (None, 7, "name")
    assert single(args[7][0]) and single(args[7][1][0]) and single(args[7][1][1]["deep"][0])
    assert args[7][1][1]["deep"][1] is double
    assert type(args[8]) is Pair and single(args[8].first) and args[8].second is index
    assert type(args[9]) is Frozen and single(args[9].x) and args[9].n == 3 and args[9].total is None
    assert single(args[10].x[0].x)
    assert list(args[11]) == ["b", "a"] and type(args[11]) is collections.OrderedDict and single(args[11]["b"])
    assert args[12].default_factory is list and single(args[12]["a"])
    assert type(args[13]) is Attributed and args[13].note == "kept" and single(args[13]["a"])
    assert type(args[14]) is Numbers and single(args[14][0])
    assert args[15].data.dtype == torch.float32 and args[15].batch_sizes is packed.batch_sizes
    assert args[16].x is half  # other objects are left alone
    assert type(args[17]) is types.MappingProxyType and single(args[17]["a"])  # a read-only mapping stays one
    assert single(kwargs["key"]) and kwargs["torch_size"] == half.shape
    # The caller's objects are unchanged.
    assert default["a"] is half and attributed["a"] is half and packed.data.dtype == torch.float16


def test_what_holds_no_half_is_passed_as_it_is():
    items = [torch.ones(2), {"a": torch.ones(1).double()}, Frozen(torch.ones(1))]
    seen = []
    safeops.fp32_region(lambda *args: seen.extend(args))(items, items[1], items[2])
    assert seen[0] is items and seen[1] is items[1] and seen[2] is items[2]


def test_map_tensors_of_results_of_torch_functions():
    result = torch.ones(2, 3).max(dim=1)  # a torch type of tuple, built from one sequence
    moved = map_tensors(lambda x: x.double(), result)
    assert type(moved) is type(result) and moved.values.dtype == moved.indices.dtype == torch.float64


# ---- afterwards


def test_autocast_is_restored_after_an_exception_and_after_nesting():
    @safeops.fp32_region()
    def fails(depth):
        assert not torch.is_autocast_enabled("cpu")
        if depth:
            with autocast(torch.float16):  # autocast is switched on inside, and off again
                assert torch.is_autocast_enabled("cpu")
                fails(depth - 1)
        raise KeyError("planted")

    with autocast():
        with pytest.raises(KeyError, match="planted"):
            fails(2)
        with pytest.raises(KeyError), safeops.fp32_region(), safeops.fp32_region():
            raise KeyError
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_the_autocast_cache_is_not_poisoned():
    """A weight that is used before, in and after the region must keep its cached cast, and get gradients from all three
    uses."""
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)

    def step(region):
        w.grad = None
        with autocast():
            first = torch.nn.functional.linear(x, w)
            with region():
                middle = torch.nn.functional.linear(x, w)
            last = torch.nn.functional.linear(x, w)
        assert (first.dtype, middle.dtype, last.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert torch.equal(first, last)
        (first.float().sum() + middle.sum() + last.float().sum()).backward()
        return w.grad

    got = step(safeops.fp32_region)
    assert torch.allclose(got, 3 * x.sum(0).expand(4, 4), rtol=2e-2)
    assert torch.equal(got, step(functools.partial(torch.autocast, "cpu", enabled=False)))


def test_threads_do_not_see_each_other():
    a = torch.randn(8, 8)
    inside, checked = threading.Barrier(2, timeout=60), []
    region = safeops.fp32_region(lambda a: (inside.wait(), (a @ a).dtype, inside.wait())[1])

    def with_region():
        with autocast():
            checked.append(("in", region(a), (a @ a).dtype))

    def without():
        with autocast():
            inside.wait()
            checked.append(("out", (a @ a).dtype))
            inside.wait()

    threads = [threading.Thread(target=f) for f in (with_region, without)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(checked) == [("in", torch.float32, torch.bfloat16), ("out", torch.bfloat16)]


# ---- what it wraps


def test_signature_name_and_methods_are_kept():
    class Losses:
        scale = 2

        @safeops.fp32_region
        def squares(self, x: torch.Tensor, *, power: int = 2) -> torch.Tensor:
            """Doc."""
            return self.scale * x.pow(power).sum()

        @safeops.fp32_region
        @staticmethod
        def cubes(x):
            return x.pow(3).sum()

        @classmethod
        @safeops.fp32_region
        def scaled(cls, x):
            return cls.scale * x

    plain = inspect.signature(Losses.squares.__wrapped__)
    assert inspect.signature(Losses.squares) == plain and list(plain.parameters) == ["self", "x", "power"]
    assert Losses.squares.__name__ == "squares" and Losses.squares.__doc__ == "Doc."
    x = torch.full((2,), 100.0, dtype=torch.float16)
    assert Losses().squares(x, power=3) == 4e6
    assert Losses.cubes(x) == 2e6 and Losses.scaled(x).dtype == torch.float32


def test_a_module_is_wrapped_in_a_module():
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3,), 300.0))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight)

    inner = Loss()
    module = safeops.fp32_region(inner)
    x = torch.full((2, 3), 300.0, dtype=torch.float16)
    with autocast(torch.float16):
        assert module(x).tolist() == [270000.0] * 2 and inner(x).isinf().all()
    assert isinstance(module, torch.nn.Module) and module.module is inner
    assert [id(p) for p in module.parameters()] == [id(inner.weight)]
    assert module.eval().module.training is False


def test_what_cannot_be_wrapped_is_named():
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    class Stream:
        def __call__(self):
            yield

    for function, words in (
        (generator, "generator function"),
        (Stream(), "generator function"),
        (functools.partial(generator), "generator function"),
        (coroutine, "coroutine function"),
        (both, "asyncgen function"),
        (torch.nn.Linear, "the class Linear"),
        (3, "got int"),
        (torch.ones(2), "got Tensor"),
    ):
        for wrap in (safeops.fp32_region, safeops.fp32_region()):
            with pytest.raises(TypeError, match=f"fp32_region: function must .*{words}"):
                wrap(function)


def test_a_context_is_entered_once():
    region = safeops.fp32_region()
    with autocast():
        with region:
            pass
        with pytest.raises(RuntimeError, match="entered before"), region:
            pass
        assert torch.is_autocast_enabled("cpu")


# ---- compiled


def test_compiles_whole():
    loss = safeops.fp32_region(lambda x, target: (x - target["y"][0]).pow(2).sum())

    def context(x, target):
        with safeops.fp32_region():
            inside = x.float() @ x.float().t()
        return inside, x @ x.t()

    x = torch.full((3, 3), 300.0, dtype=torch.float16, requires_grad=True)
    target = {"y": [torch.zeros(3, 3, dtype=torch.bfloat16)]}
    with autocast():
        want = loss(x, target)
        torch._dynamo.reset()
        got = torch.compile(loss, backend="aot_eager", fullgraph=True)(x, target)
        inside, outside = torch.compile(context, backend="aot_eager", fullgraph=True)(x, target)
    assert got.dtype == torch.float32 and got.item() == want.item() == 810000.0
    (grad,) = torch.autograd.grad(got, x)
    assert grad.dtype == torch.float16 and (grad == 600).all()
    assert inside.dtype == torch.float32 and outside.dtype == torch.bfloat16 and inside[0, 0] == 270000


WEIGHT, KERNEL = torch.linspace(-2, 2, 64 * 32).reshape(64, 32), torch.linspace(-2, 2, 64 * 9).reshape(2, 32, 3, 3)
PRODUCTS = {
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: torch.nn.functional.linear(x, WEIGHT, bias=WEIGHT[:, 0]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "einsum of a list": lambda x: torch.einsum("ij,kj->ik", [x, WEIGHT]),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, WEIGHT.mT, x]),
    "inner": lambda x: torch.inner(x, WEIGHT),
    "linalg.matmul": lambda x: torch.linalg.matmul(x, WEIGHT.mT),
    "linalg.vecdot": lambda x: torch.linalg.vecdot(x, WEIGHT),
    "a region": lambda x: safeops.fp32_region(torch.matmul)(x, WEIGHT.mT),
    "addmm": lambda x: torch.addmm(x.sum(), x, x.mT, alpha=2),
    "conv2d": lambda x: torch.nn.functional.conv2d(x.reshape(1, 32, 8, 8), KERNEL, padding=1),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=torch.ones(64, 64, dtype=torch.bool).tril()
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("context", [False, True])
def test_a_compiled_product_has_its_backward_in_fp32(name, context):
    """A product in a compiled region must have its backward in fp32, although the compiler traces the backward under
    the autocast around the compiled function."""
    product = PRODUCTS[name]

    def inside(x):
        with safeops.fp32_region():
            return product(x)

    region = inside if context else safeops.fp32_region(product)

    def loss(x):
        y = region(x)
        return (y - 1).square().mean()

    x = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 10).requires_grad_()
    (want,) = torch.autograd.grad(loss(x) * 65536, x)
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.float16):
        value = torch.compile(loss, fullgraph=True, backend="aot_eager")(x)
    (got,) = torch.autograd.grad(value * 65536, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=float(want.abs().max()) * 1e-6)


def test_a_compiled_attention_has_the_gradient_of_the_dropout_it_drew():
    attention = safeops.fp32_region(lambda q, v: torch.nn.functional.scaled_dot_product_attention(q, q, v, None, 0.5))
    q, v = torch.randn(1, 1, 8, 4), torch.randn(1, 1, 8, 4, requires_grad=True)
    torch._dynamo.reset()
    total = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, v).sum()
    (grad,) = torch.autograd.grad(total, v)
    torch.testing.assert_close((grad * v).sum(), total)  # the total is linear in v


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: torch.distributions.Independent(d, 1)])
def test_distributions_are_upcast(wrap):
    x = torch.tensor([300.0, 1e-3], dtype=torch.float16, requires_grad=True)
    half = wrap(torch.distributions.Normal(x, torch.full_like(x, 1e-3)))
    wide = wrap(torch.distributions.Normal(x.float(), torch.full_like(x, 1e-3).float()))
    other = wrap(torch.distributions.Normal(torch.zeros(2), torch.ones(2)))
    divergence = safeops.fp32_region(torch.distributions.kl_divergence)
    got, want = divergence(half, other), torch.distributions.kl_divergence(wide, other)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(d.sum(), x)[0] for d in (got, want)))
    assert safeops.fp32_region(lambda d: d)(wide) is wide  # returned itself: nothing in it is half
