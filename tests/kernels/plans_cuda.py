"""Calls of the C++ kernels for the GPU model. Each library of modelled_cuda.py has one generator here, which yields

    (op, direction, layout), operands, steps, {"read", "written": bytes, if not those of the operands and the result}

steps(read, written, launches) returns a Step for each launch: what neither the launch nor the machine code shows.
"""

from math import ceil, log, prod
from typing import NamedTuple

import torch

from benchmarks.machine_code import NONE, STORES
from tests.kernels.cuda_sources import BINARY, UNARY

SCALES = 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROLLED = ("safe_pow",)  # these ops loop over a thread's packets (kRolled in csrc/cuda/elementwise/loop.cuh)
# Matches instructions of the path that this dtype takes, in kernels with a branch for each dtype.
OWN = {torch.bfloat16: r"BF16|0x10000, RZ|0xffff0000|0x7f80|0x47804780", torch.float32: NONE}
LAST = r"IABS"  # the last block's sum of all blocks' results begins here; `rounds` has its time
SHIFTED = r"SHF\.R\.U64"  # the flat kernel's instruction for unaligned operands


class Step(NamedTuple):
    """One launch of a kernel; `kernel` matches its name. mark, avoid, most: see machine_code.main_path."""

    kernel: str
    read: int
    written: int = 0
    passes: dict = {}  # {bytes that one pass of a loop loads: number of passes}
    waits: float = 1  # how often a block waits for memory outside of loops
    rounds: int = 0  # trips to memory one after the other, in which the last block sums
    mark: str = NONE
    avoid: str = NONE
    most: bool = False


def tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for part in x for t in tensors(part)] if isinstance(x, (list, tuple)) else []


def size(x):
    """Returns the bytes of the tensors; elements repeated by stride 0 count once."""
    return sum(t.element_size() * prod(n for n, step in zip(t.shape, t.stride()) if step) for t in tensors(x))


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype)


