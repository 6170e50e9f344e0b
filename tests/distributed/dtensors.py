"""Cases of ops on DTensors, each compared with the same call on plain tensors. Run by processes.py."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from tests.callers.calls import CALLS
from tests.distributed.sharded import (
    COVERED,
    FIRSTS,
    S0,
    S1,
    P,
    R,
    close,
    compare,
    distributed,
    layouts,
    mesh,
    operands,
    tensors_of,
)


def elementwise(dtype):
    for name in [name for name, how in COVERED.items() if how == "elementwise"]:
        options = {k: x for k, x in CALLS[name].items() if not isinstance(x, torch.Tensor)}
        if name == "masked_fill":
            options["value"] = 0.25
        keys = [k for k in tensors_of(name) if k != "value"]
        for shape in ((5, 3), (1, 3)):  # uneven shards, then empty ones
            for layout in layouts(dtype, name):
                x = operands(name, shape, dtype, keys)
                got = compare(name, x, dict.fromkeys(keys, layout), dtype, **options)
                assert got.placements == tuple(layout)


def mixed_layouts():
    """The gradient of a broadcast operand must be summed over the ranks."""
    x = operands("safe_div", (5, 3), torch.float64, ("input", "other"))
    for a, b in (([S0], [R]), ([R], [S0]), ([S0], [S1]), ([P], [S0]), ([S1], [P]), ([P], [P]), ([S0, R], [S1, S0])):
        compare("safe_div", x, {"input": a, "other": b}, torch.float64)
    for row in (x["other"][:1], x["other"][0], x["other"][:, :1], x["other"][0, 0]):
        for layout in ([S0], [S1], [S0, S1]):
            how = {"input": layout, "other": [R] * len(layout)}
            compare("safe_div", {"input": x["input"], "other": row.clone()}, how, torch.float64)
    number = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)  # a plain 0-dim tensor, equal on all ranks
    shared = distributed(x["input"], [S0])
    safeops.safe_div(shared, number).sum().backward()
    torch.testing.assert_close(number.grad, -x["input"].sum() / 0.25, rtol=1e-12, atol=0)
    value = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(15).reshape(5, 3) % 4 == 0
    safeops.masked_fill(shared, distributed(mask, [S0]), value).sum().backward()
    assert value.grad == mask.sum()
    value.grad = None
    safeops.masked_fill(shared, distributed(mask[:, :1], [S1]), value).sum().backward()
    assert value.grad == mask[:, :1].sum() * 3
    weight = DTensor.from_local(x["other"][0].clone(), mesh(), [Partial("avg")], run_check=False).requires_grad_()
    (slope,) = torch.autograd.grad(safeops.masked_sum(shared, weight=weight), weight)
    close(slope, x["input"].sum(0), 1e-12)


def losses(dtype):
    """Every pointwise loss equals one process's, with all reductions, and masks that keep little, nothing on a rank, or
    nothing at all."""
    for name in [name for name, how in COVERED.items() if how == "loss"]:
        options = {k: x for k, x in CALLS[name].items() if not isinstance(x, (torch.Tensor, type(None)))}
        options.pop("denominator", None)
        for layout in layouts(dtype, name):
            for more in ((), ("mask",), ("mask", "weight")):
                keys = tensors_of(name, *more)
                x = operands(name, (5, 3), dtype, keys)
                same = dict.fromkeys(keys, layout)
                for reduction in ("mean", "sum", "none"):
                    compare(name, x, same, dtype, **{**options, "reduction": reduction})
        keys = tensors_of(name, "mask")
        x, same = operands(name, (5, 3), dtype, keys), dict.fromkeys(keys, [S0])
        for denominator in (7, 0, torch.tensor(7.0), torch.tensor(0)):
            compare(name, x, same, dtype, **options, denominator=denominator)
        x["mask"] &= False
        for empty in ("zero", "nan"):
            for denominator in (None, 7, 0):
                compare(name, x, same, dtype, **{**options, "empty": empty}, denominator=denominator)


def loss_layouts():
    """Losses equal one process's for empty shards, half operands, broadcast masks, and different or partial
    placements."""
    for shape in ((1, 3), (5, 3), (0, 3)):
        for layout in layouts(torch.float64, FIRSTS["loss"]):
            x = operands("mse_loss", shape, torch.float32, ("input", "target", "mask"))
            compare("mse_loss", x, dict.fromkeys(x, layout))
    x = operands("mse_loss", (5, 3), torch.float16, ("input", "target", "mask"))
    compare("mse_loss", x, dict.fromkeys(x, [S0]), torch.float16)
    x = operands("mse_loss", (5, 3), torch.float64, ("input", "target", "mask", "weight"))
    for a, b, c in (
        ([S0], [R], [S1]),
        ([R], [S1], [R]),
        ([P], [S0], [R]),
        ([P], [P], [S1]),
        ([S0, S1], [R, R], [S0, R]),
    ):
        compare("mse_loss", x, {"input": a, "target": b, "mask": c, "weight": c}, torch.float64)
    x["mask"], x["weight"] = x["mask"][:, :1].clone(), x["weight"][0].clone()
    how = {"input": [S0], "target": [S0], "mask": [S0], "weight": [R]}
    for reduction in ("mean", "sum", "none"):
        compare("mse_loss", x, how, torch.float64, reduction=reduction)


def reductions(dtype):
    for name in [name for name, how in COVERED.items() if how in ("sum", "mean", "statistic", "count")]:
        for shape in ((5, 3), (1, 3)):
            for layout in layouts(dtype, name):
                for more, keepdim in (((), False), (("mask",), True), (("mask", "weight"), False)):
                    x = operands(name, shape, dtype, ("input", *(k for k in more if k in CALLS[name])))
                    for dim in (0, 1, (0, 1), None):
                        reduced = (0, 1) if dim is None else dim if isinstance(dim, tuple) else (dim,)
                        if COVERED[name] == "statistic" and any(p.is_shard() and p.dim in reduced for p in layout):
                            continue  # partials.py has these
                        compare(name, x, dict.fromkeys(x, layout), dtype, dim=dim, keepdim=keepdim)
    x = operands("masked_mean", (5, 3), dtype, ("input", "mask"))
    for name in ("masked_sum", "masked_mean"):  # a rank must not round its part to fp32
        compare(name, x, dict.fromkeys(x, [S0]), torch.float64, dim=0, dtype=torch.float64)
    for empty in ("zero", "nan"):
        compare("masked_mean", x, dict.fromkeys(x, [S0]), dtype, dim=0, empty=empty)
        compare("masked_sum", x, {"input": [P], "mask": [S1]}, dtype, dim=1, empty=empty)


def garbage():
    """A masked-out NaN on any rank must have no effect, and a kept NaN must show on all ranks."""
    x = operands("mse_loss", (6, 3), torch.float32, ("input", "target", "mask"))
    x["input"].masked_fill_(~x["mask"], torch.nan)
    compare("mse_loss", x, dict.fromkeys(x, [S0]))
    x["input"][-1] = torch.nan
    x["mask"][-1] = True
    got = safeops.mse_loss(
        *(distributed(t, [S0]) for t in (x["input"], x["target"])), mask=distributed(x["mask"], [S0])
    )
    assert got.to_local().isnan()


def second_order():
    x, y = (torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) + 0.5 for i in (0, 1))
    for f in (
        lambda a, b: safeops.log_cosh_loss(a, b),
        lambda a, b: safeops.safe_div(a, b).sum(),
        lambda a, b: (safeops.masked_mean(a * a, dim=0) * b[0]).sum(),
    ):
        results = []
        for leaves in ([t.clone().requires_grad_() for t in (x, y)], [distributed(t, [S0]) for t in (x, y)]):
            first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
        for w, g in zip(*results):
            close(g, w, 1e-12)


def denominator_alone():
    """A DTensor works as denominator of plain operands, and of DTensors on another mesh."""
    x = torch.arange(6.0).requires_grad_()
    count = distributed(torch.tensor(4.0), [R], grad=False)
    for empty in ("zero", "nan", "raise"):
        loss = safeops.mse_loss(x, torch.zeros(6), denominator=count, empty=empty)
        (slope,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(float(loss), 55 / 4)
        torch.testing.assert_close(slope, x.detach() / 2)
    shared = distributed(x.detach()[:, None].expand(6, 2).contiguous(), [S0])
    target = distributed(torch.zeros(6, dtype=torch.int64), [S0])
    count = distributed(torch.tensor(4.0), [R, P], grad=False)
    want = safeops.cross_entropy(x[:, None].expand(6, 2), target.full_tensor(), denominator=4)
    close(safeops.cross_entropy(shared, target, denominator=count), want, 1e-6)
    close(safeops.mse_loss(shared, shared.detach() * 0, denominator=count), x.detach().square().sum() / 2, 1e-6)


def collectives():
    """A mean must send 16 bytes (24 with weights); an elementwise op and every backward must send nothing."""
    x = {k: distributed(t, [S0]) for k, t in operands("", (5, 3), torch.float32, ("a", "b", "mask", "weight")).items()}
    x["weight"].requires_grad_(False)
    a, b, keep, w = x.values()

    def wire(call):
        sent, real = [], dist.all_reduce
        note = lambda t, **options: (sent.append(t.nbytes), real(t, **options))[1]  # noqa: E731
        with mock.patch.object(dist, "all_reduce", note), CommDebugMode() as others:
            out = call()
        with CommDebugMode() as backward:
            torch.autograd.grad(out, a, torch.ones_like(out))
        assert backward.get_total_counts() == 0
        return sent, others.get_total_counts() - len(sent)

    for call, bytes in (
        (lambda: safeops.mse_loss(a, b), [16]),
        (lambda: safeops.mse_loss(a, b, mask=keep), [16]),
        (lambda: safeops.mse_loss(a, b, mask=keep, weight=w), [24]),
        (lambda: safeops.masked_mean(a, keep), [16]),
        (lambda: safeops.masked_mean(a, keep, dim=0), [48]),
        (lambda: safeops.masked_mean(a, keep, dim=1), []),
        (lambda: safeops.safe_div(a, b), []),
        (lambda: safeops.mse_loss(a, b, reduction="none"), []),
    ):
        sent, more = wire(call)
        assert sent == bytes and more <= 0, (sent, bytes, more)


CASES = {
    "elementwise fp32": functools.partial(elementwise, torch.float32),
    "mixed layouts": mixed_layouts,
    "loss layouts": loss_layouts,
    "garbage": garbage,
    "second order": second_order,
    "denominator alone": denominator_alone,
    "collectives": collectives,
    "elementwise fp64": functools.partial(elementwise, torch.float64),
    "losses fp32": functools.partial(losses, torch.float32),
    "losses fp64": functools.partial(losses, torch.float64),
    "reductions fp32": functools.partial(reductions, torch.float32),
    "reductions fp64": functools.partial(reductions, torch.float64),
}
