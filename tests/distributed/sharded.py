"""Makes DTensors for the cases of processes.py, and compares a call on them with the call on plain tensors."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import safeops
from safeops.core.op import Op, registry
from safeops.distributed import _collectives
from tests.callers.calls import CALLS

TOLERANCE = {torch.float16: 1e-6, torch.float32: 1e-6, torch.float64: 1e-12}
COVERED = {op.name: op.shards for op in registry.values() if getattr(op, "shards", None) and op.name in CALLS}
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


@functools.cache
def mesh(dims=1):
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if dims == 1 else (2, world // 2), mesh_dim_names=("dp", "tp")[:dims])


def laid_out(x, mesh, placements):
    """Lays x out as a DTensor. Each rank has all of x, so nothing is sent."""
    return distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)


def distributed(x, placements, grad=True):
    """Returns x as a DTensor, an autograd leaf if floating. A partial placement gets terms that differ: 3 x and -2
    x."""
    shared = laid_out(x, mesh(len(placements)), [R if p.is_partial() else p for p in placements])
    for i, p in enumerate(placements):
        if p.is_partial():
            place = shared.device_mesh.get_coordinate()[i]
            terms = (3, -2) if shared.device_mesh.size(i) > 1 else (1,)  # their sum is x
            part = shared.to_local() * (terms[place] if place < len(terms) else 0)
            shared = DTensor.from_local(part, shared.device_mesh, placements, shape=x.shape, stride=x.stride())
    return shared.requires_grad_(x.is_floating_point() and grad)


def compare(name, operands, placements, kind=torch.float32, constant=("weight",), size=0, take=None, **options):
    """Compares values and gradients of a call on plain tensors and on DTensors, which must not take the composite.

    operands, placements: by name. size: of a gradient's terms, if they cancel. take: selects one of several results.
    """
    plain = {k: x.clone().requires_grad_(x.is_floating_point() and k not in constant) for k, x in operands.items()}
    shared = {k: distributed(x, placements[k], k not in constant) for k, x in operands.items()}
    function = getattr(safeops, name)

    def call(**tensors):
        result = function(**tensors, **options)
        return result if take is None else take(result)

    want = call(**plain)
    refuse = mock.Mock(side_effect=AssertionError(f"{name} took the composite"))
    record = registry[name]
    record = record if isinstance(record, Op) else record.parts[0]
    with mock.patch.object(type(record), "composite", refuse):
        got = call(**shared)
    assert isinstance(got, DTensor) and got.shape == want.shape and got.dtype == want.dtype
    close(got, want, TOLERANCE[kind])
    if not want.requires_grad:
        return got
    upstream = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(7))
    leaves = [k for k, x in plain.items() if x.requires_grad]
    wants = torch.autograd.grad(want, [plain[k] for k in leaves], upstream)
    same = laid_out(upstream, got.device_mesh, [R] * got.device_mesh.ndim)
    gots = torch.autograd.grad(got, [shared[k] for k in leaves], same)
    for g, w in zip(gots, wants):
        assert g.dtype == w.dtype
        close(g, w, TOLERANCE[kind], size)
    return got


def close(got, want, tolerance, size=0):
    """Asserts that a DTensor and a plain tensor are close, each rank for its own part."""
    finite = want.detach()[want.isfinite()]
    atol = tolerance * max(size, float(finite.abs().max()) if finite.numel() else 0)
    assert got.shape == want.shape
    if any(p.is_partial() for p in got.placements):
        actual = got.full_tensor()
    else:
        actual, want = got.to_local(), laid_out(want, got.device_mesh, got.placements).to_local()
    torch.testing.assert_close(actual, want, rtol=tolerance, atol=atol, equal_nan=True)


FIRSTS = {how: name for name, how in reversed(COVERED.items())} | {"ternary": "gaussian_nll_loss"}


def layouts(dtype, name):
    """Returns the placements to test, on a mesh of one dim and of two. Layouts do not depend on the op: of the ops
    whose parts combine alike only the first gets all, in fp64, which shows smaller errors."""
    every = [S0], [S1, S0], [S1], [R], [S0, S1], [S0, R], [R, S0], [S0, S0]
    return every if dtype == torch.float64 and name in FIRSTS.values() else every[:2]


def operands(name, shape, dtype, keys):
    """Returns {key: tensor}: numbers between 0 and 1, which every op accepts; masks keep little, and nothing in some
    rows."""
    g = torch.Generator().manual_seed(3)
    tensors = {}
    for key in keys:
        if key in ("mask", "fill_mask"):
            keep = torch.rand(shape, generator=g) < 0.4
            keep[: shape[0] // 2] = False
            tensors[key] = keep
        else:
            tensors[key] = (torch.rand(shape, generator=g, dtype=torch.float64) * 0.9 + 0.05).to(dtype)
    return tensors


def tensors_of(name, *also):
    """Returns the names of an op's full-size operands, followed by `also`."""
    skip = ("mask", "weight", "denominator", "pos_weight")
    return [k for k, x in CALLS[name].items() if isinstance(x, torch.Tensor) and x.dim() == 2 and k not in skip] + [
        *also
    ]


class sending:
    """Context manager: gives a list of the bytes of each message that this rank sends by safeops' collectives."""

    def __enter__(self):
        sent, gather, add = [], _collectives.all_gather, dist.all_reduce

        def gathered(output, input, **options):
            sent.append(input.nbytes)
            return gather(output, input, **options)

        def added(x, **options):
            sent.append(x.nbytes)
            return add(x, **options)

        self.patches = (
            mock.patch.object(_collectives, "all_gather", gathered),
            mock.patch.object(dist, "all_reduce", added),
        )
        for patch in self.patches:
            patch.start()
        return sent

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
