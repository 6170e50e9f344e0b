"""The samples of every op's record on DTensors, beside one process, by the contract's harness. Run by processes.py.

The subject is the op between two layouts: plain operands are laid out, and its results put together again.
"""

import functools

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from safeops._torch import tree_map_only
from safeops.testing import run
from safeops.testing.compare import assert_outcomes_close
from safeops.testing.subject import outputs
from tests.callers.test_dtensor import REFUSED
from tests.distributed.dtensors import mesh
from tests.ops import RECORDS

NAMES = [name for name, record in RECORDS.items() if not isinstance(record.samples, str)]


def over_ranks(op, dim, like):
    """op on DTensors: what has the shape of `like` along a dim is sharded there, the rest is replicated."""

    def share(x):
        cut = x.dim() == len(like) > 0 and x.shape[dim] == like[dim]
        placement = Shard(dim % x.dim()) if cut else Replicate()
        whole = DTensor.from_local(x, mesh(), [Replicate()], run_check=False)
        return whole.redistribute(placements=[placement])

    def call(*args, **kwargs):
        results = op(*tree_map_only(torch.Tensor, share, args), **tree_map_only(torch.Tensor, share, kwargs))
        assert all(isinstance(x, DTensor) for x in outputs(results))
        return tree_map_only(DTensor, lambda x: x.full_tensor(), results)

    return call


def check(name):
    """Same values and gradients, with the operands sharded along their first dim, and along their last; or refused."""
    subject = next(RECORDS[name].subjects())
    for i, sample in enumerate(subject.samples):
        sample = sample.cast(torch.float32)
        like = max((x.shape for x in sample.operands().values()), key=len)
        want = run(subject.op, sample)
        for dim in (0, -1) if like else (0,):
            try:
                got = run(over_ranks(subject.op, dim, like), sample, want.upstream or None)
            except TypeError as error:
                assert name in REFUSED and str(error).startswith(f"{name}: input must be no DTensor"), (i, dim, error)
                continue
            assert name not in REFUSED
            assert_outcomes_close(got, want, f"sample {i}, sharded along {dim}")


CASES = {name: functools.partial(check, name) for name in NAMES}
