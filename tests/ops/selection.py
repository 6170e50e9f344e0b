"""The ops that move elements: compaction, selection and scattering by a mask, gathering by an index."""

import torch

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import KEEP, NAN, X, bad_fill_values, bad_masks, must
from tests.ops.gpu import Case, indices, keep, masked, numbers
from tests.ops.operands import data, mask, plain, plain_mask
from tests.ops.record import NO_MASK, NO_SUM, NO_WEIGHT, ONE_OPERAND, Record
from tests.ops.truth import saturated

FIELDS = {"dtype_rule": "input"}
SKIP = NO_SUM | NO_WEIGHT | {"finite": "not arithmetic: what is selected is kept as it is"}
MOVES = {"gradient_overflow": "gradients are moved, never added up"}
PACKED = {"masked_upstream": "the result is packed: upstream gradients have other places than the mask"}


# ---- definitions


def _fill(input, fill_value, out_dtype):
    fill = torch.tensor(fill_value, dtype=input.dtype, device=input.device)
    return saturated(fill, out_dtype) if input.is_floating_point() else fill


def masked_compact(input, mask, *, capacity, fill_value=0, out_dtype=torch.float64):
    mask = mask.expand(input.shape[: mask.dim()])
    where = mask.reshape(-1).nonzero().squeeze(1)[:capacity]
    rest = input.shape[mask.dim() :]
    result = input.reshape(mask.numel(), *rest)[where]
    unused = capacity - len(where)
    values = torch.cat([result, _fill(input, fill_value, out_dtype).expand(unused, *rest)])
    return values, torch.cat([where, where.new_full((unused,), -1)]), mask.sum()


def masked_select(input, mask):
    return torch.masked_select(input, mask)


def masked_scatter(input, mask, source):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    where = mask.expand(shape).reshape(-1).nonzero().squeeze(1)[: source.numel()]
    out = input.expand(shape).reshape(-1)
    return out.index_copy(0, where, source.reshape(-1)[: len(where)]).reshape(shape)


def safe_gather(input, dim, index, *, fill_value=0, out_dtype=torch.float64):
    fill = _fill(input, fill_value, out_dtype)
    size = input.shape[dim] if input.dim() else 1
    if size == 0:
        return fill.expand(index.shape) + input.sum().to(input.dtype)
    inside = (index >= 0) & (index < size)
    return torch.where(inside, torch.gather(input, dim, torch.where(inside, index, 0).long()), fill)


def safe_index_select(input, dim, index, *, fill_value=0, out_dtype=torch.float64):
    fill = _fill(input, fill_value, out_dtype)
    size = input.shape[dim] if input.dim() else 1
    index = index.reshape(-1)
    if size == 0:
        shape = list(input.shape)
        shape[dim] = len(index)
        return fill.expand(shape) + input.sum().to(input.dtype)
    inside = (index >= 0) & (index < size)
    taken = torch.index_select(input, dim, torch.where(inside, index, 0).long())
    along = [1] * input.dim()
    if along:
        along[dim] = -1
    return torch.where(inside.reshape(along), taken, fill)


# ---- by a mask


def _compact(x, m, capacity, fill_value=0, **options):
    return Sample((x, m), {"capacity": capacity, "fill_value": fill_value}, mask=1, masked=(0,), **options)


def _bad_compact():
    def call(*args, capacity=4, **kwargs):
        return args, {"capacity": capacity, **kwargs}

    name = "masked_compact"
    yield from bad_masks(name, lambda m: call(X, m))
    yield Bad(*call([1.0], KEEP), TypeError, (name, "input", "tensor", "list"))
    yield Bad(*call(X.to(torch.float8_e4m3fn), KEEP), TypeError, (name, "input", "float8"))
    yield Bad(*call(X, KEEP[None]), ValueError, (name, "mask", "(1, 2, 5)", "(2, 5)"))
    yield Bad(*call(X, KEEP[0]), ValueError, (name, "mask", "(5,)", "first 1", "(2, 5)"))
    yield Bad(*call(X[:1], KEEP), ValueError, (name, "mask", "(2, 5)", "(1, 5)"))
    yield Bad(*call(X, KEEP, capacity=-1), ValueError, (name, "capacity", "-1"))
    yield Bad(*call(X, KEEP, capacity=4.0), TypeError, (name, "capacity", "float"))
    yield Bad(*call(X, KEEP, capacity=True), TypeError, (name, "capacity", "bool"))
    yield Bad(*call(X, KEEP, capacity=None), TypeError, (name, "capacity", "NoneType"))
    yield Bad(*call(X, KEEP, capacity=torch.tensor(4)), TypeError, (name, "capacity", "Tensor"))
    for capacity in (2**59, 2**62, 2**63, 10**30):
        yield must(name, "capacity", *call(X, KEEP, capacity=capacity), ValueError)
    yield from bad_fill_values(name, X, KEEP, capacity=4)
    yield Bad(*call(X.int(), KEEP, fill_value=NAN), ValueError, (name, "fill_value", "torch.int32"))


