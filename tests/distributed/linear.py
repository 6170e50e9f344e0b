"""Cases of log-probabilities and divergences after a linear layer whose classes, rows or both are sharded: values and
gradients are those of plain tensors."""

import functools
import itertools
import operator
from unittest import mock

import torch
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from safeops.ops.linear import _chunks
from safeops.testing.memory import _peak_bytes
from tests.distributed.processes import raises
from tests.distributed.sharded import S0, S1, R, compare, distributed, mesh, sending

LOG_PROBS = "linear_token_log_probs"
DIVERGENCES = "linear_kl_div", "linear_reverse_kl_div", "linear_js_div", "linear_tv"
TEACHER = "target", "target_weight", "target_bias"
S2, INF = type(S0)(2), float("inf")
# (placements of the input (6, 3, 5), of the layer, of the teacher's layer, of the rows)
VOCABULARY = [
    ([R], [S0], [S0], [R]),
    ([R], [S0], [R], [R]),
    ([R], [R], [S0], [R]),
    ([S1], [S0], [S0], [R]),  # sequence parallel: the mesh dim that has the classes also shards the rows' second dim
    ([S0, R], [R, S0], [R, S0], [S0, R]),
    ([S0, S1], [R, S0], [R, R], [S0, R]),
]
OTHERS = [([S0], [R], [R], [S0]), ([R], [S1], [S1], [R]), ([R, S1], [S0, S0], [S0, R], [R, S1])]


def operands(name, dtype, rows=(6, 3), classes=11, width=5, bias=False, mask=False, logits=False):
    """Returns {name: tensor}; masked rows hold NaN. logits: the teacher's logits, in place of its layer."""
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    tensors = {"input": normal(*rows, width), "linear_weight": normal(classes, width)}
    if name == LOG_PROBS:
        tensors["target"] = torch.randint(3, classes, rows, generator=g)
        tensors["target"][1] = -100
    elif logits:
        tensors |= {"target": normal(*rows, classes), "target_weight": None}
    else:
        tensors |= {"target": normal(*rows, width), "target_weight": normal(classes, width)}
    if bias:
        tensors["linear_bias"] = normal(classes)
        tensors["linear_bias"][2] = -INF  # a class that is left out
        if name != LOG_PROBS and not logits:
            tensors["target_bias"] = normal(classes)
            tensors["target_bias"][2] = -INF
        elif logits:
            tensors["target"][..., 2] = -INF
    if mask:
        tensors["mask"] = torch.rand(rows, generator=g) < 0.6
        for key in ("input", "target"):
            if tensors[key].is_floating_point():
                tensors[key][~tensors["mask"]] = float("nan")
    return tensors


def placements(name, layout, tensors):
    input, layer, teacher, rows = layout
    last = [S2 if p == S0 and q == R else q for p, q in zip(teacher, rows)]
    result = {"input": input, "linear_weight": layer, "target_weight": teacher, "target": rows, "mask": rows}
    result |= {key: [p if p == S0 else R for p in of] for key, of in (("linear_bias", layer), ("target_bias", teacher))}
    if name != LOG_PROBS and tensors["target_weight"] is None:
        result["target"] = last
    return result


def check_one(name, layout, tensors, dtype=torch.float64, **options):
    where, given = placements(name, layout, tensors), {k: x for k, x in tensors.items() if x is not None}
    size = int(dtype == torch.float32)  # of a gradient's terms, which cancel
    if name != LOG_PROBS:
        options |= {} if "target_weight" in given else {"target_weight": None}
        return compare(name, given, where, dtype, constant=TEACHER, size=size, **options)
    upstream = operator.attrgetter("log_prob", "entropy", "logsumexp")
    return compare(name, given, where, dtype, take=lambda rows: torch.stack(upstream(rows)), size=size, **options)


def check(names, layouts, dtype=torch.float64, **sizes):
    """Values and gradients, with and without a bias and a mask, of the teacher's layer and of its logits."""
    for name, layout in itertools.product(names, layouts):
        for bias, mask in ((False, False), (True, True)):
            for logits in (False, True) if name != LOG_PROBS else (False,):
                tensors = operands(name, dtype, bias=bias, mask=mask, logits=logits, **sizes)
                options = {"temperature": 0.5} if mask else {}
                options |= {"reduction": "none"} if mask and name != LOG_PROBS else {}
                options |= {"softcap": 3.0} if bias and name == LOG_PROBS and not mask else {}
                check_one(name, layout, tensors, dtype, **options)


def check_chunks():
    """Results are right with several chunks on each rank, the last of another size."""
    with mock.patch.object(_chunks, "CHUNK", 40):
        check([LOG_PROBS, *DIVERGENCES[1:3]], VOCABULARY[:1])
        check([LOG_PROBS, DIVERGENCES[0]], [VOCABULARY[3]], torch.float32)


def check_few():
    """Results are right with so few classes, or rows, that some ranks have none."""
    for classes in (3, 4, 5):
        check_one(LOG_PROBS, VOCABULARY[0], {**operands(LOG_PROBS, torch.float64, classes=5), **_few(classes)})
        check(DIVERGENCES[:3:2], VOCABULARY[:1], classes=classes)
    check([LOG_PROBS, "linear_tv"], OTHERS[:1], rows=(2,))


def _few(classes):
    g = torch.Generator().manual_seed(6)
    weight = torch.randn((classes, 5), generator=g, dtype=torch.float64)
    return {"linear_weight": weight, "target": torch.randint(classes, (6, 3), generator=g)}


