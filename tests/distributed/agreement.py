"""Cases of ranks that make different calls: each rank raises the same error, which says how the calls differ.

The ranks compare their calls if TORCH_DISTRIBUTED_DEBUG is not OFF. The last rank differs. Run by processes.py.
"""

import functools
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import safeops
from safeops.distributed import global_count
from tests.distributed.processes import raises
from tests.distributed.sharded import S0, S1, R, compare, mesh

LONGEST = 30  # seconds for a case on a busy machine; the group's timeout is twice that


def odd():
    return dist.get_rank() == dist.get_world_size() - 1


def part(shape=(4, 6), how=(S0,), dtype=torch.float32):
    """Returns a DTensor whose local part on each rank is ones of this shape, made without a collective."""
    return DTensor.from_local(torch.ones(shape, dtype=dtype), mesh(len(how)), how, run_check=False)


def replicated(x):
    return DTensor.from_local(x, mesh(), [R], run_check=False)


def limited(case, level=dist.DebugLevel.INFO):
    """Returns the case as a function that sets the debug level, and asserts that the case takes less than LONGEST."""

    def run():
        began, before = time.monotonic(), dist.get_debug_level()
        dist.set_debug_level(level)
        try:
            case()
        finally:
            dist.set_debug_level(before)
        assert time.monotonic() - began < LONGEST

    return run


def disagree(name, call, *words, level=dist.DebugLevel.INFO):
    """Asserts that call(differs), with differs True on the last rank alone, raises on all ranks, with `words` and both
    ranks' calls in the error."""
    said = "rank 0", f"rank {dist.get_world_size() - 1}", "do not make the same call"
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathering:
        raises(RuntimeError, f"{name} (rank {dist.get_rank()}): ", *said, *words, call=lambda: call(odd()))
    assert gathering.called


def shapes():
    """A shape that differs on one rank must be an error, where messages differ in size and where all have 16 bytes."""

    def x(differs):
        return part((4, 5 if differs else 6))

    rows = 4 * dist.get_world_size()
    words = "input is", f"float32 ({rows}, 6) as [Shard(dim=0)]", f"float32 ({rows}, 5) as [Shard(dim=0)]"
    for name in ("masked_var", "masked_mean", "masked_softmax", "normalize"):
        disagree(name, lambda differs, name=name: getattr(safeops, name)(x(differs), dim=0), *words)
    disagree("masked_sum", lambda differs: safeops.masked_sum(x(differs)), *words)
    disagree("mse_loss", lambda differs: safeops.mse_loss(x(differs), x(differs)), *words, "target is")
    disagree("cosine_similarity", lambda differs: safeops.cosine_similarity(x(differs), x(differs), dim=0), "x2 is")
    classes = part((4, 3), (S1,))

    def rows_of(differs):
        return replicated(torch.zeros(5 if differs else 4, dtype=torch.int64))

    def logits(differs):
        return part((5, 3), (S1,)) if differs else classes

    for name in ("cross_entropy", "nll_loss"):
        disagree(
            name,
            lambda differs, name=name: getattr(safeops, name)(logits(differs), rows_of(differs)),
            "target is",
            "(5,)",
        )
    disagree(
        "linear_cross_entropy",
        lambda differs: safeops.linear_cross_entropy(
            replicated(torch.ones(5 if differs else 4, 3)), part((2, 3)), rows_of(differs)
        ),
        "input is float32 (4, 3)",
    )


def dtypes():
    """A dtype that differs on one rank must be an error: all messages are fp64, so nothing else would show it."""

    def x(differs):
        return part(dtype=torch.float64 if differs else torch.float32)

    for name in ("masked_var", "masked_mean"):
        disagree(name, lambda differs, name=name: getattr(safeops, name)(x(differs), dim=0), "float32 (", "float64 (")


def options():
    x = part()
    for key, values in {
        "reduction": ("mean", "sum"),
        "denominator": (None, 7),
        "empty": ("zero", "nan"),
    }.items():
        call = lambda differs, key=key, values=values: safeops.mse_loss(x, x, **{key: values[differs]})  # noqa: E731
        disagree("mse_loss", call, "divisor is" if key == "denominator" else key)
    disagree("mse_loss", lambda differs: safeops.mse_loss(x, x, weight=x if differs else None), "weight is None on")
    disagree("masked_sum", lambda differs: safeops.masked_sum(x, dim=0, keepdim=differs), "keepdim is False on rank 0")
    disagree("masked_norm", lambda differs: safeops.masked_norm(x, dim=0, ord=2 - differs), "parameter is 2 on rank 0")
    disagree("cross_entropy", smoothed, "label_smoothing is 0 on rank 0, 0.1 on")


def smoothed(differs):
    target = replicated(torch.zeros(4, dtype=torch.int64))
    return safeops.cross_entropy(part(how=(S1,)), target, label_smoothing=0.1 * differs)