def elementwise(n, dtype):
    """Layouts: `offset` starts at an address that is no multiple of 16 bytes; in `rows` (n / 4096, 4096) the second
    operand has one element per row."""
    x, offset, rows = empty(n, dtype=dtype), empty(n + 1, dtype=dtype)[1:], empty(n // 4096, 4096, dtype=dtype)
    column, mask = empty(n // 4096, 1, dtype=dtype), empty(n, dtype=torch.bool)

    def one(kernel, inner=0, avoid=NONE):  # inner: passes of a thread's loop
        avoid = SHIFTED if kernel == "flat_kernel" else avoid
        return lambda read, written, _: [Step(kernel, read, written, {0: inner}, avoid=avoid, most=True)]

    for op in (*UNARY, *BINARY):
        flat, count = one("flat_kernel", 4 if op in ROLLED and dtype == torch.float32 else 0), 1 + (op in BINARY)
        yield (op, "forward", "flat"), [x] * count, flat
        yield (op, "backward", "flat"), [x] * (1 + count), flat
    number = one("flat_kernel", 0 if dtype == torch.bfloat16 else 4)
    for layout, exponent, steps in (("number", 1.7, number), ("root", 1.5, one("flat_kernel"))):
        yield ("safe_pow", "forward", layout), [x, None, None, 0.0, None, exponent], steps
        yield ("safe_pow", "backward", layout), [x, x, None, None, True, False, None, None, exponent], steps
    yield ("safe_log", "forward", "offset"), [offset], one("kernel")
    yield ("safe_div", "forward", "offset"), [offset] * 2, one("kernel")
    yield ("safe_div", "forward", "rows"), [rows, column], one("rows_kernel", avoid="MUFU.RCP|CALL")  # one division
    yield ("masked_fill", "forward", "flat"), [x, mask], one("flat_kernel")
    yield ("masked_fill", "forward", "rows"), [rows, mask[: n // 4096, None]], one("rows_kernel")


def lists(n, dtype):
    """Layouts: `list` has 300 tensors (48 of them hold 3/4 of the bytes); `flat` has one tensor."""

    def steps(read, written, launches):  # in a norm, the last block adds up all blocks' sums
        blocks, passes = sum(its for _, its, *_ in launches), {dtype.itemsize: 0, 16: 0}
        passes[64] = read / blocks / 4 / 2048
        folds = [2 + ceil(blocks / 1024)] if launches[0][3] else [0]  # only the norm has shared memory
        results = [(read * its // blocks, written * its // blocks) for _, its, *_ in launches]
        rounds = [0] * (len(launches) - 1) + folds
        return [Step("scan", *part, passes, 0, last, mark=OWN[dtype]) for part, last in zip(results, rounds)]

    for layout, sizes in (("flat", [n]), ("list", [n // 64] * 48 + [n // 4 // 252] * 252)):
        x = [empty(m, dtype=dtype) for m in sizes]
        rows, factor = empty(len(x), 8, dtype=torch.int64), empty(dtype=torch.float64)
        yield ("grad_norm", "forward", layout), [x, 2.0], steps
        yield ("health", "forward", layout), [rows, 0, x], steps, {"read": size(x), "written": 0}
        yield ("clip_grad_norm_", "in place", layout), [x, factor], steps, {"written": size(x)}


def selection(n, dtype):
    """Half of the elements or rows are kept; indices are in ascending order."""
    x, mask, half = empty(n, dtype=dtype), empty(n, dtype=torch.bool), empty(n // 2, dtype=dtype)
    rows, index = empty(n // 4096, 4096, dtype=dtype), empty(n, dtype=torch.int64)
    tile = 32768 // dtype.itemsize  # elements of a tile; each of the block's 256 threads holds 8 packets
    # None: the loop is for unaligned operands and does not run. Half of a thread's 8 packets are kept: 4 stores.
    passes = {2 * dtype.itemsize: None, 2: None, 128: None, 16: None, 0: None, STORES: 4}
    ranks = 4  # waits for memory: the tile's number, its mask, and two for the other tiles' counts

    def zeros(launches):
        return [Step("^$", 0, amount) for kernel, amount, *_ in launches if not kernel]

    def ranking(kernel):  # the kernels that count the kept elements of earlier tiles
        return lambda read, written, launches: [*zeros(launches), Step(kernel, read, written, passes, ranks)]

    def select(read, written, launches):  # kernel 1 counts and stores the mask as bits; kernel 2 packs
        (_, parts, *_), (_, tiles, *_) = launches
        bits, count = n // 8, {**passes, tile // 256: tiles / parts}
        return [Step("count", n, bits, count, 0), Step("pack", read - n + bits, written, passes, 1)]

    def take(read, written, launches):  # kernel 1 writes the kept rows' numbers; kernel 2 copies these rows
        k, blocks = slots * 8, launches[-2][1]
        numbering = Step("number", mask_bytes, k, passes, ranks if blocks > 1 else 1)
        return [*zeros(launches), numbering, Step("take", read - mask_bytes + k, written - k, {0: None}, 2)]

    def put(read, written, launches):  # a thread searches the index, then loads 4 or 8 indices and elements
        at_once = {8 * (8 + dtype.itemsize): tile / 2 / 2048} if columns == 1 else {96: 1}
        return [Step("put", read, written, {**at_once, 16: ceil(log(slots * columns, 257)), 0: None}, 0)]

    def look(read, written, _):
        return [Step("look_up", read, written, {0: 0}, 2, most=True)]

    yield ("masked_select", "forward", "flat"), [x, mask], select, {"kept": n // 2}
    yield ("masked_scatter", "forward", "flat"), [x, half, mask], ranking("merge")
    yield ("masked_scatter", "backward", "flat"), [x, mask, [n // 2]], ranking("part")
    for layout, values in (("flat", x), ("rows", rows)):
        mask_bytes, slots, columns = len(values), len(values) // 2, values[0].numel()
        pack = ranking("number") if layout == "flat" else take
        read = {"read": mask_bytes + size(values) // 2}
        yield ("masked_compact", "forward", layout), [values, mask[: len(values)], slots], pack, read
        yield ("masked_compact", "backward", layout), [values[:slots], index[:slots], values.shape], put
    yield ("safe_gather", "forward", "flat"), [x, index, 0], look
    yield ("safe_index_select", "forward", "rows"), [rows, index[: len(rows)], 0], look


def gathered(blocks):
    """Rounds (trips to memory) of the last block's sum over all blocks: one to store, one to count, and one for every
    2048 blocks, since each of 256 threads reads eight of their sums at once."""
    return 2 + ceil(blocks / 2048)


def half_pixels(shape):
    """Returns the pixels of all scales after the first. Sides are powers of 2: each scale has 1/4 of the pixels
    before."""
    return sum(prod(shape) // 4**scale for scale in range(1, SCALES))


def ssim(n, dtype):
    """Layouts: images (N, 4, 512, 512) and volumes (N, 1, 64, 128, 128), with windows of 11 pixels per side."""
    shape, cube, options = (n >> 20, 4, 512, 512), (n >> 20, 1, 64, 128, 128), (1.0, 11, 1.5, 0.01, 0.03, False)

    def tiles(read, written, launches):  # 256 threads share a tile's 52 x 6 runs of windows
        ((_, blocks, *_),) = launches
        rounds = gathered(blocks) if written == 12 else 0
        return [Step("ssim", read, written, {STORES: 52 * 6 / 256}, rounds=rounds, avoid=LAST, most=True)]

    def sliding_window(read, written, launches):  # 32 slices of windows need 42 slices; 18 x 8 runs of windows
        results, slopes = [], prod(cube) * 16  # slopes: bytes that pass through memory
        slices = {STORES: 144 / 256, 24: 42, 56: 42, 57: 42}
        rows = {18: cube[4] // 32, 27: prod(cube[:4]) / (8 * launches[0][1])}
        for kernel, blocks, *_ in launches:
            if "level" in kernel:
                results.append(Step("level", 2 * size(v), 0, rows, 0, gathered(blocks), avoid=LAST, most=True))
            else:
                more = (0, slopes) if "slope" in kernel else (slopes, written) if "blur" in kernel else (0, written)
                last = {"rounds": gathered(blocks), "avoid": LAST} if "ssim" in kernel else {}
                results.append(Step("slope|blur|ssim", read + more[0], more[1], slices, 1, most=True, **last))
        return results

    def of_scales(backward):  # scale 0 moves `dtype`, the others fp32
        def steps(read, written, launches):
            results, pixels = [], prod(shape)
            for scale, (_, blocks, *_) in enumerate(launches[::-1] if backward else launches):
                images = 2 * pixels * (4 if scale else dtype.itemsize)
                halves = 2 * pixels if scale + 1 < SCALES else 0  # 4 bytes for each pixel of the two half-size images
                moved = (images + halves, images) if backward else (images, halves)
                rounds = 0 if backward else gathered(blocks)
                results.append(Step("ssim", *moved, {STORES: 52 * 6 / 256}, rounds=rounds, avoid=LAST, most=True))
                pixels //= 4
            return results[::-1] if backward else results

        return steps

    x, v = empty(*shape, dtype=dtype), empty(*cube, dtype=dtype)
    sums, coarse = empty(SCALES, 3, *shape[:2], dtype=torch.float64), empty(2 * half_pixels(shape), dtype=torch.float32)
    scales = [SCALES, *options]
    yield ("ms_ssim", "forward", "images"), [x, x, None, *scales], of_scales(False), {"written": 8}
    more = [sums, x, x, None, coarse, empty(0, dtype=torch.bool), *scales, True, True]
    yield ("ms_ssim", "backward", "images"), more, of_scales(True), {"read": 2 * size(x), "written": 2 * size(x)}
    for layout, a, steps in (("images", x, tiles), ("volumes", v, sliding_window)):
        one = empty(dtype=torch.float32)
        yield ("ssim", "forward", layout), [a, a], steps
        yield ("ssim", "backward", layout), [one, one.double(), a, a, None, 1, *options, True, True], steps


def total_variation(n, dtype):
    x, width = empty(n >> 20, 4, 512, 512, dtype=dtype), dtype.itemsize

    def walk(loaded, forward=False):  # loaded: bytes that a thread loads for four packets and neighbors
        def steps(read, written, launches):
            ((_, blocks, *_),) = launches
            passes = {loaded: read / (blocks * 256 * 64), 64: 0, 0: 0}
            rounds = gathered(blocks) if forward else 0
            return [Step("total_variation", read, written, passes, 0, rounds, avoid=LAST, most=True)]

        return steps

    yield ("total_variation", "forward", "images"), [x], walk(80 + 4 * width, forward=True)
    one = empty(dtype=torch.float32)
    yield ("total_variation", "backward", "images"), [one, one.double(), x], walk(96 + 8 * width)
