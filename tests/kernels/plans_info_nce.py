"""Makes plans (kernel, constants and launch options, from meta tensors) of info_nce_loss's kernels.
test_triton_build.py compiles them."""

import re

import torch
from safeops.kernels.vectors import info_nce, info_nce_backward, info_nce_units

from tests.kernels.plans_statistics import BF16, F16, F32, F64, meta

# Names of the plans that are compiled for other architectures than sm_90, too.
OFTEN = re.compile(r".* stepped info_nce\S* 256 bfloat16")
ARCHS = {
    "256": 90,
    "320": 90,
    "33": 90,
    "stepped 256": 120,
}  # name (it ends in the features' width) -> the least sm_* whose shared memory holds the plan's tiles


def cases():
    results = {}
    for dtype in (F16, BF16):
        for name, arch in ARCHS.items():
            rows, columns = 8100, int(name.split()[-1])
            query = meta((rows, columns), dtype)
            keep, temperature = (None, None) if dtype == BF16 else (meta((rows,), torch.bool), meta((), dtype))
            padded, width = info_nce_units.padded_shape(rows, columns)
            units, row_stats = meta((2, padded, width), dtype), meta((6, padded), F32)
            counter, each = meta((padded,), torch.int32), meta((rows,), F32)
            partial, scale, strength = meta((3, 2, padded), F32), meta((), F64), meta((rows,), F64)
            slopes, product = meta((padded, padded), dtype), meta((padded, width), F32)
            tensors = {
                "units": (query, query, keep, units, row_stats, counter),
                "": (units, row_stats, temperature, partial, counter, each),
                "slopes": (each, units, row_stats, temperature, slopes, scale),
                "gradients": (units, row_stats, temperature, scale, product, product, query, query, strength),
            }
            plans = {"units": info_nce_units.units_plan, "": info_nce.info_nce_plan}
            plans |= {"slopes": info_nce_backward.slopes_plan, "gradients": info_nce_backward.gradients_plan}
            for kernel, make in plans.items():
                parts = "general", "stepped" * name.startswith("stepped"), "info_nce" + f"_{kernel}" * bool(kernel)
                label = " ".join((*filter(None, parts), str(columns), str(dtype)[6:]))
                results[label] = make(tensors[kernel], arch)
    return results


def covered(plans):
    """Assert that there are plans that hold whole rows in shared memory, and plans that load them in steps."""
    for kernel in (info_nce.INFO_NCE, info_nce_backward.SLOPES):
        assert {plan.constants["WHOLE"] for plan in plans if plan.kernel is kernel} == {False, True}
