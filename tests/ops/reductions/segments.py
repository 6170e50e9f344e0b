"""Reductions of packed sequences, along the first dim."""

import torch

import safeops
from safeops.testing import Bad, Sample
from safeops.verify.calls import by_sequence
from tests.ops import gpu
from tests.ops.bad_calls import KEEP, BadIndex, X, bad_masks, must
from tests.ops.operands import HUGE, data, mask, plain, plain_mask, weights
from tests.ops.record import BY_COMPOSITE, NO_WEIGHT, ONE_OPERAND, Record
from tests.ops.reductions.reduction import ONE, SKIP
from tests.ops.truth import kept

# ---- definitions: the sequences as rows, padded to one length


def _sequences(input, cu_seqlens, segment_ids, num_segments, mask, weight):
    """Returns (x, weight, keep), each (S, T, *rest), a row per sequence; x and weight are 0 where not kept."""
    keep = kept(input.shape, mask, weight).to(input.device)
    rows = torch.arange(input.shape[0], device=input.device)
    if segment_ids is None:
        member = (rows >= cu_seqlens[:-1, None]) & (rows < cu_seqlens[1:, None])
    else:
        member = segment_ids == torch.arange(num_segments, device=input.device)[:, None]
    keep = keep & member.reshape(*member.shape, *(1,) * (input.dim() - 1))
    w = torch.ones_like(input) if weight is None else weight
    return torch.where(keep, input, 0), torch.where(keep, w, 0), keep


def _result(value, keep, empty):
    return torch.where(keep.any(1), value, float("nan") if empty == "nan" else 0.0)


