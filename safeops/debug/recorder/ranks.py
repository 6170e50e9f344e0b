"""The exchange of the ranks of a training about a step that was not finite.

They meet in torch's key-value store, so that no rank waits in a collective for one that is not there. A step without a
finding costs nothing; each sixteenth asks the store for one key.

| who finds it | because | the ranks meet |
|---|---|---|
| all, at one step | gradients are averaged, or one flag goes over the mesh of sharded ones | at that step |
| one rank alone | only its loss is not finite, or gradients are not averaged yet | at such, or each 16th |
"""

import datetime
import pickle
import time

import torch
import torch.distributed as dist

from safeops.core import check, private_torch

EVERY = 16  # steps between two looks at what one rank alone has found
PATIENCE = 120  # seconds that a rank waits for the replay of another


def exchange():
    """The Exchange of this process, or None if it is alone."""
    return Exchange() if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


class Exchange:
    made = 0  # in this process: the ranks make theirs in the same order

    def __init__(self):
        Exchange.made += 1
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore(f"safeops-recorder-{Exchange.made}", private_torch.default_store())
        self.asked = None  # the step of the last look
        self.alone = None  # what this rank alone has found, until the ranks meet

    def hold(self, report):
        """Keep a report that this rank alone has, and tell the others where they will look for it."""
        report.rank = self.rank
        self.alone = self.alone or report
        place = f"alone/{report.step // EVERY + 1}"
        self.store.set(f"{place}/{self.rank}", _pickled(report))
        self.store.set(place, b"1")

    def news(self, step, last):
        """The report that one rank alone had at an earlier step, or None. Each rank calls it at the end of a step.
        last: the training ends, and the ranks meet no more."""
        if last and self.alone is not None:
            return self._choose([self.alone])
        if step % EVERY or step == self.asked:
            return None
        self.asked, place = step, f"alone/{step // EVERY}"
        if not self.store.check([place]):
            return None
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        return self._choose([pickle.loads(self.store.get(key)) for key in keys if self.store.check([key])])

    def first(self, step, report):
        """Tell the others this rank's report of a step that all found, and hear theirs. Returns the one that comes
        first in the order of the step's ops."""
        report.rank = self.rank
        if self.alone is not None and report.is_unknown:
            report = self.alone
        self.store.set(f"step/{step}/{self.rank}", _pickled(report))
        reports, until = [report], time.monotonic() + PATIENCE
        for rank in range(self.size):
            if rank == self.rank:
                continue
            key, left = f"step/{step}/{rank}", max(0.1, until - time.monotonic())
            try:
                self.store.wait([key], datetime.timedelta(seconds=left))
                reports.append(pickle.loads(self.store.get(key)))
            except RuntimeError as error:
                report.notes.append(f"rank {rank} told nothing of its replay: {str(error).splitlines()[0]}")
        first = self._choose(reports)
        for other in reports:
            if other is not first and other.is_unknown:
                first.notes.append(f"rank {other.rank}'s own replay is finite: it got NaN or inf by a collective")
            first.notes += [f"rank {other.rank}: {note}" for note in other.notes
                            if other is not first and note.startswith("the replay ended")]  # fmt: skip
        return first

    def _choose(self, reports):
        self.alone = None
        result = min(reports, key=lambda report: (report.is_unknown, not report.bug, report.index, report.rank))
        result.is_elsewhere = result.rank != self.rank
        return result


def _pickled(report):
    frames, report.frames = report.frames, []  # (they are many, and hold code objects)
    try:
        return pickle.dumps(report)
    finally:
        report.frames = frames


class patience:
    """In a replay that all ranks make together: a collective whose partner has failed ends after PATIENCE seconds."""

    def __enter__(self):
        self.before = private_torch.set_group_timeout(datetime.timedelta(seconds=PATIENCE))

    def __exit__(self, *error):
        private_torch.set_group_timeout(self.before)


def place_in_mesh(model):
    """This rank's coordinates in the mesh of the model's first DTensor: "dp 1, tp 0"; "" without one."""
    mesh = next((mesh for mesh in map(check.mesh, model.parameters()) if mesh is not None), None)
    if mesh is None or mesh.get_coordinate() is None:
        return ""
    names = mesh.mesh_dim_names or [f"dim {i}" for i in range(mesh.ndim)]
    return ", ".join(f"{name} {i}" for name, i in zip(names, mesh.get_coordinate()))


def is_replicated(model):
    """True if DistributedDataParallel averages the gradients of this model."""
    return any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in model.modules())


def is_averaged(model):
    """True if it does so in this step."""
    kind = torch.nn.parallel.DistributedDataParallel
    return any(isinstance(m, kind) and m.require_backward_grad_sync for m in model.modules())