def check_half():
    """Half gradients must be rounded once, at the end: they differ from fp64's by at most 4 ulp of the largest. With
    logits_dtype=torch.float32 values have fp32's error."""
    precisions = (torch.float16, 2**-11), (torch.bfloat16, 2**-8)
    for (dtype, ulp), name in itertools.product(precisions, (LOG_PROBS, "linear_js_div")):
        tensors = operands(name, dtype)
        where, leaves = placements(name, VOCABULARY[3], tensors), ("input", "linear_weight")
        exact = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
        exact = {k: x.requires_grad_(k in leaves) for k, x in exact.items()}
        shared = {k: distributed(x, where[k], k in leaves) for k, x in tensors.items()}
        want, got = (_sum(getattr(safeops, name)(**x)) for x in (exact, shared))
        wide = _sum(getattr(safeops, name)(**shared, logits_dtype=torch.float32)).full_tensor()
        assert abs(wide - want) <= 1e-5 * abs(want), (wide, want)
        want.backward(), got.backward()
        for key in leaves:
            d, slope = shared[key].grad, exact[key].grad
            error = (d.full_tensor().double() - slope).abs().max()
            assert d.dtype == dtype and d.placements == tuple(where[key]), (d.placements, key)
            assert error <= 8 * ulp * slope.abs().max(), (name, key, dtype, error)


def _sum(result):
    return (result.log_prob + result.entropy).sum() if isinstance(result, tuple) else result


def check_the_wire():
    """Forward must send the numbers of each row in one message, and js and tv three sums more; backward one, the
    input's gradient. Nothing has the logits' size."""
    for name in (LOG_PROBS, *DIVERGENCES):
        tensors = operands(name, torch.float32, rows=(64,), classes=4000)
        where = placements(name, VOCABULARY[0], tensors)
        shared = {k: distributed(x, where[k], k not in TEACHER) for k, x in tensors.items()}
        with CommDebugMode() as seen, sending() as sent:
            result = _sum(getattr(safeops, name)(**shared))
            forward = seen.get_total_counts()
            result.backward()
        want = [64 * 24] if name == LOG_PROBS else [64 * 20] + [64 * 24] * ("kl" not in name)
        assert sent[: len(want)] == want and forward <= len(want), (name, sent, seen.get_comm_counts())
        assert seen.get_total_counts() == forward + 1, (name, seen.get_comm_counts())
        assert shared["linear_weight"].grad.placements == (S0,) and shared["input"].grad.placements == (R,)


def check_memory():
    """A step must not allocate half as much as all logits of this rank's classes take."""
    for name in (LOG_PROBS, "linear_js_div"):
        tensors = operands(name, torch.float32, rows=(512,), classes=4096, width=4)
        where = placements(name, VOCABULARY[0], tensors)
        shared = {k: distributed(x, where[k], k not in TEACHER) for k, x in tensors.items()}

        def step(name=name, shared=shared):
            _sum(getattr(safeops, name)(**shared)).backward()

        with mock.patch.object(_chunks, "CHUNK", 2**12):
            peak = _peak_bytes("cpu", step)
        logits = 512 * len(shared["linear_weight"].to_local()) * 4
        assert peak < logits / 2, (name, peak, logits)


def check_second_order():
    for name in (LOG_PROBS, "linear_kl_div"):
        tensors, results = operands(name, torch.float64, rows=(4,)), []
        where = placements(name, VOCABULARY[0], tensors)
        for shared in (False, True):
            leaves = {k: distributed(x, where[k], False) if shared else x.clone() for k, x in tensors.items()}
            x = leaves["input"].requires_grad_()
            (first,) = torch.autograd.grad(_sum(getattr(safeops, name)(**leaves)), x, create_graph=True)
            results += torch.autograd.grad(first.square().sum(), x)
        torch.testing.assert_close(results[1].full_tensor(), results[0], rtol=1e-11, atol=1e-11)


def check_refused():
    """A plain operand beside DTensors must raise on every rank, by name, before any collective."""
    for name in (LOG_PROBS, "linear_kl_div"):
        tensors = operands(name, torch.float32, mask=True)
        where = placements(name, VOCABULARY[0], tensors)
        shared = {k: distributed(x, where[k]) for k, x in tensors.items()}
        for key, x in tensors.items():
            call = functools.partial(getattr(safeops, name), **{**shared, key: x})
            raises(TypeError, name, "DTensor", call=call)
    assert mesh().size() > 1


CASES = {
    "log-probabilities": functools.partial(check, [LOG_PROBS], VOCABULARY[:1] + VOCABULARY[3:5]),
    "divergences": functools.partial(check, DIVERGENCES, VOCABULARY[:1] + VOCABULARY[3:4]),
    "teachers": functools.partial(check, ["linear_kl_div", "linear_js_div"], VOCABULARY[1:3] + VOCABULARY[4:]),
    "others": functools.partial(check, [LOG_PROBS, "linear_js_div"], OTHERS),
    "fp32": functools.partial(check, [LOG_PROBS, *DIVERGENCES[:3:2]], VOCABULARY[:1], torch.float32),
    "chunks": check_chunks,
    "few": check_few,
    "half": check_half,
    "wire": check_the_wire,
    "memory": check_memory,
    "second-order": check_second_order,
    "refused": check_refused,
}
