"""The unsafe patterns that `audit` knows. Each check looks at one call from Python: its arguments, or its result.

A check yields (code, detail) pairs. It may read values: an audit is allowed to wait for the device.
"""

import contextlib
import math

import torch

from safeops.core.op import registry
from safeops.debug.common import advice
from safeops.debug.common.source import called_by
from safeops.debug.common.twins import OF_CLASSES

# code: (what happens, what to write instead)
PATTERNS = {
    "half-overflow": (
        "a result in half is inf where its operands are finite",
        advice.OVERFLOW,
    ),
    "overflow": ("a result is inf where its operands are finite, and the dtype is wide", advice.RANGE),
    "half-sum": ("sums in half have lost what was added: 2048 + 1 is 2048 in fp16", advice.SUMS),
    "nan-born": ("NaN from operands that hold none", "select before the arithmetic (mask=), or the safe_* function"),
    "times-mask": ("multiplies NaN or inf by a mask's 0: that is NaN", advice.FORWARD["mul"]),
    "small-divisor": (
        "divides by less than the smallest normal number",
        "safeops.safe_div(a, b, eps=...), safe_reciprocal, safe_rsqrt; where 0 is a value like others (a place, a "
        "time), leave those elements out",
    ),
    "domain": (
        "a logarithm, root or arc function where it has no value or no gradient",
        "safeops.safe_log, safe_sqrt, safe_pow, safe_acos, safe_acosh, safe_asin",
    ),
    "eps-is-zero": (
        "an eps that is 0 in the dtype of its operand",
        "safe_div(a, b, eps=eps, fill_value=None) for a / (b + eps), safe_log(x, eps=eps), safe_rsqrt(x, "
        "eps=eps), normalize: kept in fp32",
    ),
    "sync-read": ("reads values: the host waits for the device", "keep the value on the device"),
    "boolean-index": (
        "x[mask] copies out, and waits for the device to learn its size",
        "mask= of the losses and reductions, or safeops.masked_compact(x, mask, capacity=n)",
    ),
    "boolean-write": (
        "x[mask] = values waits for the device",
        "safeops.masked_fill(x, mask, value) or safeops.masked_scatter(x, mask, values)",
    ),
    "half-loss": (
        "a scalar loss in half: times the scaler's scale it is inf above 65504",
        "losses and reductions of safeops return fp32",
    ),
    "index-range": (
        "an index out of range: torch stops the device, a loss of safeops leaves the row out",
        "ignore_index= or mask= for the rows that have no class; safeops.safe_gather, safe_index_select",
    ),
    "device-copy": ("copies between devices", "make it where it is used; safeops.to_device for batches"),
    "rank-means": (
        "a mean of per-rank means with unequal counts: an element weighs more on the rank that has fewer",
        "denominator=safeops.distributed.global_count(masks), unless something divides by the global count later",
    ),
    "saved-write": (
        "writes into a tensor that autograd saved: backward will raise",
        advice.OUT_OF_PLACE,
    ),
}
WAITS = frozenset("sync-read boolean-index boolean-write device-copy".split())  # these only cost time
HALF = (torch.float16, torch.bfloat16)
_READS = frozenset(
    "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __contains__ __repr__ __format__ is_nonzero "
    "equal allclose nonzero argwhere masked_select unique unique_consecutive bincount".split()
)
_DIVISIONS = frozenset("div divide true_divide __truediv__ __div__ div_ divide_ __itruediv__ __idiv__".split())
_PRODUCTS = frozenset("mul multiply __mul__ __rmul__ mul_ multiply_ __imul__".split())
_ADDITIONS = frozenset("add add_ __add__ __radd__ __iadd__ clamp clamp_ clamp_min clamp_min_ clip maximum".split())
_LOGS = frozenset("log log_ log2 log10 log1p xlogy".split())
_ROOTS = frozenset("sqrt sqrt_".split())
_POWERS = frozenset("pow pow_ __pow__ __ipow__".split())
_ARCS = frozenset("acos acos_ asin asin_ arccos arcsin atanh arctanh".split())
_AREAS = frozenset("acosh acosh_ arccosh".split())
_BY = ", made by "  # in a logarithm's detail, before the names of the ops that made its operand
_GROWING = frozenset("exp exp2 expm1 cosh sinh pow square mul matmul mm bmm linear sum cumsum prod ctc_loss".split())
_ADD_AT = frozenset("index_add index_add_ scatter_add scatter_add_".split())
_COPIES = frozenset("to cpu cuda copy_ type".split())


def instead(code, detail):
    """The replacement to suggest for a check's code and detail: 'exp of float16 (2,) on cpu, largest 12'."""
    name = detail.partition(" of ")[0]
    if code in ("half-overflow", "overflow"):
        return advice.of_overflow(name, code == "half-overflow")
    if code == "domain":
        own = advice.of_logarithm(name, detail.partition(_BY)[2].split(", "))
        return own or advice.FORWARD.get(name.partition(" ")[0].replace("power", "pow").strip("_")) or PATTERNS[code][1]
    return (advice.of_nan(name) if code == "nan-born" else None) or PATTERNS[code][1]


