"""Measures ops on DTensors in several gloo processes of this machine: bytes sent, and time. They are compared with the
local kernel alone, `torch.distributed.tensor.parallel.loss_parallel`, and a gather of the sharded operands. Each rank
has one thread."""

import contextlib
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import safeops

RANKS = 2, 4
ELEMENTS, ROWS, CLASSES, WIDTH = 2**22, 512, 32768, 256  # sizes of the global tensors
COLUMNS = 256


class Wire(TorchDispatchMode):
    """Counts the collectives that start inside the context, and the bytes that this rank puts into them."""

    def __init__(self):
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor handles the op first; the collectives that it calls come here
        starts = not any(text in str(op) for text in ("wait", "wrap", "barrier"))
        if starts and op.namespace in ("c10d", "_c10d_functional"):
            sent = args[1] if "gather" in str(op) and op.namespace == "c10d" else args[0]
            self.calls += 1
            self.bytes += sum(x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(sent))
        return op(*args, **(kwargs or {}))


def cases(mesh):
    """Returns {op: {contender: function that runs forward and backward}}. Contenders: safeops on DTensors, the local
    kernel on this rank's shard, and rivals."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    def share(x, placement):
        return distribute_tensor(x, mesh, [placement]).requires_grad_(x.is_floating_point())

    def local_copy(x):
        return x.to_local().detach().clone().requires_grad_(x.is_floating_point())

    g = torch.Generator().manual_seed(0)
    x, y = (share(torch.randn(ELEMENTS, generator=g), Shard(0)) for _ in range(2))
    mask = share(torch.rand(ELEMENTS, generator=g) < 0.5, Shard(0))
    local_x, local_y, local_mask = local_copy(x), local_copy(y), local_copy(mask)
    logits = share(torch.randn(ROWS, CLASSES, generator=g), Shard(1))
    teacher = share(torch.randn(ROWS, CLASSES, generator=g), Shard(1)).detach()
    local_teacher = local_copy(teacher).detach()
    target = share(torch.randint(CLASSES, (ROWS,), generator=g), Replicate())
    local_logits, plain_target = local_copy(logits), target.to_local()
    local_target = plain_target % local_logits.shape[1]
    hidden = share(torch.randn(ROWS, WIDTH, generator=g), Replicate())
    layer = share(torch.randn(CLASSES, WIDTH, generator=g), Shard(0))
    local_hidden, local_layer = local_copy(hidden), local_copy(layer)

    def by_loss_parallel(loss):
        with loss_parallel():
            loss().backward()

    def gathered(x):
        return x.redistribute(placements=[Replicate()]).to_local()

    def divergence(loss):
        return {
            "ours": lambda: loss(logits, teacher).backward(),
            "local": lambda: loss(local_logits, local_teacher).backward(),
            "gathering": lambda: loss(gathered(logits), gathered(teacher)).backward(),
        }

    def linear():
        return F.cross_entropy(F.linear(hidden, layer), target)

    return {
        "masked_mean": {
            "ours": lambda: safeops.masked_mean(x, mask).backward(),
            "local": lambda: safeops.masked_mean(local_x, local_mask).backward(),
            "gathering": lambda: safeops.masked_mean(gathered(x), gathered(mask)).backward(),
        },
        "mse_loss": {
            "ours": lambda: safeops.mse_loss(x, y, mask=mask).backward(),
            "local": lambda: safeops.mse_loss(local_x, local_y, mask=local_mask).backward(),
            "gathering": lambda: safeops.mse_loss(gathered(x), gathered(y), mask=gathered(mask)).backward(),
        },
        "cross_entropy": {
            "ours": lambda: safeops.cross_entropy(logits, target).backward(),
            "local": lambda: safeops.cross_entropy(local_logits, local_target).backward(),
            "loss_parallel": lambda: by_loss_parallel(lambda: F.cross_entropy(logits, target)),
            "gathering": lambda: safeops.cross_entropy(gathered(logits), plain_target).backward(),
        },
        **{name: divergence(getattr(safeops, name)) for name in ("kl_div_with_logits", "js_div_with_logits")},
        "linear_cross_entropy": {
            "ours": lambda: safeops.linear_cross_entropy(hidden, layer, target).backward(),
            "local": lambda: safeops.linear_cross_entropy(local_hidden, local_layer, local_target).backward(),
            "loss_parallel": lambda: by_loss_parallel(linear),
            "gathering": lambda: safeops.linear_cross_entropy(
                hidden.to_local(), gathered(layer), plain_target
            ).backward(),
        },
    }


def partials(mesh):
    """Returns {op: {contender: function}} for ops that reduce the sharded dim 0, so that ranks exchange partial
    results."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = torch.randn(ELEMENTS // COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(0))
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    local = sharded.to_local().clone().requires_grad_()
    sharded.requires_grad_()

    def contenders(call):
        return {
            "ours": lambda: call(sharded).sum().backward(),
            "local": lambda: call(local).sum().backward(),
            "gathering": lambda: call(sharded.redistribute(placements=[Replicate()]).to_local()).sum().backward(),
        }

    names = "masked_sum", "masked_var", "masked_amax", "masked_norm", "masked_logsumexp", "masked_softmax", "normalize"
    results = {name: contenders(functools.partial(getattr(safeops, name), dim=0)) for name in names}
    return {**results, "cosine_similarity": contenders(lambda x: safeops.cosine_similarity(x, x, dim=0))}


def seconds(call) -> float:
    """Runs `call` on all ranks. Returns the seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def latency(rounds: int) -> list[dict]:
    """Returns records with the milliseconds of an all-reduce at several sizes, from which its latency and bandwidth
    follow."""
    records = []
    for size in (16, 2**12, 2**16, 2**20, 2**24):
        buffer = torch.zeros(size // 4)
        taken = [seconds(lambda: dist.all_reduce(buffer)) for _ in range(4 * rounds)]  # noqa: B023
        records.append({"bytes": size, "milliseconds": statistics.median(taken) * 1e3})
    return records


def on_this_rank(rounds: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, records = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for op, contenders in {**cases(mesh), **partials(mesh)}.items():
        wires = {}
        for name, call in contenders.items():
            call()
            with Wire() as wires[name]:
                call()
        samples = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, call in contenders.items():
                samples[name].append(seconds(call))
        milliseconds = {name: statistics.median(taken) * 1e3 for name, taken in samples.items()}
        records.append(
            {
                "op": op,
                "ranks": dist.get_world_size(),
                "milliseconds": milliseconds,
                "bytes": {name: wire.bytes for name, wire in wires.items()},
                "collectives": {name: wire.calls for name, wire in wires.items()},
            }
        )
    return {"ops": records, "all_reduce": [{"ranks": dist.get_world_size(), **r} for r in latency(rounds)]}


def measure(rounds: int) -> dict:
    """Returns {"ops": a record for each op and number of ranks, "all_reduce": the times of a bare all-reduce}."""
    results = {"ops": [], "all_reduce": []}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.distributed", folder, str(ranks), str(rounds)]
            environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, timeout=900)
            records = json.loads((Path(folder) / "records").read_text())
        for key, more in records.items():
            results[key] += more
    return results


def start(rank: int, folder: str, ranks: int, rounds: int):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    result = on_this_rank(rounds)
    if rank == 0:
        (Path(folder) / "records").write_text(json.dumps(result))
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(start, (sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), nprocs=int(sys.argv[2]))