def functions():
    """Another function on one rank must be an error: one that sends as many bytes, has another collective, or gets no
    DTensor."""
    x, keep = part(), torch.ones(3, dtype=torch.bool)
    for one, other in (("masked_mean", "masked_sum"), ("masked_mean", "masked_var"), ("masked_amax", "masked_amin")):
        name = other if odd() else one
        disagree(name, lambda _, name=name: getattr(safeops, name)(x), f"rank 0 calls {one}", other)
    name = "global_count" if odd() else "masked_mean"
    disagree(
        name, lambda differs: global_count(keep) if differs else safeops.masked_mean(x), "rank 0 calls masked_mean"
    )


def in_backward():
    """Another function on one rank while the others run backward must be an error, and no gradient is set."""
    x = part().requires_grad_()
    y = safeops.masked_softmax(x, dim=0)
    name = "masked_var" if odd() else "masked_softmax in backward"
    call = lambda differs: safeops.masked_var(x, dim=0) if differs else y.sum().backward()  # noqa: E731
    disagree(name, call, "calls masked_softmax in backward", "masked_var")
    assert x.grad is None
    y = safeops.masked_softmax(x, dim=0)
    gradient = part(dtype=torch.float32) if odd() else replicated(torch.ones(y.shape))
    disagree(
        "masked_softmax in backward", lambda _: y.backward(gradient), "gradient is", "[Replicate()]", "[Shard(dim=0)]"
    )
    assert x.grad is None
    y.sum().backward()  # after the error a backward still works
    assert x.grad is not None


def redistributed():
    """Ranks must compare their calls before torch's own collectives (a change of layout, the plain definition)
    start."""

    def pair(differs):
        rows = 4 * dist.get_world_size()
        return part((4, 8 if differs else 4)), part((rows, (8 if differs else 4) // dist.get_world_size()), (S1,))

    disagree("safe_div", lambda differs: safeops.safe_div(*pair(differs)), "other is", "[Shard(dim=1)]")
    images = functools.partial(part, how=(Shard(2),))
    disagree("total_variation", lambda differs: safeops.total_variation(images((1, 3, 8, 8 + differs))), "input is")


def gradients():
    """A gradient that one rank lacks or has in another shape must be an error, and no gradient is written."""

    def parameter(columns):
        p = torch.nn.Parameter(part((4, columns)))
        p.grad = part((4, columns)) * 1e3
        return p

    results = [parameter(6), parameter(5)]
    disagree(
        "grad_norm", lambda differs: safeops.clip_grad_norm_(results[differs:], 1.0), "gradient 1 is", "None on rank"
    )
    disagree("grad_norm", lambda differs: safeops.grad_norm(results, 1 + differs), "norm_type is 1 on rank 0")
    assert all((p.grad.to_local() == 1e3).all() for p in results)


def counts():
    keep = torch.ones(3, dtype=torch.bool)
    disagree("global_count", lambda differs: global_count(keep, averaged=differs), "averaged is False on rank 0")
    weight = torch.ones(3)
    disagree("global_count", lambda differs: global_count(keep, weight=weight if differs else None), "weight is False")
    one, other = torch.ones(3 + 2 * odd(), dtype=torch.bool), torch.ones(7, dtype=torch.bool)  # masks may differ
    want = 3 * dist.get_world_size() + 2
    assert global_count([one, other] if odd() else one, averaged=False) == want + 7


def on_two_dims():
    """On a mesh of two dims all ranks get the error, also those whose collective has only ranks that agree."""
    for how in ((S0, R), (R, S0), (S0, S1)):
        x = part((4, 5 if odd() else 6), how)
        disagree("masked_mean", lambda _, x=x: safeops.masked_mean(x, dim=0), "input is float32 (")
    x = part(how=(R, S0) if odd() else (S0, R))
    disagree("masked_mean", lambda _: safeops.masked_mean(x, dim=0), "[Shard(dim=0), Replicate()]", "[Replicate(), Sh")


def alike():
    """If ranks agree, results are unchanged. A call that sends compares once per collective, and never at level OFF."""
    g = torch.Generator().manual_seed(1)
    x = {"input": torch.rand(5, 3, generator=g), "mask": torch.rand(5, 3, generator=g) < 0.5}
    for level, often in ((dist.DebugLevel.INFO, 1), (dist.DebugLevel.DETAIL, 1), (dist.DebugLevel.OFF, 0)):
        dist.set_debug_level(level)
        for name in ("masked_mean", "masked_var", "masked_softmax"):
            for dim, sends in ((0, True), (1, False)):
                with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gathering:
                    compare(name, x, dict.fromkeys(x, [S0]), dim=dim)
                backward = name == "masked_softmax"
                assert gathering.call_count == often * sends * (1 + backward), (level, name, dim, gathering.call_count)


CASES = {
    "shapes": limited(shapes),
    "dtypes": limited(dtypes),
    "options": limited(options),
    "functions": limited(functions),
    "in backward": limited(in_backward),
    "redistributed": limited(redistributed),
    "gradients": limited(gradients),
    "counts": limited(counts),
    "on two dims": limited(on_two_dims),
    "alike": limited(alike),
    "detail": limited(shapes, dist.DebugLevel.DETAIL),
}
