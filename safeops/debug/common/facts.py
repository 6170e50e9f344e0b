"""The facts of an ATen op that recorders need, worked out once per overload from its schema."""

import functools

import torch

from safeops.core import NAME, private_torch
from safeops.debug.common.products import PRODUCTS

# Ops that read no values: the result depends on shapes alone, or is uninitialized memory.
_VALUELESS = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided ones ones_like zeros zeros_like "
    "new_ones new_zeros rand rand_like randn randn_like randint randint_like arange linspace eye resize_ set_ "
    "sym_size sym_stride sym_numel sym_storage_offset record_stream".split()
)
# Ops that overwrite their first argument without reading it: it is not an operand.
_OVERWRITES = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ "
    "_foreach_copy_ _foreach_zero_".split()
)
_CONSTANTS = frozenset("full full_like new_full fill fill_ masked_fill masked_fill_ scalar_tensor lift_fresh".split())
# Namespaces of collectives: the call returns before its results are there.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "fsdp::all_gather_copy_in")
_SELECTS = frozenset("where masked_fill masked_scatter masked_select index index_put nan_to_num".split())


class Facts:
    """The op's name, and what it does with its arguments and results.

    writes, unread: (position, name) of each argument that it writes, or does not read. mask: position of the mask of a
    safeops op, or None. scaler: True for GradScaler's check for inf. unfinished: True for a collective, whose results
    arrive after the call. The others are flags, too."""

    __slots__ = (
        "name",
        "writes",
        "foreach_writes",
        "returns_alias",
        "valueless",
        "constant",
        "pointwise",
        "fused",
        "scaler",
        "unread",
        "ours",
        "mask",
        "product",
        "selects",
        "unfinished",
    )

    def __init__(self, func):
        schema = private_torch.schema(func)
        self.name = schema.name.partition("::")[2]
        self.writes = tuple(
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.foreach_writes = bool(self.writes) and self.name.startswith("_foreach_")
        overwrites = self.name in _OVERWRITES
        self.unfinished = schema.name.startswith(_COLLECTIVES) and self.name != "wait_tensor"
        received = self.name.startswith("recv")
        self.unread = frozenset(
            (i, argument.name)
            for i, argument in enumerate(schema.arguments)
            if argument.is_out
            or (overwrites and i == 0)
            or (self.unfinished and ("output" in argument.name or received and i == 0))
        )
        self.ours = schema.name.startswith(f"{NAME}::")
        masks = (i for i, argument in enumerate(schema.arguments) if argument.name == "mask")
        self.mask = next(masks, None) if self.ours else None
        self.returns_alias = not self.writes and any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        self.valueless = self.name in _VALUELESS
        self.product = self.name.rstrip("_") in PRODUCTS
        self.selects = self.name.rstrip("_") in _SELECTS
        self.constant = self.name in _CONSTANTS
        self.scaler = self.name == "_amp_foreach_non_finite_check_and_unscale_"
        self.fused = self.name.startswith("_fused_")  # a fused optimizer
        self.pointwise = torch.Tag.pointwise in func.tags or self.name in ("masked_fill", "masked_fill_")


@functools.cache
def facts(func):
    return Facts(func)


_COUNTED = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128]
)


def run(func, args, kwargs):
    """Call func inside a dispatch mode. There torch does not count a foreach op's writes (an optimizer's) as new
    versions of the tensors, and a backward that needs the old values would be silently wrong: count them here."""
    result = func(*args, **kwargs)
    if isinstance(func, private_torch.OpOverload) and facts(func).foreach_writes:
        lists = (args[i] if i < len(args) else kwargs.get(name) for i, name in facts(func).writes)
        torch.autograd.graph.increment_version([x for x in tensors_in(lists) if not x.is_inference()])
    return result


def is_plain(x):
    """True if the values can be counted: floating or complex dtype, strided, on a real device, not empty."""
    return (
        x.dtype in _COUNTED
        and x.layout is torch.strided
        and not (x.is_meta or x.is_nested or x.is_quantized)
        and x.numel() > 0
    )


def tensors_in(values):
    """Yield every tensor in the arguments or results of an op: single, in lists, or in lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
