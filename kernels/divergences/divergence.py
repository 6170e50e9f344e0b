"""kl_div_with_logits, js_div_with_logits and tv_with_logits: a divergence of the distributions p = softmax(y / T) and
q = softmax(x / T) of two rows of logits, with u = log p and v = log q:

    KL   sum p (u - v)
    JS   sum b p log(p / m) + (1 - b) q log(q / m), m = b p + (1 - b) q
    TV   sum |p - q| / 2

Their slopes are p (f - sum p f) / T by y and q (h - sum q h) / T by x, where f and h depend on the divergence: `terms`
returns p f and q h.

The maximum of a row is subtracted from its logits before they are divided by T: the quotients of large logits, each
rounded, would lose the differences. A block has its rows to itself. It sums the exponentials of both rows, and then the
divergence, from a second read if they do not fit. KL is summed in the first read, relative to both maxima:
sum exp((y - max_y) / T) ((y - max_y) - (x - max_x)). A row's state is (max_x, total_x, max_y, total_y, kl_sum).
"""

import torch
import triton
import triton.language as tl

from ..classification.cross_entropy_sums import move
from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import expm1_nonpositive, exponential, log1p_above, log_any, rounded_product
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, one_per_row, tile_at
from ..engine.row_loss import fetch_stat, store_stat
from ..engine.row_plan import ALONE, launch
from ..engine.state import EXPONENTIALS, less_maximum, lowest_maximum
from ..engine.tile import by_lane, fetch, in_batch, within
from ..engine.tiling import FLUSH

KL, JS, TV = map(tl.constexpr, range(3))  # OP
ROW_STATS = 6  # per row: maximum and log_total of x, then of y, sum q h, sum p f


@triton.jit
def js_terms(u, v, beta):
    """`terms` of JS. With d = log(smaller / larger) of p and q, and share the weight of the smaller in m:

    (1) m = larger (1 + f), f = share (e^d - 1), from -1 to 0
    (2) log(larger / m) = -log(1 + f), log(smaller / m) = d - log(1 + f)"""
    larger, q_is = tl.maximum(u, v), v > u
    d = tl.where(larger == float("-inf"), 0.0, -tl.abs(v - u))  # NaN stays
    ratio_less_1 = expm1_nonpositive(d)
    high = exponential(larger)
    low = high * (1 + ratio_less_1)
    share = tl.where(q_is, beta, 1 - beta)  # the weight of the smaller
    f = share * ratio_less_1
    log = log1p_above(f)
    of_high = (share - 1) * high * log
    of_low = tl.where(low == 0, 0.0, share * low * (d - log))
    return (
        of_high + of_low, tl.where(q_is, of_low, of_high), tl.where(q_is, of_high, of_low), tl.where(q_is, low, high),
        tl.where(q_is, high, low),
    )  # fmt: skip


@triton.jit
def terms(u, v, beta, OP: tl.constexpr):
    """Returns (a class's term of the divergence, p f, q h, p, q). Classes with probability 0 add nothing."""
    if OP == JS:
        value, of_y, of_x, p, q = js_terms(u, v, beta)
    else:
        p, q = exponential(u), exponential(v)
        if OP == KL:
            of_y = tl.where(p == 0, 0.0, p * (u - v))
            value, of_x = of_y, -p
        else:
            d = p - q
            half = tl.where(d > 0, 0.5, tl.where(d < 0, -0.5, 0.0 * d))  # NaN stays
            value, of_y, of_x = 0.5 * tl.abs(d), p * half, -q * half
    return value, of_y, of_x, p, q


@triton.jit
def read(operand, space, m, n, edge, config):
    """A tile of logits, -inf outside the rows."""
    return tl.where(edge, fetch(operand, space, m, n, edge, True, float("-inf")).to(config.C), float("-inf"))


@triton.jit
def shrink(maximum, larger, scale, C: tl.constexpr):
    """exp((maximum - larger) / T), in C; 1 where both are inf."""
    return tl.where(maximum == larger, 1.0, exponential((maximum - larger).to(C) * scale).to(maximum.dtype))


