"""Cases of debug.recorder on several processes: the rank where a NaN was born is named, and no rank waits for ever."""

import functools
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import safeops
from safeops.debug import NonFiniteError
from tests.distributed.training import ddp, fsdp


class Logarithm(torch.nn.Module):
    """Finite where its input is positive."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.log(x))  # HERE


def prepared(wrap, **options):
    torch.manual_seed(0)
    net, *_ = wrap(torch.nn.Sequential(Logarithm()))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    return net, optimizer, safeops.debug.recorder(net, optimizer, folder=shared_folder(), **options)


def shared_folder():
    """A folder that all ranks write into."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def last():
    return dist.get_world_size() - 1


def weights(net):
    return [p.to_local().clone() if hasattr(p, "to_local") else p.detach().clone() for p in net.parameters()]


def same(a, b):
    return all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(a, b, strict=True))


def train(net, optimizer, recorder, steps, bad=2):
    """Raises NonFiniteError at the end of step `bad`, in which the last rank's batch holds a 0."""
    for i in range(steps):
        x = torch.rand(2, 3) + 0.5
        if i + 1 == bad and dist.get_rank() == last():
            x[1, 2] = 0
        before = weights(net)
        try:
            with recorder.step(x):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
        except NonFiniteError:
            assert same(before, weights(net)), "the step has reached the weights"
            raise


def raised(call):
    try:
        call()
    except NonFiniteError as error:
        return error
    raise AssertionError("no NonFiniteError")


def a_batch(wrap):
    """Every rank raises at the same step; the last one's report is whole, the others name it."""
    net, optimizer, recorder = prepared(wrap)
    error = raised(lambda: train(net, optimizer, recorder, 4))
    report = error.report
    assert (report.rank, report.step, report.op, recorder.number) == (last(), 2, "log", 2), str(report)
    assert ("that rank tells more" in str(error)) == (dist.get_rank() != last())
    assert "# HERE" in report.line.text, str(report)
    own = recorder.folder / "step-2" / f"rank-{dist.get_rank()}"
    assert (own / "step.pt").exists() and f"rank {last()}" in (own / "report.txt").read_text()
    if wrap is fsdp:
        assert report.where == f"dim 0 {last()}", report.where
    if wrap is ddp:
        assert any("rank 0's own replay is finite" in note for note in report.notes), report.notes
    recorder.close()


def a_training_goes_on(wrap):
    """With action="warn" all ranks skip the same step, and stay equal."""
    net, optimizer, recorder = prepared(wrap, action="record")
    train(net, optimizer, recorder, 4)
    assert recorder.number == 4 and recorder.found == 1
    values = weights(net)
    assert all(x.isfinite().all() for x in values)
    if wrap is ddp:
        for x in values:
            others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(others, x)
            assert all(torch.equal(x, other) for other in others)
    recorder.close()


def a_shard():
    """One rank's shard of a weight holds NaN, which no op made. (A fourth rank would hold none of the three rows.)"""
    net, optimizer, recorder = prepared(fsdp)
    if dist.get_rank() == 1:
        for p in net.parameters():
            if p.to_local().numel():
                with torch.no_grad():
                    p.to_local().fill_(torch.nan)
    report = raised(lambda: train(net, optimizer, recorder, 1, bad=0)).report
    assert report.kind == "came in" and report.rank == 1, str(report)
    recorder.close()


def a_collective():
    """An all-reduce of numbers that are finite on every rank overflows: the replay names it."""
    net, optimizer, recorder = prepared(ddp)

    def run():
        with recorder.step(x := torch.ones(2, 3)):
            total = torch.full((1,), 40000.0, dtype=torch.half)
            dist.all_reduce(total)
            (net(x).square().mean() * total.float()).sum().backward()
            optimizer.step()

    report = raised(run).report
    assert "allreduce" in report.op and report.kind in ("overflow", "undefined", "came in"), str(report)
    recorder.close()


def of_one_rank():
    """A loss that is not finite and gives finite gradients is seen by its rank alone: all raise at the 16th step."""
    net, optimizer, recorder = prepared(ddp)

    def run():
        for i in range(20):
            with recorder.step(x := torch.ones(2, 3)):
                optimizer.zero_grad()
                extra = -torch.log(torch.zeros(1)) if i == 3 and dist.get_rank() == last() else 0
                (net(x).square().mean() + extra).sum().backward()
                optimizer.step()

    error = raised(run)
    assert recorder.number == 16 and error.report.step == 4 and error.report.rank == last(), str(error)
    assert error.report.op == "log"
    values = weights(net)
    for x in values:  # the rank has not skipped an update that the others made
        others = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(others, x)
        assert all(torch.equal(x, other) for other in others)
    recorder.close()


def before_the_average():
    """A NaN of one rank in a step without all-reduce is told when the ranks meet: at the update that averages it."""
    net, optimizer, recorder = prepared(ddp)

    def run():
        for i in range(4):
            x = torch.ones(2, 3)
            if i == 1 and dist.get_rank() == last():
                x[0, 0] = 0
            averaged = i == 3
            net.require_backward_grad_sync = averaged
            with recorder.step(x):
                net(x).square().mean().backward()
                if averaged:
                    optimizer.step()

    error = raised(run)
    assert recorder.number == 4 and error.report.step == 2 and error.report.rank == last(), str(error)
    recorder.close()


def a_death(wrap):
    """A rank whose replay raises does not let the others wait: they end, and tell its reason."""
    with mock.patch.object(sys.modules["safeops.debug.recorder.ranks"], "PATIENCE", 60 if wrap is ddp else 10):
        net, optimizer, recorder = prepared(wrap)
        runs = []

        def run():
            x = torch.ones(2, 3)
            if dist.get_rank() == last():
                x[1, 2] = 0
            with recorder.step(x):
                runs.append(1)
                if len(runs) > 1 and dist.get_rank() == last():
                    raise KeyError("the data is gone")
                net(x).square().mean().backward()
                optimizer.step()

        begin = time.monotonic()
        error = raised(run)
        assert time.monotonic() - begin < 60
        text = str(error) + "".join(error.report.notes)
        assert "the replay ended with KeyError: 'the data is gone'" in text, text
        recorder.close()


def unharmed(wrap):
    """Recorded or not, a finite training is the same to the bit."""
    net, optimizer, recorder = prepared(wrap)
    torch.manual_seed(1)
    train(net, optimizer, recorder, 3, bad=0)
    recorder.close()
    result = weights(net)
    torch.manual_seed(0)
    net, *_ = wrap(torch.nn.Sequential(Logarithm()))
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.rand(2, 3) + 0.5
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    assert same(result, weights(net))


CASES = {
    **{f"{case.__name__}, {wrap.__name__}": functools.partial(case, wrap)
       for case in (unharmed, a_batch, a_training_goes_on) for wrap in (ddp, fsdp)},
    "a shard": a_shard,
    "a collective": a_collective,
    "of one rank": of_one_rank,
    "before the average": before_the_average,
    "a death, ddp": functools.partial(a_death, ddp),
    "a death, fsdp": functools.partial(a_death, fsdp),  # the last: its group is broken
}  # fmt: skip
