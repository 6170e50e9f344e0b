"""Predicts the time of safeops' collectives on large clusters as latency + bytes / bandwidth:
`python -m benchmarks.collectives` prints it; docs/distributed.md has a summary.

The latencies, in microseconds, are from NCCL's own cost model (NVIDIA/nccl, src/graph/tuning.cc). A bandwidth is the
link's specification, in one direction, times the share of it that NCCL reaches.
"""

from math import log2

GPUS = 8  # GPUs of a node
BASE = {"tree": 4.4, "ring": 8.4}  # by protocol: tree with LL, for a few bytes; ring with Simple, for megabytes
NVLINK_HOP = {"tree": 0.52, "ring": 3.4}
NETWORK_HOP = {"tree": 5.0, "ring": 9.6}
LL_BESIDE_NETWORK = 1.8  # an NVLink hop of LL takes 1.8 times as long if a network is used, too
NVLINK = 450e3 * 0.8  # bytes per microsecond and GPU: NVLink 4 (H100, H200)
NETWORK = 50e3 * 0.9  # bytes per microsecond and GPU: NDR InfiniBand, 400 Gb/s, one adapter per GPU
MEMORY = 4.8e6 * 0.9  # bytes per microsecond: H200
TENSOR_CORES = 989e6 * 0.7  # bf16 operations per microsecond: H100, H200


def _hops(ranks):
    """Returns a ring's (hops inside nodes, hops between nodes)."""
    nodes = -(-ranks // GPUS)
    return ranks - nodes, nodes - 1


def all_reduce_small(ranks):
    """Returns the microseconds of an all-reduce of a few bytes, which goes up and down a tree."""
    inside, nodes = min(ranks, GPUS) - 1, -(-ranks // GPUS)
    hop = NVLINK_HOP["tree"] * (LL_BESIDE_NETWORK if nodes > 1 else 1)
    return BASE["tree"] + 2 * (inside * hop + log2(nodes) * NETWORK_HOP["tree"])


def all_gather(ranks, bytes_of_each):
    """Returns the microseconds of an all-gather on a ring: each rank's part passes through all other ranks."""
    inside, between = _hops(ranks)
    speed = NETWORK if between else NVLINK
    latency = BASE["ring"] + inside * NVLINK_HOP["ring"] + between * NETWORK_HOP["ring"]
    return latency + (ranks - 1) * bytes_of_each / speed


def all_reduce_large(ranks, size):
    """Returns the microseconds of a ring's all-reduce of `size` bytes: a reduce-scatter, then an all-gather."""
    return 2 * all_gather(ranks, size / ranks) - BASE["ring"]


def data_parallel(ranks, elements=2**26, itemsize=2):
    """Predicts a masked mean of `elements` on each rank.

    Returns microseconds of (the mean's all-reduce, reading the local shard and its mask once, gathering the input from
    all ranks instead)."""
    return all_reduce_small(ranks), elements * (itemsize + 1) / MEMORY, all_gather(ranks, elements * itemsize)


def vocabulary_parallel(ranks, rows=8192, classes=131072, width=4096):
    """Predicts a loss of bf16 logits (rows, classes) whose classes are sharded, and the linear layer that makes them.

    Returns microseconds of (gathering 16 bytes per row, three passes over the local logits, gathering all logits
    instead, the layer's all-reduce of the input's gradient in fp32, the layer's four local products)."""
    logits = rows * classes / ranks * 2
    classes_alone = all_gather(ranks, 16 * rows), 3 * logits / MEMORY, all_gather(ranks, logits)
    return *classes_alone, all_reduce_large(ranks, rows * width * 4), 4 * logits * width / TENSOR_CORES


def _text(microseconds):
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= scale:
            return f"{microseconds / scale:.3g} {unit}"
    return f"{microseconds:.3g} us"


def table(head, rows):
    lines = [head, ["---:"] * len(head), *([str(ranks), *map(_text, times)] for ranks, times in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown():
    data = ["ranks", "all-reduce of 16 bytes", "the local kernel", "gathering the input"]
    classes = ["ranks", "16 bytes a row", "local kernels", "gathering the logits"]
    classes += ["`linear_cross_entropy`: input's gradient", "its products"]
    return "\n\n".join(
        (
            table(data, [(ranks, data_parallel(ranks)) for ranks in (8, 64, 512, 4096)]),
            table(classes, [(ranks, vocabulary_parallel(ranks)) for ranks in (2, 4, 8, 16)]),
        )
    )


if __name__ == "__main__":
    print(markdown())
