"""Cases of the divergences on DTensors with sharded classes or rows, each compared with plain tensors."""

import functools
import itertools

import torch
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from tests.distributed.sharded import S0, S1, P, R, close, compare, distributed, sending

NAMES = "kl_div_with_logits", "reverse_kl_div_with_logits", "js_div_with_logits", "tv_with_logits"
INF = float("inf")
S2 = type(S0)(2)
# (placements of input, of target, of the rows), for shape (6, 3, 11)
CLASSES = [
    ([S2], [S2], [R]),
    ([S2], [R], [R]),
    ([R], [S2], [R]),
    ([S0, S2], [S0, S2], [S0, R]),
    ([S2, S1], [S2, S1], [R, S1]),
    ([S2, S2], [S2, S2], [R, R]),
]
OTHERS = [
    ([S0], [S0], [S0]),
    ([R], [R], [R]),
    ([S0], [S2], [S0]),
    ([P], [S2], [R]),
    ([S1, R], [S1, R], [S1, R]),
]
OPTIONS = [{}, {"temperature": 0.5, "reduction": "none"}, {"reduction": "sum"}, {"denominator": 7}]


def operands(name, dtype, shape=(6, 3, 11), mask=False, weight=False):
    """Returns {name: tensor}: logits with padded classes at -inf; masked rows hold NaN and inf."""
    g = torch.Generator().manual_seed(5)
    tensors = {}
    for key in ("input", "target"):
        x = 3 * torch.randn(shape, generator=g, dtype=torch.float64)
        x[..., -2:] = -INF
        tensors[key] = x.to(dtype)
    tensors["input" if name.startswith("reverse") else "target"][..., 1] = -INF
    if mask:
        tensors["mask"] = torch.rand(shape[:-1], generator=g) < 0.6
        tensors["input"][~tensors["mask"]] = float("nan")
        tensors["target"][~tensors["mask"]] = INF
    if weight:
        tensors["weight"] = torch.rand(shape[:-1], generator=g, dtype=torch.float64).to(dtype)
        tensors["weight"][1] = 0
    return tensors


def where(layout):
    input, target, rows = layout
    return {"input": input, "target": target, "mask": rows, "weight": rows}


def check(dtype, layouts, names=NAMES, options=OPTIONS):
    for name, layout, chosen in itertools.product(names, layouts, options):
        for mask, weight in itertools.product((False, True), repeat=2):
            tensors = operands(name, dtype, mask=mask, weight=weight)
            if P in layout[0]:  # a partial placement cannot hold inf or NaN
                tensors["input"].nan_to_num_(nan=0.5, neginf=-9)
            compare(name, tensors, where(layout), dtype, **chosen)


def check_beta():
    name = "js_div_with_logits"
    tensors = operands(name, torch.float64)
    compare(name, tensors, where(CLASSES[0]), torch.float64, beta=0.1)


def check_few_classes():
    """Results are right with so few classes that some ranks have none, and with 0 classes."""
    for name, classes in itertools.product(NAMES, (5, 4, 3, 0)):
        tensors = {key: x[..., :classes].contiguous() for key, x in operands(name, torch.float64).items()}
        compare(name, tensors, where(CLASSES[0]), torch.float64, reduction="none")


def check_parts_without_a_class():
    """Results are right where a rank's part of the target, the input or both is all -inf; a NaN in such a part shows on
    all ranks."""
    for name, layout in itertools.product(NAMES, (CLASSES[0], CLASSES[5])):
        tensors = operands(name, torch.float64, (5, 1, 16))
        tensors["target"][0, :, :8] = tensors["input"][1, :, 8:] = -INF
        tensors["target"][2, :, :4] = tensors["input"][2, :, :4] = -INF
        tensors["input"][3, :, 4:8] = tensors["target"][4, :, 4:8] = -INF
        tensors["input"][3, :, 7] = tensors["target"][4, :, 6] = float("nan")
        loss = compare(name, tensors, where(layout), torch.float64, reduction="none").full_tensor()
        excluded = {"kl_div_with_logits": 1, "reverse_kl_div_with_logits": 0}.get(name)
        assert [bool(x.isinf()) for x in loss[:3]] == [i == excluded for i in range(3)], loss
        assert loss[3:].isnan().all(), loss


def check_rows_that_are_no_distribution():
    """A row with +inf, or with only -inf, must give NaN."""
    for name, key in itertools.product(NAMES, ("input", "target")):
        tensors = {key: x.nan_to_num(0, 0, 0) for key, x in operands(name, torch.float64).items()}
        tensors[key][1, :, 4], tensors[key][2] = INF, -INF
        loss = compare(name, tensors, where(CLASSES[0]), torch.float64, reduction="none").full_tensor()
        assert loss[1:3].isnan().all() and not loss[3:].isnan().any()


def check_equal_logits():
    for name, temperature in itertools.product(NAMES, (1.0, 0.3)):
        tensors = operands(name, torch.float32)
        tensors["target"] = tensors["input"].clone()
        shared = [distributed(tensors[key], [S2]) for key in ("input", "target")]
        loss = getattr(safeops, name)(*shared, temperature=temperature)
        assert loss.full_tensor() == 0
        loss.backward()
        assert all(x.grad.full_tensor().abs().max() < 1e-7 for x in shared)


def check_far_from_zero():
    for name in NAMES:
        tensors = {key: x + 1e4 for key, x in operands(name, torch.float32).items()}
        compare(name, tensors, where(CLASSES[0]), torch.float32, size=1)
        tensors = {key: x * 1e25 for key, x in tensors.items()}
        compare(name, tensors, where(CLASSES[0]), torch.float32, temperature=1e25)