def before(name, args, kwargs, makers):
    """Yield the patterns that show in the arguments. makers: {tensor: names of the calls that made it, last first}."""
    x = args[0] if args else None
    if not isinstance(x, torch.Tensor):
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if x is None:
            return
    if name in _READS or name == "where" and len(args) + len(kwargs) == 1:  # where(mask) is nonzero
        yield "sync-read", f"{name} of {_of(x)}"
    if name in ("__getitem__", "__setitem__") and _mask_in(args[1]):
        if name == "__getitem__":
            yield "boolean-index", f"{_of(x)}, {_kept(args[1])} kept"
        elif isinstance(args[2], torch.Tensor) and not _scalar(args[2], x):
            yield "boolean-write", f"{_of(x)}, {_kept(args[1])} written"
    if name in _PRODUCTS and len(args) > 1:
        yield from _times_mask(args[0], args[1])
    if name in _DIVISIONS and len(args) > 1:
        yield from _divisor(args[1], args[0])
    elif name in ("__rtruediv__", "__rdiv__", "reciprocal", "rsqrt"):
        yield from _divisor(x, x)
    elif x.dtype.is_floating_point:
        made_by = makers.get(x)
        for code, detail in _domain(name, x, args):
            yield code, detail + (f"{_BY}{', '.join(made_by)}" if made_by and name in _LOGS else "")
    if name in _ADD_AT and x.dtype in HALF:
        yield from _sum_in_half(name, x, args, kwargs)
    if name in _ADDITIONS:
        for number in (*args[1:], *(v for k, v in kwargs.items() if k in ("min", "other"))):
            yield from _eps(number, x, "adds" if "add" in name else "floor")
    if "eps" in kwargs:
        yield from _eps(kwargs["eps"], x, "eps=")
    if name in _INDEXED:
        with contextlib.suppress(TypeError, IndexError, AttributeError):  # an invalid call: torch raises for it
            yield from missing(*_INDEXED[name](*args, **kwargs))
    if name == "backward" and x.dtype in HALF and x.numel() == 1:
        yield "half-loss", f"backward of {_of(x)}"
    if name in ("__mul__", "mul", "__rmul__") and x.dtype in HALF and called_by("scale", 2, "grad_scaler.py", 20):
        yield "half-loss", f"GradScaler.scale of {_of(x)}"


def behind(name, args, kwargs, result):
    """Yield the patterns that show in the result."""
    if name in _COPIES and args and isinstance(result, torch.Tensor) and isinstance(args[0], torch.Tensor):
        source = args[1] if name == "copy_" else args[0]
        if isinstance(source, torch.Tensor) and source.device != result.device:
            yield "device-copy", f"{_of(source)} to {result.device}"
    if not isinstance(result, torch.Tensor) or not _readable(result):
        return
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and _readable(a)]
    if not operands or name.endswith("_") or name.startswith(("empty", "new_empty")) or result.isfinite().all():
        return
    if result.isnan().any() and not any(a.isnan().any() for a in operands):
        yield "nan-born", f"{name} of {', '.join(map(_of, operands))}: {int(result.isnan().sum())} NaN"
    elif all(a.isfinite().all() for a in operands) and _finite_number_args(args, kwargs):
        half = result.dtype in HALF
        if not half and (name.strip("_") not in _GROWING or name.strip("_") == "pow" and (operands[0] == 0).any()):
            return  # (a negative power of 0 is no overflow)
        top = max(float(a.abs().max()) for a in operands if a.numel())
        yield "half-overflow" if half else "overflow", f"{name} of {', '.join(map(_of, operands))}, largest {top:g}"


def is_in_place(name):
    return name in ("__setitem__", "copy_") or (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    )  # fmt: skip


def _scalar(value, x):
    """True if a single CPU number is written to another device: torch fills, without counting the mask's Trues."""
    return value.numel() == 1 and value.device.type == "cpu" != x.device.type


def _times_mask(*operands):
    for x, mask in (operands, operands[::-1]):
        if not all(isinstance(a, torch.Tensor) for a in operands) or not _readable(x) or mask.is_meta:
            continue
        hidden = mask == 0
        if mask.dtype is not torch.bool and not (((mask == 1) | hidden).all() and (mask == 1).any()):
            continue  # (all zeros need not be a mask: differences from a mean, say)
        kept = int((hidden & ~x.isfinite()).sum())
        if kept:
            yield "times-mask", f"{_of(x)} times {_of(mask)}: {kept} not finite where the mask is 0"
            return


