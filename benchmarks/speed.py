"""Times forward and backward of one case: our function, the patterns, and the copy of as many bytes."""

from __future__ import annotations

import torch

from .case import DTYPES, Case
from .timing import copy_of, interleave


def calls(function, inputs, backward: bool) -> dict:
    """Returns {"forward": function that runs it, "backward": function that runs it, if there is a backward}."""
    directions = {"forward": lambda: function(*inputs)}
    if backward:
        output = function(*inputs)
        # a dense upstream gradient, as in training; .sum().backward() would pass an expanded scalar
        grad = torch.ones_like(output)
        directions["backward"] = lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)
    return directions


def measure(case: Case, dtype: str, device: str, rounds: int, with_compile: bool) -> list[dict]:
    """Returns a record for each direction."""
    functions = {"ours": case.ours, **{f"eager: {text}": f for text, f in case.eager.items()}}
    if with_compile and case.compiled is not None:
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # a graph's backward runs many times
        functions["compile"] = torch.compile(case.compiled, dynamic=False)
    inputs = dict.fromkeys(functions, case.inputs)
    if case.arithmetic:
        compute = torch.promote_types(torch.float32, DTYPES[dtype])
        functions["bare"] = case.aten
        inputs["bare"] = tuple(x.detach().to(compute).requires_grad_() for x in case.inputs)
    backward = case.backward_bytes is not None
    by_name = {name: calls(function, inputs[name], backward) for name, function in functions.items()}
    return [
        _record(case, dtype, direction, bytes_, {name: by_name[name][direction] for name in by_name}, rounds, device)
        for direction, bytes_ in (("forward", case.forward_bytes), ("backward", case.backward_bytes))
        if bytes_ is not None
    ]


def _record(case, dtype, direction, bytes_per_element, contenders, rounds, device) -> dict:
    total = round(bytes_per_element * case.elements)
    samples = interleave({"copy": copy_of(total, device), **contenders}, rounds, device)
    seconds = {name: taken.time() for name, taken in samples.items()}
    eager = [name for name in samples if name.startswith("eager: ")]
    record = {
        "op": case.op,
        "variant": case.variant,
        "dtype": dtype,
        "direction": direction,
        "elements": case.elements,
        "bytes_per_element": bytes_per_element,
        "milliseconds": {name: time * 1e3 for name, time in seconds.items()},
        "undisturbed": {name: taken.share_clean() for name, taken in samples.items()},
        "copy_GB_per_s": total / seconds["copy"] / 1e9,
        "ours_GB_per_s": total / seconds["ours"] / 1e9,
        "of_floor": seconds["copy"] / seconds["ours"],
        "eager_pattern": eager[0].removeprefix("eager: "),
        "x_eager": seconds[eager[0]] / seconds["ours"],
        "x_fastest_eager": min(seconds[name] for name in eager) / seconds["ours"],
    }
    if device == "cuda":
        record["host_us"] = {name: taken.host() * 1e6 for name, taken in samples.items()}
    if "bare" in samples:
        record["of_bare"] = seconds["bare"] / seconds["ours"]
    if "compile" in samples:
        record["x_compile"] = seconds["compile"] / seconds["ours"]
    return record