def check_against_fp64():
    """Values equal fp64's to fp32; gradients to one rounding of half or, for fp32 operands, to the rounding of log
    p."""
    dtypes = (torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 5e-6)
    for name, (dtype, tolerance), layout, mask, weight in itertools.product(
        NAMES, dtypes, CLASSES[:4], (False, True), (False, True)
    ):
        tensors = operands(name, dtype, mask=mask, weight=weight)
        exact = {key: x.double().requires_grad_() if x.is_floating_point() else x for key, x in tensors.items()}
        want = getattr(safeops, name)(**exact, temperature=0.5)
        shared = {key: distributed(x, where(layout)[key]) for key, x in tensors.items()}
        got = getattr(safeops, name)(**shared, temperature=0.5)
        assert got.dtype == torch.float32
        close(got, want.float(), 1e-6)
        want.backward(), got.backward()
        for key in ("input", "target"):
            d, slope = shared[key].grad, exact[key].grad
            assert d.dtype == dtype and (d.full_tensor()[slope == 0] == 0).all()
            assert (d.full_tensor().double() - slope).abs().max() <= tolerance * slope.abs().max(), (name, key, dtype)


def check_second_order():
    for name in NAMES:
        tensors, results = operands(name, torch.float64, (4, 1, 7)), []
        tensors = {key: x.nan_to_num(neginf=-9) for key, x in tensors.items()}
        for sharded in (False, True):
            leaves = [distributed(x, [S2]) if sharded else x.clone().requires_grad_() for x in tensors.values()]
            first = torch.autograd.grad(getattr(safeops, name)(*leaves), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(d.square().sum() for d in first), leaves))
        for want, got in zip(*results):
            close(got, want, 1e-11)


def check_the_wire():
    """Forward must send five numbers per row, and three sums more for js and tv, but nothing of the logits' size;
    backward must send nothing."""
    for name, layout in itertools.product(NAMES, CLASSES[:2]):
        x, y = (torch.randn(64, 4000) for _ in range(2))
        place = [[type(S0)(1) if p == S2 else p for p in placements] for placements in layout]
        x, y = distributed(x, place[0]), distributed(y, place[1])
        with CommDebugMode() as seen, sending() as sent:
            loss = getattr(safeops, name)(x, y)
            forward = seen.get_total_counts()
            loss.backward()
        assert sent == [64 * 20] + [64 * 24] * ("kl" not in name), sent
        assert seen.get_total_counts() == forward <= len(sent), seen.get_comm_counts()
        assert x.grad.placements == y.grad.placements == (S1,)


def check_behind_a_layer():
    """The linear divergences with sharded layers equal one process's: their definition runs on logits as DTensors."""
    g = torch.Generator().manual_seed(5)
    names = "linear_kl_div", "linear_reverse_kl_div", "linear_js_div", "linear_tv"
    for linear, bias in itertools.product(([S0], [S1]), (False, True)):
        shapes = {"input": (6, 5), "linear_weight": (11, 5), "target": (6, 5), "target_weight": (11, 5)}
        if bias:
            shapes |= {"linear_bias": (11,), "target_bias": (11,)}
        tensors = {key: torch.randn(shape, generator=g, dtype=torch.float64) for key, shape in shapes.items()}
        layout = {key: linear if key.endswith("weight") else [R] for key in tensors}
        if linear == [S0]:
            layout |= {"linear_bias": [S0], "target_bias": [S0]}
        calls = {name: (tensors, layout) for name in names}
        classes = {key: x for key, x in tensors.items() if not key.startswith("target")}
        classes["target"] = torch.randint(11, (6,), generator=g)
        calls["linear_token_log_probs"] = classes, layout | {"target": [R]}
        values, indices = torch.randn(6, 11, generator=g, dtype=torch.float64).log_softmax(-1).topk(3)
        best = classes | {"target_values": values, "target_indices": indices}
        best.pop("target")
        for tail in ("bucket", "renormalize"):
            calls[f"linear_js_div {tail}"] = best, layout | {"target_values": [R], "target_indices": [R]}
        for call, (arguments, places) in calls.items():
            name, *tails = call.split()
            options = {"tail": tails[0]} if tails else {}
            plain = {k: x.clone().requires_grad_("target" not in k) for k, x in arguments.items()}
            shared = {k: distributed(x, places[k], "target" not in k) for k, x in arguments.items()}
            want, got = (getattr(safeops, name)(**tensors, **options) for tensors in (plain, shared))
            if isinstance(want, tuple):
                want, got = want.log_prob + want.entropy, got.log_prob + got.entropy
            close(got, want, 1e-12)
            want.sum().backward(), got.sum().backward()
            for key, x in plain.items():
                if x.requires_grad:
                    close(shared[key].grad, x.grad, 1e-12, 1)


CASES = {
    "behind-a-layer": check_behind_a_layer,
    "classes-fp64": functools.partial(check, torch.float64, CLASSES),
    "others": functools.partial(check, torch.float64, OTHERS, options=OPTIONS[:2]),
    "beta": check_beta,
    "few-classes": check_few_classes,
    "parts-without-a-class": check_parts_without_a_class,
    "no-distribution": check_rows_that_are_no_distribution,
    "equal-logits": check_equal_logits,
    "far-from-zero": check_far_from_zero,
    "against-fp64": check_against_fp64,
    "second-order": check_second_order,
    "wire": check_the_wire,
}
