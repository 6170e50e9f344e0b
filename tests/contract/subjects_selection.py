"""The selection ops as subjects: adversarial samples, what users write today, and why a check is left out."""

import torch

from safeops.testing import Sample
from tests.contract import definitions_selection
from tests.contract import subjects as base
from tests.contract.bad_calls_selection import BAD_CALLS
from tests.contract.subjects import NO_SUM, data, mask

SELECTS = {
    "finite": "not arithmetic: what is selected is kept as it is",
    "weight_zero": "has no weight",
}
ONE = {
    "mixed_dtypes": "one floating operand",
    "partial_gradients": "one floating operand",
}
NO_MASK = {
    check: "has no mask" for check in ("masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept")
}
MOVES = {"gradient_overflow": "gradients are moved, never added up"}


def subject(name, samples, *, skip, **describe):
    return base.subject(
        name,
        samples,
        skip=NO_SUM | SELECTS | skip,
        definitions=definitions_selection,
        bad_calls=BAD_CALLS,
        dtype_rule="input",
        **describe,
    )


def _clamped_gather(input, dim, index, *, fill_value=0):
    size = input.shape[dim] if input.dim() else 1
    keep = (index >= 0) & (index < size)
    return torch.where(keep, torch.gather(input, dim, index.clamp(0, max(size - 1, 0)).long()), fill_value)


def indices(*shape, size, seed=0, dtype=torch.int64):
    """Duplicates, both ends, and some out of range on either side."""
    g = torch.Generator().manual_seed(200 + seed)
    index = torch.randint(-2, size + 2, shape, generator=g)
    edges = [0, size - 1, -1, size, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    places = index.view(-1)[::2][: len(edges)]
    places.copy_(torch.tensor(edges[: len(places)]))
    return index.to(dtype)


def selections():
    def compact(x, m, capacity, fill_value=0, **options):
        return Sample((x, m), {"capacity": capacity, "fill_value": fill_value}, mask=1, masked=(0,), **options)

    moved = "the result is packed: upstream gradients have other places than the mask"
    yield subject(
        "masked_compact",
        [
            compact(data(3, 5), mask(3, 5), 12, name="room to spare", slow=True),
            compact(data(3, 5), mask(3, 5), 4, name="count beyond the capacity", slow=True),
            compact(data(3, 5), mask(1, 5), 9, -1e9, name="mask broadcast, fill beyond half"),
            compact(data(2, 3, 4, 5), mask(2, 1, 4, 5), 70, float("-inf"), name="four dimensions", smooth=False),
            compact(data(40), mask(40), 0, name="no slot at all"),
        ],
        skip=ONE | MOVES | {"masked_upstream": moved},
    )
    waits = "its size depends on the data: it synchronises, and a whole graph cannot hold it (documented)"
    yield subject(
        "masked_select",
        [
            Sample((data(3, 5), mask(3, 5)), mask=1, name="plain", slow=True),
            Sample((data(3, 5), mask(5)), mask=1, name="mask broadcast"),
            Sample((data(5), mask(3, 5)), mask=1, masked=(), name="input broadcast"),
            Sample((data(2, 3, 4, 5), mask(2, 1, 4, 5)), mask=1, name="four dimensions"),
        ],
        torch_equivalent=torch.masked_select,
        skip=ONE
        | MOVES
        | {"masked_upstream": moved}
        | {c: waits for c in ("no_sync", "compile", "inductor", "export", "cuda_graph", "vmap")}
        | {c: "vmap, " + waits for c in ("masked_garbage_transforms", "torch_func")},
    )

    def scatter(x, m, source, **options):
        return Sample((x, m, source), mask=1, mask_keeps=False, **{"masked": (0,), **options})

    yield subject(
        "masked_scatter",
        [
            scatter(data(3, 5), mask(3, 5), data(3, 5, seed=1), name="source to spare", slow=True),
            scatter(data(3, 5), mask(3, 5), data(5, seed=1), name="source too short", masked=(), slow=True),
            scatter(data(3, 5), mask(3, 1), data(3, 5, seed=1), name="mask broadcast"),
            scatter(data(5), mask(3, 5), data(3, 5, seed=1), name="input broadcast"),
            scatter(data(2, 3, 4, 5), mask(2, 1, 4, 5), data(2, 3, 4, 5, seed=1), name="four dimensions"),
        ],
        torch_equivalent=torch.masked_scatter,
        skip=MOVES | {"mixed_dtypes": "input and source have one dtype, as in torch: others are refused"},
    )

    def pick(x, dim, index, fill_value=0, **options):
        return Sample((x,), {"dim": dim, "index": index, "fill_value": fill_value}, **options)

    yield subject(
        "safe_gather",
        [
            pick(data(4, 5), 1, indices(4, 5, size=5), name="rows", slow=True),
            pick(data(4, 5), 0, indices(4, 5, size=4, seed=1), -7.0, name="columns", slow=True),
            pick(data(4, 5), 1, indices(4, 5, size=5, dtype=torch.int32), 1e9, name="int32, fill beyond half"),
            pick(
                data(2, 3, 4, 5),
                -2,
                indices(2, 3, 4, 5, size=4, seed=2),
                float("inf"),
                name="four dimensions",
                smooth=False,
            ),
            pick(data(30), 0, indices(30, size=30, seed=3), name="vector"),
            pick(data(4, 5), 1, indices(4, 1, size=5), name="one of each row"),
        ],
        torch_equivalent=_clamped_gather,
        skip=ONE | NO_MASK,
    )
    yield subject(
        "safe_index_select",
        [
            pick(data(4, 5), 1, indices(5, size=5), name="columns", slow=True),
            pick(data(4, 5), 0, indices(5, size=4, seed=1), -7.0, name="rows", slow=True),
            pick(data(4, 12), 0, indices(12, size=4, dtype=torch.int32), 1e9, name="int32, fill beyond half"),
            pick(data(2, 3, 4, 5), -3, indices(5, size=3, seed=2), float("inf"), name="four dimensions", smooth=False),
            pick(data(30), 0, indices(30, size=30, seed=3), name="vector"),
        ],
        skip=ONE | NO_MASK,
    )