def _sum_in_half(name, x, args, kwargs):
    """Compare a sum in half with the sum in fp32. Runs before the call, which may write into x."""
    function = getattr(torch.Tensor, name.rstrip("_"))

    def total(to):
        def read(a):
            return to(a.detach()) if isinstance(a, torch.Tensor) and a.dtype == x.dtype else a

        return function(*map(read, args), **{key: read(a) for key, a in kwargs.items()}).float()

    with contextlib.suppress(TypeError, IndexError, RuntimeError):  # an invalid call: torch raises for it
        narrow, wide, size = total(torch.Tensor.detach), total(torch.Tensor.float), total(lambda a: a.float().abs())
        if (lost := (narrow - wide).abs() > 0.05 * size).any():
            got, want = (float(sums[lost][0]) for sums in (narrow, wide))
            yield "half-sum", f"{name} of {_of(x)}: {int(lost.sum())} lost a part, the first is {got:g} of {want:g}"


def _divisor(divisor, x):
    if isinstance(divisor, torch.Tensor) and _readable(divisor):
        tiny = torch.finfo(divisor.dtype).tiny
        if small := _count(divisor, lambda v: v.abs() < tiny):
            lowest = float(divisor.detach().abs().min())
            yield "small-divisor", f"{_of(divisor)}: {small} below {tiny:g}, the smallest {lowest:g}"
    elif isinstance(divisor, (int, float)) and divisor == 0 and isinstance(x, torch.Tensor):
        yield "small-divisor", f"{_of(x)} by the number 0"


def _domain(name, x, args):
    learns = x.requires_grad
    power = name in _POWERS and len(args) > 1 and isinstance(args[1], (int, float)) and 0 < args[1] < 1
    if power or name in _ROOTS:
        name = f"power {args[1]:g}" if power else name
        condition, where = (lambda v: v <= 0) if learns else (lambda v: v < 0), "below 0"
    elif name in _LOGS:
        edge = -1 if name == "log1p" else 0
        x, condition, where = args[-1] if name == "xlogy" else x, lambda v: v <= edge, f"at or below {edge}"
        if isinstance(x, torch.Tensor) and x.dtype is torch.float16 and learns and name == "log":
            # From x = 1/65504 on, the gradient 1/x fits in half.
            condition, where = lambda v: v < 1 / 65504, "below 1.5e-05, where the gradient does not fit half"
    elif name in _ARCS:
        condition, where = (lambda v: v.abs() >= 1) if learns else (lambda v: v.abs() > 1), "beyond 1"
    elif name in _AREAS:
        condition, where = (lambda v: v <= 1) if learns else (lambda v: v < 1), "below 1"
    else:
        return
    if count := _count(x, condition):
        at = "at or " if learns and where in ("below 0", "beyond 1", "below 1") else ""
        yield "domain", f"{name} of {_of(x)}, {count} {at}{where}"


def _eps(number, x, how):
    if not isinstance(number, float) or not 0 < number < 1e-2 or not isinstance(x, torch.Tensor):
        return
    if x.dtype in HALF and float(torch.tensor(number, dtype=x.dtype)) == 0:
        yield "eps-is-zero", f"{how} {number:g} to {_of(x)}"


def _along(input, dim, index, *_, **others):
    return index, input.shape[dim] if input.dim() else 1, None


def _in_table(input, weight, *_, **others):
    return input, weight.shape[0], None


def _of_classes(input, target, weight=None, size_average=None, ignore_index=-100, *_, **others):
    return target, input.shape[1 if input.dim() > 1 else 0], target != ignore_index


def _of_ours(input, index, dim, *_):
    return _along(input, dim, index)


# function's name: a function of its arguments that returns (indices, size, mask of the indices to check or None)
_INDEXED = dict.fromkeys(("gather", "index_select"), _along)
_INDEXED |= dict.fromkeys((f"{op.raw[0]}.default" for op in registry.values() if hasattr(op, "gathers")), _of_ours)
_INDEXED |= {"embedding": _in_table, **dict.fromkeys(OF_CLASSES, _of_classes)}


def missing(index, size, counts):
    """Yield "index-range" if an index is not in [0, size). counts: bool mask of the indices to check, None: all."""
    if not isinstance(index, torch.Tensor) or index.is_floating_point() or index.is_meta:
        return
    wrong = (index < 0) | (index >= size)
    wrong = wrong if counts is None else wrong & counts
    if wrong.any():
        first = index.expand(wrong.shape)[wrong][0].item()
        yield "index-range", f"{int(wrong.sum())} of {wrong.numel()} are not in [0, {size}), the first is {first}"


def _mask_in(index):
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _kept(index):
    mask = next(part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, torch.Tensor))
    return f"{int(mask.sum())} of {mask.numel()}"


def _count(x, condition):
    return int(condition(x.detach()).sum()) if isinstance(x, torch.Tensor) and _readable(x) else 0


def _readable(x):
    return x.dtype.is_floating_point and x.layout is torch.strided and not x.is_meta and x.itemsize > 1


def _finite_number_args(args, kwargs):
    return all(math.isfinite(a) for a in (*args, *kwargs.values()) if isinstance(a, float))


def _of(x):
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
