"""The predicted time of safeops' collectives on clusters that are not here, alpha + beta n: printed by
`python -m benchmarks.collectives`; docs/distributed.md has a summary.

The constants are those of NCCL's own cost model (NVIDIA/nccl, src/graph/tuning.cc), in microseconds; the bandwidths
are the links' specified ones, in one direction, times the share of them that NCCL reaches.
"""

from math import log2

GPUS = 8  # of a node
BASE = {"tree": 4.4, "ring": 8.4}  # tree: LL, for messages of bytes; ring: Simple, for megabytes
NVLINK_HOP = {"tree": 0.52, "ring": 3.4}
NETWORK_HOP = {"tree": 5.0, "ring": 9.6}
LL_BESIDE_NETWORK = 1.8  # NVLink hops of LL take so much longer where there is a network
NVLINK = 450e3 * 0.8  # bytes a microsecond of a GPU: NVLink 4 (H100, H200)
NETWORK = 50e3 * 0.9  # NDR InfiniBand, 400 Gb/s, one adapter a GPU
MEMORY = 4.8e6 * 0.9  # H200
TENSOR_CORES = 989e6 * 0.7  # bf16 operations a microsecond, H100 and H200


def _hops(ranks):
    """(inside nodes, between nodes) of a ring."""
    nodes = -(-ranks // GPUS)
    return ranks - nodes, nodes - 1


def all_reduce_small(ranks):
    """The all-reduce of a few bytes goes up and down a tree."""
    inside, nodes = min(ranks, GPUS) - 1, -(-ranks // GPUS)
    hop = NVLINK_HOP["tree"] * (LL_BESIDE_NETWORK if nodes > 1 else 1)
    return BASE["tree"] + 2 * (inside * hop + log2(nodes) * NETWORK_HOP["tree"])


def all_gather(ranks, bytes_of_each):
    """Each rank's part passes all others on a ring."""
    inside, between = _hops(ranks)
    speed = NETWORK if between else NVLINK
    latency = BASE["ring"] + inside * NVLINK_HOP["ring"] + between * NETWORK_HOP["ring"]
    return latency + (ranks - 1) * bytes_of_each / speed


def all_reduce_large(ranks, size):
    """A ring does a reduce-scatter, then an all-gather."""
    return 2 * all_gather(ranks, size / ranks) - BASE["ring"]


def data_parallel(ranks, elements=2**26, itemsize=2):
    """(the mean's collective, reading the shard once, gathering the input instead), of `elements` on each rank."""
    return all_reduce_small(ranks), elements * (itemsize + 1) / MEMORY, all_gather(ranks, elements * itemsize)


def vocabulary_parallel(ranks, rows=8192, classes=131072, width=4096):
    """Times of bf16 logits (16 bytes a row gathered, three passes over the local logits, all logits gathered), and of
    the linear layer before them (the input's gradient summed in fp32, four local products)."""
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