def _compact_case(n, dtype, seed):
    mask = keep(n, seed)
    return Case(lambda x: safeops.masked_compact(x, mask, capacity=n // 2)[0], (numbers(n, dtype, seed),))


Record(
    "masked_compact",
    masked_compact,
    [
        _compact(data(3, 5), mask(3, 5), 12, name="room to spare", slow=True),
        _compact(data(3, 5), mask(3, 5), 4, name="count beyond the capacity", slow=True),
        _compact(data(3, 5), mask(1, 5), 9, -1e9, name="mask broadcast, fill beyond half"),
        _compact(data(2, 3, 4, 5), mask(2, 1, 4, 5), 70, float("-inf"), name="four dimensions", smooth=False),
        _compact(data(40), mask(40), 0, name="no slot at all"),
    ],
    bad_calls=_bad_compact(),
    call={"input": plain(), "mask": plain_mask(), "capacity": 20, "fill_value": 2.0},
    gpu=_compact_case,
    launches=((1, 1), (1, 0)),  # one memory operation: it sets the tiles' status to 0
    workspace=5,
    skip=SKIP | ONE_OPERAND | MOVES | PACKED,
    **FIELDS,
)

WAITS = "its size depends on the data: it synchronises, and a whole graph cannot hold it (documented)"
Record(
    "masked_select",
    masked_select,
    [
        Sample((data(3, 5), mask(3, 5)), mask=1, name="plain", slow=True),
        Sample((data(3, 5), mask(5)), mask=1, name="mask broadcast"),
        Sample((data(5), mask(3, 5)), mask=1, masked=(), name="input broadcast"),
        Sample((data(2, 3, 4, 5), mask(2, 1, 4, 5)), mask=1, name="four dimensions"),
    ],
    bad_calls=[
        *bad_masks("masked_select", lambda m: ((X, m), {})),
        Bad(([1.0], KEEP), {}, TypeError, ("masked_select", "input", "tensor", "list")),
    ],
    call={"input": plain(), "mask": plain_mask()},
    no_route=WAITS,
    gpu=masked("masked_select"),
    launches=((2, 1), None),  # one memory operation: the count's copy to the host
    workspace=1,
    torch_equivalent=torch.masked_select,
    skip=SKIP
    | ONE_OPERAND
    | MOVES
    | PACKED
    | dict.fromkeys(("no_sync", "compile", "inductor", "export", "cuda_graph", "vmap"), WAITS)
    | dict.fromkeys(("masked_garbage_transforms", "torch_func"), "vmap, " + WAITS),
    **FIELDS,
)


def _scatter(x, m, source, **options):
    return Sample((x, m, source), mask=1, mask_keeps=False, **{"masked": (0,), **options})


def _scatter_case(n, dtype, seed):
    mask = keep(n, seed)
    leaves = numbers(n, dtype, seed), numbers(n // 2, dtype, seed + 1)
    return Case(lambda x, source: safeops.masked_scatter(x, mask, source), leaves)


Record(
    "masked_scatter",
    masked_scatter,
    [
        _scatter(data(3, 5), mask(3, 5), data(3, 5, seed=1), name="source to spare", slow=True),
        _scatter(data(3, 5), mask(3, 5), data(5, seed=1), name="source too short", masked=(), slow=True),
        _scatter(data(3, 5), mask(3, 1), data(3, 5, seed=1), name="mask broadcast"),
        _scatter(data(5), mask(3, 5), data(3, 5, seed=1), name="input broadcast"),
        _scatter(data(2, 3, 4, 5), mask(2, 1, 4, 5), data(2, 3, 4, 5, seed=1), name="four dimensions"),
    ],
    bad_calls=[
        *bad_masks("masked_scatter", lambda m: ((X, m, X), {})),
        Bad(([1.0], KEEP, X), {}, TypeError, ("masked_scatter", "input", "tensor", "list")),
        Bad((X, KEEP, 1.0), {}, TypeError, ("masked_scatter", "source", "tensor", "float")),
        Bad((X, KEEP, X.double()), {}, TypeError, ("masked_scatter", "source", "torch.float64", "torch.float32")),
        Bad((X, KEEP, X.to("meta")), {}, ValueError, ("masked_scatter", "source", "meta")),
    ],
    call={"input": plain(), "mask": plain_mask(), "source": plain(1)},
    gpu=_scatter_case,
    launches=(lambda n: (1, int(n > 16_384)), (1, 1)),  # several tiles have a status, which is set first
    torch_equivalent=torch.masked_scatter,
    skip=SKIP | MOVES | {"mixed_dtypes": "input and source have one dtype, as in torch: others are refused"},
    **FIELDS,
)


# ---- by an index


def _indices(*shape, size, seed=0, dtype=torch.int64):
    """Returns indices with duplicates, 0, size - 1, and some out of range on either side."""
    g = torch.Generator().manual_seed(200 + seed)
    index = torch.randint(-2, size + 2, shape, generator=g)
    edges = [0, size - 1, -1, size, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    places = index.view(-1)[::2][: len(edges)]
    places.copy_(torch.tensor(edges[: len(places)]))
    return index.to(dtype)


def _pick(x, dim, index, fill_value=0, **options):
    return Sample((x,), {"dim": dim, "index": index, "fill_value": fill_value}, **options)


def _bad_picks(name, index, bad_shape):
    """Yields calls that both ops with an index refuse."""
    yield Bad(([1.0], 0, index), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((X.to(torch.float8_e4m3fn), 0, index), {}, TypeError, (name, "input", "float8"))
    yield Bad((X, 0, [0]), {}, TypeError, (name, "index", "tensor", "list"))
    for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8):
        yield Bad((X, 0, index.to(dtype)), {}, TypeError, (name, "index", "int64", str(dtype)))
    yield Bad((X, 2, index), {}, IndexError, (name, "dim", "2"))
    yield Bad((X, -3, index), {}, IndexError, (name, "dim", "-3"))
    yield Bad((X, "rows", index), {}, TypeError, (name, "dim", "rows"))
    yield Bad((X, None, index), {}, TypeError, (name, "dim", "None"))
    yield must(name, "dim", (X, True, index), {}, TypeError)
    yield Bad((X, 0, bad_shape), {}, ValueError, (name, "index", str(tuple(bad_shape.shape)), "(2, 5)"))
    yield Bad((X, 0, index.to("meta")), {}, ValueError, (name, "index", "meta"))
    yield from bad_fill_values(name, X, 0, index)
    yield Bad((X.long(), 0, index), {"fill_value": NAN}, ValueError, (name, "fill_value", "torch.int64"))


AT, ROWS = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)


def _gather_case(n, dtype, seed):
    index = indices(n, n, seed)
    return Case(lambda x: safeops.safe_gather(x, 0, index), (numbers(n, dtype, seed),))


def _clamped_gather(input, dim, index, *, fill_value=0):
    size = input.shape[dim] if input.dim() else 1
    inside = (index >= 0) & (index < size)
    return torch.where(inside, torch.gather(input, dim, index.clamp(0, max(size - 1, 0)).long()), fill_value)


Record(
    "safe_gather",
    safe_gather,
    [
        _pick(data(4, 5), 1, _indices(4, 5, size=5), name="rows", slow=True),
        _pick(data(4, 5), 0, _indices(4, 5, size=4, seed=1), -7.0, name="columns", slow=True),
        _pick(data(4, 5), 1, _indices(4, 5, size=5, dtype=torch.int32), 1e9, name="int32, fill beyond half"),
        _pick(data(2, 3, 4, 5), -2, _indices(2, 3, 4, 5, size=4, seed=2), float("inf"), name="four dimensions",
              smooth=False),
        _pick(data(30), 0, _indices(30, size=30, seed=3), name="vector"),
        _pick(data(4, 5), 1, _indices(4, 1, size=5), name="one of each row"),
    ],
    bad_calls=[
        *_bad_picks("safe_gather", AT, ROWS),
        Bad((X, 0, AT.repeat(1, 2)), {}, ValueError, ("safe_gather", "index", "(2, 10)", "(2, 5)", "dim 0")),
        Bad((X, 1, AT.repeat(2, 1)), {}, ValueError, ("safe_gather", "index", "(4, 5)", "(2, 5)", "dim 1")),
    ],
    call={"input": plain(), "dim": 1, "index": torch.tensor([[0, 9], [5, -1], [2, 2], [1, 0], [4, 5]]),
          "fill_value": 2.0},
    gpu=_gather_case,
    launches=((1, 0), None),
    workspace=20,
    torch_equivalent=_clamped_gather,
    skip=SKIP | ONE_OPERAND | NO_MASK,
    **FIELDS,
)  # fmt: skip


def _index_select_case(n, dtype, seed):
    columns = 64 if n % 64 == 0 else 1  # 64: a row is copied in packets; 1: element by element
    index = indices(n // columns, n // columns, seed)
    return Case(lambda x: safeops.safe_index_select(x.view(-1, columns), 0, index), (numbers(n, dtype, seed),))


Record(
    "safe_index_select",
    safe_index_select,
    [
        _pick(data(4, 5), 1, _indices(5, size=5), name="columns", slow=True),
        _pick(data(4, 5), 0, _indices(5, size=4, seed=1), -7.0, name="rows", slow=True),
        _pick(data(4, 12), 0, _indices(12, size=4, dtype=torch.int32), 1e9, name="int32, fill beyond half"),
        _pick(data(2, 3, 4, 5), -3, _indices(5, size=3, seed=2), float("inf"), name="four dimensions", smooth=False),
        _pick(data(30), 0, _indices(30, size=30, seed=3), name="vector"),
    ],
    bad_calls=[
        *_bad_picks("safe_index_select", ROWS, AT),
        Bad((X[0, 0], 0, ROWS), {}, ValueError, ("safe_index_select", "index", "(3,)", "one index", "()")),
    ],
    call={"input": plain(), "dim": 1, "index": torch.tensor([0, 9, 5, -1]), "fill_value": 2.0},
    gpu=_index_select_case,
    launches=((1, 0), None),
    workspace=20,
    skip=SKIP | ONE_OPERAND | NO_MASK,
    **FIELDS,
)