def segment_sum(input, *, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero"):
    x, w, keep = _sequences(input, cu_seqlens, segment_ids, num_segments, mask, weight)
    return _result((x * w).sum(1), keep, empty)


def segment_mean(input, *, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero"):
    x, w, keep = _sequences(input, cu_seqlens, segment_ids, num_segments, mask, weight)
    return _result((x * w).sum(1) / torch.where(keep.any(1), w.sum(1), 1), keep, empty)


def segment_max(input, *, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero"):
    """Returns each sequence's largest kept element. k tied elements share the gradient, 1 / k each."""
    x, _, keep = _sequences(input, cu_seqlens, segment_ids, num_segments, mask, weight)
    if not x.numel():
        return _result(x.sum(1), keep, empty)
    top = torch.where(keep, x, -torch.inf).detach().amax(1, keepdim=True)
    ties = keep & ((x == top) | (x.isnan() & top.isnan()))
    value = torch.where(ties, x / ties.to(x.dtype).sum(1, keepdim=True).clamp(min=1), 0).sum(1)
    return _result(value, keep, empty)


# ---- the op as the contract's checks call it: by_sequence makes cu_seqlens, or segment_ids, from `ends`

ENDS = 3, 3, 4, 10


def _samples():
    def sample(x, **options):
        fields = {key: options.pop(key) for key in ("name", "slow") if key in options}
        return Sample((x,), {"ends": ENDS, **options}, differentiable=(0,), **fields)

    yield sample(data(10, 3), mask=mask(10, 3), name="columns", slow=True)
    yield sample(data(11, 3), mask=mask(11, 1), weight=weights(11, 3), name="weights, mask of rows", slow=True)
    yield sample(data(20, seed=1), mask=mask(20), weight=weights(20), name="one column")
    yield sample(data(9, 2, 3), weight=weights(3), name="three dims, weight broadcast")
    yield sample(data(12, 5, seed=2), name="neither mask nor weight")


def _samples_by_ids():
    options = {"ends": ENDS, "shuffled": True, "mask": mask(13, 4)}
    yield Sample((data(13, 4, seed=3),), options, differentiable=(0,), name="ids in any order")
    yield Sample((data(14, seed=4),), {"ends": ENDS, "shuffled": True}, name="ids of one column")


def _weight_samples():
    """Yields samples for the gradient to the weight."""
    yield Sample((data(10, 3),), {"ends": ENDS, "mask": mask(10, 3), "weight": weights(10, 3)}, name="weight")
    yield Sample((data(10, 3),), {"ends": ENDS, "weight": weights(10, 1), "shuffled": True}, name="weight of rows")


CU, IDS = torch.tensor([0, 1, 2]), torch.tensor([1, 0])


def _bad_calls(name):
    def bad(error, *words, x=X, kind=Bad, **kwargs):
        return kind((x,), kwargs, error, (name, *words))

    ids = {"segment_ids": IDS, "num_segments": 2}
    yield from bad_masks(name, lambda m: ((X,), {"cu_seqlens": CU, "mask": m}))
    yield bad(TypeError, "input", "tensor", "list", x=[1.0], cu_seqlens=CU)
    yield bad(TypeError, "input", "floating", "torch.int64", x=X.long(), cu_seqlens=CU)
    yield bad(ValueError, "input", "rows", "()", x=X[0, 0], cu_seqlens=CU)
    yield bad(ValueError, "cu_seqlens", "segment_ids", "neither", "(2, 5)")
    yield bad(ValueError, "cu_seqlens", "segment_ids", "both", "(2, 5)", cu_seqlens=CU, **ids)
    yield bad(ValueError, "segment_ids", "num_segments", segment_ids=IDS)
    yield bad(TypeError, "cu_seqlens", "tensor", "list", cu_seqlens=[0, 2])
    yield bad(TypeError, "cu_seqlens", "int64", "torch.float32", cu_seqlens=CU.float())
    yield bad(TypeError, "segment_ids", "int64", "torch.uint8", segment_ids=IDS.byte(), num_segments=2)
    yield bad(ValueError, "cu_seqlens", "(1, 3)", cu_seqlens=CU[None])
    yield bad(ValueError, "cu_seqlens", "(0,)", cu_seqlens=CU[:0])
    yield bad(ValueError, "cu_seqlens", "meta", cu_seqlens=CU.to("meta"))
    yield bad(ValueError, "segment_ids", "(1,)", "(2, 5)", segment_ids=IDS[:1], num_segments=2)
    yield bad(ValueError, "segment_ids", "meta", segment_ids=IDS.to("meta"), num_segments=2)
    yield bad(ValueError, "num_segments", "3", "(3,)", cu_seqlens=CU, num_segments=3)
    for count in (-1, HUGE):
        yield must(name, "num_segments", (X,), {"segment_ids": IDS, "num_segments": count}, ValueError)
    for count in (2.0, True, "2", torch.tensor(2)):
        yield must(name, "num_segments", (X,), {"segment_ids": IDS, "num_segments": count}, TypeError)
    wrong_bounds = ([1, 1, 2], ("start", "1")), ([0, 2, 1, 2], ("decrease", "2", "1")), ([0, 1], ("end", "(2, 5)", "1"))
    for wrong, words in wrong_bounds:
        yield bad(ValueError, "cu_seqlens", *words, kind=BadIndex, cu_seqlens=torch.tensor(wrong))
    for wrong in (2, -1):
        ids = torch.tensor([0, wrong])
        yield bad(IndexError, f"segment id {wrong}", "num_segments=2", kind=BadIndex, segment_ids=ids, num_segments=2)
    yield bad(ValueError, "weight", "(3,)", "(2, 5)", cu_seqlens=CU, weight=torch.ones(3))
    yield bad(TypeError, "weight", "floating", "torch.bool", cu_seqlens=CU, weight=KEEP)
    yield bad(ValueError, "weight", "meta", cu_seqlens=CU, weight=X.to("meta"))
    yield bad(ValueError, "empty", "ignore", "zero", cu_seqlens=CU, empty="ignore")
    rows = torch.tensor([[True], [False]])
    yield bad(ValueError, "empty", "raise", "5 of 10", cu_seqlens=CU, mask=rows, empty="raise")


def _gpu_case(name):
    def make(n, dtype, seed):
        """Returns a call on n elements: sequences of a thousand rows, with 64 columns if 64 divides n, else one."""
        columns = 64 if n % 64 == 0 else 1
        rows, keep = n // columns, gpu.keep(n, seed).view(n // columns, columns)
        cu_seqlens = torch.arange(0, rows + 1000, 1000, device="cuda").clamp(max=rows)

        def call(x):
            return getattr(safeops, name)(x.view(rows, columns), cu_seqlens=cu_seqlens, mask=keep)

        return gpu.Case(call, (gpu.numbers(n, dtype, seed),))

    return make


def _torch_of(reduce):
    """Returns torch.segment_reduce as a function of our arguments; a sum or maximum takes a mask, a mean none."""

    def call(input, *, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero"):
        if weight is not None or segment_ids is not None or mask is not None and reduce == "mean":
            raise TypeError("torch has none")
        neutral = -torch.inf if reduce == "max" else 0
        x = input if mask is None else torch.where(mask, input, neutral)
        return torch.segment_reduce(x, reduce, offsets=cu_seqlens, axis=0, initial=0 if reduce == "sum" else None)

    return call


SAVED = {"saved_bytes": "it keeps cu_seqlens, which is no operand of the samples: test_what_is_saved"}
ORDER = dict.fromkeys(("saved_bytes", "peak_memory"), "ids are sorted: an order of the rows is made")

for definition in (segment_sum, segment_mean, segment_max):
    name = definition.__name__
    by_ids = {"ids": (_samples_by_ids(), {"data": (0,), "skip": SKIP | ONE_OPERAND | ORDER | NO_WEIGHT})}
    weighted = {"gradient of the weight": (_weight_samples(), {"data": (0,), "skip": SKIP | BY_COMPOSITE})}
    Record(
        name,
        definition,
        _samples(),
        bad_calls=_bad_calls(name),
        call={"input": plain(), "cu_seqlens": torch.tensor([0, 2, 2, 5]), "segment_ids": None, "num_segments": None,
              "mask": plain_mask(), "weight": plain(2), "empty": "zero"},
        gpu=_gpu_case(name),
        variants=by_ids if definition is segment_max else by_ids | weighted,
        data=(0,),
        torch_equivalent=_torch_of(name.removeprefix("segment_")),
        skip=SKIP | ONE | (SAVED if definition is segment_max else {}),
        adapt=by_sequence,
    )  # fmt: skip
