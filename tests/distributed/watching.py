"""Cases of debug.trace and debug.audit with a group: one report names the rank where it began. Run by processes.py."""

import datetime
import functools
import time
import warnings

import torch
import torch.distributed as dist

import safeops
from safeops.debug import NonFiniteError, audit, trace
from safeops.distributed import global_count
from tests.distributed.processes import raises
from tests.distributed.training import ddp, fsdp


class Logarithm(torch.nn.Module):
    """A layer that is finite where its input is positive."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.log(x))


def prepared(wrap):
    torch.manual_seed(0)
    net, *_ = wrap(torch.nn.Sequential(Logarithm()))
    return net, torch.optim.SGD(net.parameters(), 0.1)


def step(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def batch(zero_on):
    x = torch.ones(2, 3)
    if dist.get_rank() == zero_on:
        x[1, 2] = 0
    return x


def traced(wrap):
    """Where the gradients of all ranks are NaN, the report must name the cause: the logarithm on the last rank."""
    (net, optimizer), last = prepared(wrap), dist.get_world_size() - 1
    try:
        with trace(net, group=dist.group.WORLD) as tracer:
            step(net, optimizer, batch(None))
            assert tracer.report is None
            step(net, optimizer, batch(last))
    except NonFiniteError as error:
        result = error.report
        assert result is tracer.report and result.rank == last and result.step == 2
        assert result.op == "log" and "torch.log(x)" in result.line.text and result.kind == "undefined"
        assert f"step 2, rank {last}" in str(error)
        assert ("  why  " in str(error)) == (dist.get_rank() == last), error
    else:
        raise AssertionError("nothing was found")
    for p in net.parameters():  # no update took place
        assert getattr(p, "full_tensor", lambda p=p: p)().isfinite().all()


def one_warning():
    (net, optimizer), rank = prepared(ddp), dist.get_rank()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        with trace(net, action="warn", group=dist.group.WORLD) as tracer:
            step(net, optimizer, batch(0))
    messages = [str(w.message) for w in messages if "safeops" in str(w.message)]
    assert bool(messages) == (rank == 0) and all("rank 0" in text for text in messages), messages
    assert tracer.report.rank == 0
    with trace(net, action="record") as tracer:  # without a group each rank reports for itself
        torch.log(torch.tensor(0.0 if rank == 0 else 1.0, requires_grad=True)).backward()
    assert (tracer.report is not None) == (rank == 0)
    assert tracer.report is None or tracer.report.rank is None


def without_an_answer():
    """If a rank does not reach the end of a step, the others must say so within the group's timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        began = time.monotonic()
        tracer = trace(action="record", group=group).__enter__()
        raises(RuntimeError, "trace (rank 0)", "gathered", call=tracer.check)
        torch.log(torch.tensor(0.0, requires_grad=True)).backward()
        raises(NonFiniteError, "log", call=tracer.check)
        assert time.monotonic() - began < 30
        tracer.__exit__(NonFiniteError, NonFiniteError(tracer.reports[0]) if tracer.reports else None, None)
    dist.barrier()


def refused():
    for tool in (trace, audit):
        name = tool.__name__
        raises(ValueError, name, "group", call=lambda tool=tool: tool(group="all"))
        other = dist.new_group([0])
        if dist.get_rank():
            raises(ValueError, name, "this rank is not in it", call=lambda tool=tool, other=other: tool(group=other))


def keep(rank):
    return torch.arange(12) < (12 if rank == 0 else 3)


def losses(x, mask):
    """Returns {name: (loss as users write it, True if it divides by the rank's own count)}."""
    y, target = torch.zeros(12), torch.where(mask, 0, -100)
    total = global_count(mask)
    return {
        "safeops": (safeops.mse_loss(x, y, mask=mask), True),
        "safeops rows": (safeops.cross_entropy(x[:, None].expand(12, 2), target), True),
        "masked_mean": (safeops.masked_mean(x.square(), mask), True),
        "indexed": (x[mask].square().mean(), True),
        "divided": ((x * mask).square().sum() / mask.sum(), True),
        "safe_div": (safeops.safe_div((x * mask).square().sum(), mask.sum()), True),
        "rows' means": (((x * mask)[None].sum(1) / mask[None].sum(1)).mean(), True),
        "torch": (torch.nn.functional.cross_entropy(x[:, None].expand(12, 2), target), True),
        "torch's mean": (torch.nn.functional.mse_loss(x[mask], y[mask]), True),
        "global": (safeops.mse_loss(x, y, mask=mask, denominator=total), False),
        "global rows": (safeops.cross_entropy(x[:, None].expand(12, 2), target, denominator=total), False),
        "global by hand": ((x * mask).square().sum() / (total + 0), False),
        "scaled rows": ((x[None] / (mask[None].sum(1, keepdim=True) + 0.5)).mean(), False),
        "same": (x.mean(), False),
        "sum": (safeops.mse_loss(x, y, mask=mask, reduction="sum"), False),
    }


def means():
    rank, names = dist.get_rank(), losses(torch.ones(12), keep(dist.get_rank()))
    for name in names:
        with audit(select=["rank-means"], group=dist.group.WORLD) as result:
            x = torch.ones(12, requires_grad=True)
            loss, wrong = losses(x, keep(rank))[name]
            loss.backward()
        if not wrong:
            assert not result.findings, (name, result.findings)
            continue
        (finding,) = result.findings
        assert finding.code == "rank-means" and "12 on rank 0" in finding.detail and "3 on rank" in finding.detail, name
        assert f'"{name}": (' in finding.line.text, finding.line
        assert ("global_count" in str(result)) == (rank == 0)
    with audit(group=dist.group.WORLD) as result:  # the metric's mean gets no gradient, so it is no finding
        x = torch.ones(12, requires_grad=True)
        metric = x[keep(rank)].mean()
        x.sum().backward()
    assert "rank-means" not in {finding.code for finding in result.findings}
    assert metric == 1


def audited(wrap):
    """audit of a training step must report each finding once, with its ranks, and the means of three micro-batches."""
    (net, optimizer), rank, last = prepared(wrap), dist.get_rank(), dist.get_world_size() - 1
    with audit(group=dist.group.WORLD) as result:
        for i in range(3):
            out = net(batch(last))
            mask = torch.ones(2, 3, dtype=torch.bool)
            if rank == last:
                mask[1], mask[0, : i % 2] = False, False
            safeops.mse_loss(out, out.detach() * 0, mask=mask).backward()
        optimizer.step()
    codes = {finding.code: finding for finding in result.findings}
    assert codes["domain"].ranks == (last,) and codes["domain"].count == 3
    assert codes["rank-means"].count == 3 and "of 6 on rank 0, of 3 on rank" in codes["rank-means"].detail
    assert ("domain" in str(result)) == (rank == 0), str(result)
    assert "told by rank 0" in str(result) or rank == 0


CASES = {
    "trace ddp": functools.partial(traced, ddp),
    "trace fsdp": functools.partial(traced, fsdp),
    "one warning": one_warning,
    "without an answer": without_an_answer,
    "refused": refused,
    "means": means,
    "audit ddp": functools.partial(audited, ddp),
    "audit fsdp": functools.partial(audited, fsdp),
}