@triton.jit
def empty_state(shape: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    zero, maximum = tl.zeros(shape, DTYPE), lowest_maximum(shape, EXPONENTIALS, C).to(DTYPE)
    return maximum, zero, maximum, zero, zero


@triton.jit
def moved(kl_sum, total, max_x, max_y, larger_x, larger_y):
    """KL's sum moved to larger maxima. The caller then multiplies it by exp((max_y - larger_y) / T)."""
    return kl_sum + (move(total, max_y, larger_y) - move(total, max_x, larger_x))


@triton.jit
def add_tile(state, x, y, space, m, n, scale, config):
    C: tl.constexpr = config.C
    max_x, total_x, max_y, total_y, kl_sum = state  # (LM, LN)
    edge = within(space, m, n)
    v = by_lane(read(x, space, m, n, edge, config), config)  # (LM, LN, elements of a thread)
    u = by_lane(read(y, space, m, n, edge, config), config)
    larger_x, larger_y = tl.maximum(max_x, tl.max(v, 2)), tl.maximum(max_y, tl.max(u, 2))
    by_x, by_y = shrink(max_x, larger_x, scale, C), shrink(max_y, larger_y, scale, C)
    highest_x, highest_y = tl.expand_dims(larger_x, 2), tl.expand_dims(larger_y, 2)
    inverse_temperature = tl.expand_dims(scale, 2)
    e = exponential(less_maximum(u, highest_y) * inverse_temperature)
    if config.OP == KL:
        apart = (u - highest_y) - (v - highest_x)
        kl_sum = rounded_product(by_y, moved(kl_sum, total_y, max_x, max_y, larger_x, larger_y))
        kl_sum += tl.sum(tl.where(e == 0, 0.0, e * apart), 2)
    total_x = total_x * by_x + tl.sum(exponential(less_maximum(v, highest_x) * inverse_temperature), 2)
    return larger_x, total_x, larger_y, total_y * by_y + tl.sum(e, 2), kl_sum


@triton.jit
def merge_along(state, axis: tl.constexpr, scale, config):
    """Merges the states along one axis into one. Sums are trees of a fixed shape."""
    max_x, total_x, max_y, total_y, kl_sum = state
    larger_x, larger_y = tl.max(max_x, axis), tl.max(max_y, axis)
    highest_x, highest_y = tl.expand_dims(larger_x, axis), tl.expand_dims(larger_y, axis)
    by_x, by_y = shrink(max_x, highest_x, scale, config.C), shrink(max_y, highest_y, scale, config.C)
    if config.OP == KL:
        kl_sum = moved(kl_sum, total_y, max_x, max_y, highest_x, highest_y)
        kl_sum = tl.where(by_y == 0, 0.0, rounded_product(by_y, kl_sum))
    return (
        larger_x, tl.sum(rounded_product(total_x, by_x), axis), larger_y, tl.sum(rounded_product(total_y, by_y), axis),
        tl.sum(kl_sum, axis),
    )  # fmt: skip


@triton.jit
def merge(a, b, scale, config):
    joined = (tl.join(a[0], b[0]), tl.join(a[1], b[1]), tl.join(a[2], b[2]), tl.join(a[3], b[3]), tl.join(a[4], b[4]))
    return merge_along(joined, 1, scale, config)


@triton.jit
def log_total_of(total):
    """log_total = log(total). A row of -inf alone has no distribution: log_total is -inf, and x - log_total is NaN."""
    log_total = log_any(total)
    if total.dtype != tl.float64:  # (in fp64 log_any(0) is -inf)
        log_total = tl.where(total == 0, float("-inf"), log_total)
    return log_total


DivergenceConfig = constants("OP GIVEN AXIS WHOLE BM BN LM LN VEC C I")


@triton.jit
def divergence_kernel(
    x: Operand, y: Operand, keep: Operand, loss: Operand, row_stats: Operand, parameters: tl.float64, count: tl.tensor,
    space: Space, parts: Parts, config: DivergenceConfig,
):  # fmt: skip
    """parameters: 1 / T, b. count: the number of rows, and the distance between the numbers of a row in row_stats.
    GIVEN: x and y are parts of rows, row_stats is that of the whole rows, and `loss` gets the part's sums of q h, p f
    and the divergence."""
    C: tl.constexpr = config.C
    OP: tl.constexpr = config.OP
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    ROWS: tl.constexpr = config.BM if config.AXIS == INNER else config.BN
    group = tl.program_id(0).to(config.I)
    batch, block = group // parts.across, group % parts.across
    space = in_batch(space, batch, (x, y, keep, loss, row_stats))
    scale, beta = tl.full([1, 1], parameters[0], C), tl.full([1, 1], parameters[1], C)
    m, n = tile_at(space, block, 0, config)
    if config.GIVEN:  # (BM, 1) or (1, BN)
        next_number = count.to(tl.int64)
        max_x = fetch_stat(row_stats, next_number * 0, space, m, n).to(C)
        log_total_x = fetch_stat(row_stats, next_number, space, m, n).to(C)
        max_y = fetch_stat(row_stats, 2 * next_number, space, m, n).to(C)
        log_total_y = fetch_stat(row_stats, 3 * next_number, space, m, n).to(C)
    if config.WHOLE:
        edge = within(space, m, n)
        v, u = read(x, space, m, n, edge, config), read(y, space, m, n, edge, config)
        if not config.GIVEN:
            lowest = lowest_maximum([1, 1], EXPONENTIALS, C)
            max_x = tl.maximum(tl.max(v, ACROSS, keep_dims=True), lowest)
            max_y = tl.maximum(tl.max(u, ACROSS, keep_dims=True), lowest)
        v, u = (v - max_x) * scale, (u - max_y) * scale
        if not config.GIVEN:
            total_x = tl.sum(exponential(v), ACROSS, keep_dims=True)
            total_y = tl.sum(exponential(u), ACROSS, keep_dims=True)
            log_total_x, log_total_y = log_total_of(total_x), log_total_of(total_y)
        value, of_y, of_x, p, q = terms(u - log_total_y, v - log_total_x, beta, OP)
        value = tl.sum(tl.where(edge, value, 0.0), ACROSS, keep_dims=True)
        of_y = tl.sum(tl.where(edge, of_y, 0.0), ACROSS, keep_dims=True)
    else:
        if not config.GIVEN:
            state = empty_state([ROWS], C, tl.float64)
            for start in range(0, parts.tiles, FLUSH):
                lanes = empty_state([config.LM, config.LN], C, C)
                for t in range(start, tl.minimum(start + FLUSH, parts.tiles)):
                    m, n = tile_at(space, block, t, config)
                    lanes = add_tile(lanes, x, y, space, m, n, scale, config)
                lanes = merge_along(lanes, ACROSS, scale, config)
                state = merge(state, tl.tuple([s.to(tl.float64) for s in lanes]), scale, config)
            max_x, total_x, max_y, total_y, kl_sum = tl.tuple([tl.expand_dims(s, ACROSS) for s in state])
            log_total_x, log_total_y = log_total_of(total_x), log_total_of(total_y)
        if OP == KL:
            value = scale.to(tl.float64) * kl_sum / total_y + (log_total_x - log_total_y)
            of_y = value
        else:
            value, of_y = tl.zeros_like(max_x).to(tl.float64), tl.zeros_like(max_x).to(tl.float64)
            for start in range(0, parts.tiles, FLUSH):
                sums, others = tl.zeros([config.BM, config.BN], C), tl.zeros([config.BM, config.BN], C)
                for t in range(start, tl.minimum(start + FLUSH, parts.tiles)):
                    m, n = tile_at(space, block, t, config)
                    edge = within(space, m, n)
                    v = (read(x, space, m, n, edge, config) - max_x.to(C)) * scale - log_total_x.to(C)
                    u = (read(y, space, m, n, edge, config) - max_y.to(C)) * scale - log_total_y.to(C)
                    more, other, of_x, p, q = terms(u, v, beta, OP)
                    sums += tl.where(edge, more, 0.0)
                    others += tl.where(edge, other, 0.0)
                value += tl.sum(sums, ACROSS, keep_dims=True).to(tl.float64)
                of_y += tl.sum(others, ACROSS, keep_dims=True).to(tl.float64)
        m, n = tile_at(space, block, 0, config)
    inside = one_per_row(space, m, n, config)
    kept = inside & ((space.N if config.AXIS == INNER else space.M) > 0)
    if keep is not None:
        kept &= fetch(keep, space, m, n, inside, True)
    of_x = (tl.zeros_like(value) - 1) if OP == KL else value - of_y
    next_number = count.to(tl.int64)
    value, of_y, of_x = tl.where(kept, value, 0.0), tl.where(kept, of_y, 0.0), tl.where(kept, of_x, 0.0)
    if config.GIVEN:
        store_stat(loss, next_number * 0, space, m, n, of_x, inside)
        store_stat(loss, next_number, space, m, n, of_y, inside)
        store_stat(loss, 2 * next_number, space, m, n, value, inside)
    else:
        store_stat(loss, next_number * 0, space, m, n, value, inside)
        store_stat(row_stats, next_number * 0, space, m, n, tl.where(kept, max_x, 0.0), inside)
        store_stat(row_stats, next_number, space, m, n, tl.where(kept, log_total_x, 0.0), inside)
        store_stat(row_stats, 2 * next_number, space, m, n, tl.where(kept, max_y, 0.0), inside)
        store_stat(row_stats, 3 * next_number, space, m, n, tl.where(kept, log_total_y, 0.0), inside)
        store_stat(row_stats, 4 * next_number, space, m, n, of_x, inside)
        store_stat(row_stats, 5 * next_number, space, m, n, of_y, inside)


DIVERGENCE = declare(divergence_kernel, max_registers=(None, None))


def per_row(number):
    """One number per row, with a last dimension of size 1: it broadcasts along the classes."""
    return None if number is None else number.unsqueeze(-1)


def prepare(op, input, target, keep, row_stats=None):
    """Returns (results, arguments of row_plan.launch, its constants, its options). row_stats: those of the whole rows,
    where input and target are parts of rows; None: they are computed, and are the second result."""
    rows, compute, device = input.shape[:-1], compute_dtype(input, target), input.device
    if row_stats is None:
        row_stats, given = empty((ROW_STATS, *rows), compute, device), False
        results = empty(rows, compute, device), row_stats
        written = results[0]
    else:
        results, given = (empty((3, *rows), compute, device),), True
        written = results[0][0]
    tensors = input, target, *map(per_row, (keep, written, row_stats[0]))
    plan = DIVERGENCE, tensors, (2, 3, 4), input.shape, input.dim() - 1, compute
    options = {"phases": ALONE, "held": 2 if op is JS else 1}
    if op is JS and compute == torch.float64:
        options["registers"] = 168, 168
    constants = {"OP": op.value, "GIVEN": given, "parameters": 2, "count": written.numel()}
    return results, plan, constants, options


def check_row_stats(name, row_stats, input):
    fits = tuple(row_stats.shape) == (ROW_STATS, *input.shape[:-1]) and row_stats.is_contiguous()
    if not fits or row_stats.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name}: row_stats {tuple(row_stats.shape)} of {row_stats.dtype} are not those of the forward"
        )


def run(name, op, input, target, row_stats, keep, temperature, beta):
    results, plan, constants, options = prepare(op, input, target, keep, row_stats)
    if results[0].numel():
        launch(name, *plan, (1 / temperature, beta), constants, **options)
    return results


def launcher(name, op):
    def divergence(input, target, keep=None, temperature=1.0, beta=0.5):
        return run(name, op, input, target, None, keep, temperature, beta)

    return divergence


def launcher_of_sums(name, op):
    def divergence_sums(input, target, row_stats, keep=None, temperature=1.0, beta=0.5):
        check_row_stats("divergence_sums", row_stats, input)
        return run(name, op, input, target, row_stats, keep, temperature, beta)[0]

    return divergence_sums


kl_div_with_logits = launcher("kl_div_with_logits", KL)
js_div_with_logits = launcher("js_div_with_logits", JS)
tv_with_logits = launcher("tv_with_logits", TV)
js_div_with_logits_sums = launcher_of_sums("js_div_with_logits_sums", JS)
tv_with_logits_sums = launcher_of_sums("tv_with_logits_sums", TV)
