"""Cases that run the samples of every op's record on DTensors and compare with one process. Run by processes.py.

The subject lays the plain operands out as DTensors, calls the op, and gathers the results.
"""

import functools
import re

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import safeops
from safeops.core.private_torch import tree_leaves, tree_map_only
from safeops.testing import run
from safeops.testing.compare import assert_outcomes_close, assert_right
from safeops.testing.subject import outputs
from tests.callers.test_dtensor import REFUSED
from tests.distributed.sharded import mesh
from tests.ops import RECORDS
from tests.ops.bad_calls import BadIndex

REFUSED_ARGUMENTS = {"cu_seqlens", "group"}  # they say what this process holds
NAMES = [name for name, record in RECORDS.items() if not isinstance(record.samples, str)]


def over_ranks(op, dim, like):
    """Returns the op for plain tensors that become DTensors: those with the size of `like` along `dim` are sharded
    there, all others are replicated."""

    def share(x):
        cut = x.dim() == len(like) > 0 and x.shape[dim] == like[dim]
        placement = Shard(dim % x.dim()) if cut else Replicate()
        replicated = DTensor.from_local(x, mesh(), [Replicate()], run_check=False)
        return replicated.redistribute(placements=[placement])

    def call(*args, **kwargs):
        results = op(*tree_map_only(torch.Tensor, share, args), **tree_map_only(torch.Tensor, share, kwargs))
        assert all(isinstance(x, DTensor) for x in outputs(results))
        return tree_map_only(DTensor, lambda x: x.full_tensor(), results)

    return call


def check(name):
    """Values and gradients equal one process's, with operands sharded along the first or last dim; or the op refuses
    DTensors, if it is in REFUSED."""
    subject = next(RECORDS[name].subjects())
    for i, sample in enumerate(subject.samples):
        if sample.kwargs.get("packed"):
            continue  # the record flattens the rows, which DTensors with rows of uneven shards refuse
        sample = sample.cast(torch.float32)
        like = max((x.shape for x in sample.operands().values()), key=len)
        want = run(subject.op, sample)
        for dim in (0, -1) if like else (0,):
            try:
                got = run(over_ranks(subject.op, dim, like), sample, want.upstream or None)
            except TypeError as error:
                refused_by_name = re.match(rf"{name}: \w+ must be no DTensor", str(error))
                assert name in REFUSED and refused_by_name, (i, dim, error)
                continue
            assert name not in REFUSED
            where = f"sample {i}, sharded along {dim}"
            if subject.terms is None:
                assert_outcomes_close(got, want, where)
            else:  # terms may cancel
                assert_right(sample, got, subject.truth(sample, want.upstream or None), where)


def laid_out(x, i):
    """Returns x as a DTensor, sharded if i is 0, else replicated. Each rank has all of x, so nothing is sent."""
    replicated = DTensor.from_local(x, mesh(), [Replicate()], run_check=False)
    return replicated.redistribute(placements=[Shard(0) if i == 0 and x.dim() else Replicate()])


def refused(name):
    """The record's bad calls raise the same errors on DTensors, with the placements after each shape."""
    op = getattr(safeops, name)
    for bad in RECORDS[name].bad_calls:
        tensors = [x for x in tree_leaves((bad.args, dict(bad.kwargs))) if isinstance(x, torch.Tensor)]
        if not tensors or not all(type(x) is torch.Tensor and x.layout == torch.strided and x.is_cpu for x in tensors):
            continue
        shared = {id(x): laid_out(x, i) for i, x in enumerate(tensors)}
        args, kwargs = tree_map_only(torch.Tensor, lambda x: shared[id(x)], (bad.args, dict(bad.kwargs)))  # noqa: B023
        (kind, want), (other, got) = error_of(op, bad.args, bad.kwargs), error_of(op, args, kwargs)
        if isinstance(bad, BadIndex) and not got:
            continue  # a rank must not raise for a wrong class or box that it alone sees
        if "must be no DTensor" in got and (name in REFUSED or REFUSED_ARGUMENTS & set(bad.kwargs)):
            continue
        assert other is kind and all(word in got for word in bad.words), (want, got)
        for shape in {str(tuple(x.shape)) for x in tensors if x.dim() and str(tuple(x.shape)) in want}:
            assert any(f"{shape} as {list(x.placements)}" in got for x in shared.values()), (want, got)


def error_of(op, args, kwargs):
    try:
        op(*args, **kwargs)
    except (TypeError, ValueError, IndexError) as error:
        return type(error), str(error)
    return None, ""


CASES = {name: functools.partial(check, name) for name in NAMES} | {
    f"{name}, bad calls": functools.partial(refused, name) for name in NAMES
}
