"""The functions of two operands: quotients, powers, angles, x log y."""

import torch

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import X, bad_dtypes, bad_fill_values, bad_floors, must
from tests.ops.elementwise.unary import bad_inputs
from tests.ops.gpu import Case, keep, numbers
from tests.ops.operands import HUGE, data, mask, plain
from tests.ops.record import NO_MASK, NO_SUM, NO_WEIGHT, Record
from tests.ops.truth import floor, saturated

# ---- definitions


def _tensor(number, like):
    return number if isinstance(number, torch.Tensor) else torch.tensor(number, dtype=like.dtype, device=like.device)


def safe_div(input, other, *, eps=None, fill_value=0.0, out_dtype=torch.float64):
    other, eps = _tensor(other, input), floor(eps, out_dtype)
    if fill_value is None:  # sign(b) max(|b|, eps), 0 counted as positive
        other = torch.where(other.abs() < eps, torch.where(other < 0, -eps, eps).to(other.dtype), other)
        eps = fill_value = 0.0
    keep = ~((other.abs() < eps) | (other == 0))
    raw = (torch.where(keep, input, 0) / torch.where(keep, other, 1)).detach()
    # Overflow as in a cast: from half a step above the largest number on, the quotient rounds to inf.
    over = raw.to(out_dtype).isinf() & input.isfinite()
    fill = saturated(torch.tensor(fill_value, dtype=input.dtype, device=input.device), out_dtype)
    stand_in = torch.where(keep, raw.sign() * torch.finfo(out_dtype).max, fill)
    true = keep & ~over
    return torch.where(true, torch.where(true, input, 0) / torch.where(true, other, 1), stand_in)


def safe_pow(input, exponent, *, out_dtype=torch.float64):
    a, b = torch.broadcast_tensors(input, _tensor(exponent, input))
    is_integer = (b == b.round()) | b.isnan() | b.isinf()
    none = (a < 0) & a.isfinite() & ~is_integer
    fixed = torch.where(none, 1, a).detach().pow(b.detach())
    over = fixed.to(out_dtype).isinf() & a.isfinite() & b.isfinite()
    result = torch.where(none, 0.0, torch.where(over, fixed.sign() * torch.finfo(out_dtype).max, fixed))
    live = ~none & ~over & ~((a == 0) & (b < 1))
    a = torch.where(live, a, 1.0)
    slope = (b * a.abs().pow(b - 1)).detach()
    # steep: the slope overflows float64, but times a small upstream gradient it may fit. There `rough` is
    # a^b e^(L - constant), with L = b log a and its value as constant: backward multiplies by a^b, b and 1 / a in turn.
    steep = live & slope.isinf() & a.isfinite() & b.isfinite()
    for below_zero in (True, False):  # a < 0: |a|^b with the sign of an odd power, without slope to b
        at = live & (a < 0) if below_zero else live & ~(a < 0)
        x, y = torch.where(at, a, 1), torch.where(at, b, 1)
        odd = torch.ones_like(y)
        if below_zero:
            flip = ~y.isnan() & at
            odd = torch.where(flip & (y.remainder(2) == 1), -1.0, odd)
            x, y = torch.where(flip, -x, x), y.detach()
        log = torch.where(steep, y, 1) * torch.where(steep, x, 1).log()
        rough = (log - log.detach()).exp() * torch.where(steep & at, fixed, 1)
        zero = (x == 0) | (steep & at)
        plain = torch.where(zero, 1, x).pow(torch.where(zero, 1, y)) * odd
        # A base of 0 has no gradient to its exponent.
        plain = torch.where(x == 0, torch.where(x == 0, x, 1).pow(torch.where(x == 0, y, 1).detach()), plain)
        result = torch.where(at, torch.where(steep, rough, plain), result)
    return result


def safe_atan2(input, other, *, out_dtype=torch.float64):
    y, x = torch.broadcast_tensors(input, other)
    origin = (y == 0) & (x == 0)
    far = (y.isinf() | x.isinf()) & ~y.isnan() & ~x.isnan()
    value = torch.where(origin, 0.0, torch.atan2(y.detach(), x.detach()))
    y, x = torch.where(origin | far, 0.0, y), torch.where(origin | far, 1.0, x)
    power = -torch.frexp(torch.maximum(y.abs(), x.abs()).detach())[1].to(torch.float64)
    for step in (power.div(2, rounding_mode="floor"), (power / 2).ceil()):  # two steps: 2^1074 overflows
        y, x = y * step.exp2(), x * step.exp2()
    return torch.where(origin | far, value, torch.atan2(y, x))


def magnitude(input, other=None, *, out_dtype=torch.float64):
    if other is None:
        input, other = input.real, input.imag
    a, b = torch.broadcast_tensors(input, other)
    unknown = a.isnan() | b.isnan()
    far, origin = (a.isinf() | b.isinf()) & ~unknown, (a == 0) & (b == 0)
    x, y = (torch.where(origin | far, 1.0, x) for x in (a, b))
    # x and y are scaled by `size` so that their squares neither overflow nor vanish.
    longer = torch.maximum(x.abs(), y.abs()).detach()
    size = torch.where(longer < 1e-140, 1e170, torch.ones_like(longer))
    size = torch.where(longer > 1e150, 1e-170, size)
    value = torch.where(origin, 0.0, ((x * size) ** 2 + (y * size) ** 2).sqrt() / size)
    one, two = (torch.where(far & x.isinf(), x.sign(), 0.0).detach() for x in (a, b))  # slopes at inf
    linear = one * torch.where(far, a, 0.0) + two * torch.where(far, b, 0.0)
    return torch.where(far, linear / (one.abs() + two.abs()).clamp(min=1).sqrt(), value)


def xlogy(input, other):
    other = _tensor(other, input)
    none = (input == 0) & ~((other > 0) & other.isfinite())
    return torch.where(none, 0.0, torch.where(none, 1.0, input) * torch.where(none, 1.0, other).log())


# ---- records


def _binary(definition, samples, twin, operands, second="other", numbers_too=True, bad_calls=(), call=None, **fields):
    """Makes a record. operands: (x, y, keep) -> a GPU call's operands. numbers_too: the second may be a number."""
    name = definition.__name__

    def make(n, dtype, seed):
        x, y = numbers(n, dtype, seed), numbers(n, dtype, seed + 1)
        return Case(getattr(safeops, name), operands(x, y, keep(n, seed)))

    bad = [
        *bad_inputs(name, X),
        Bad((X, X[:, :3]), {}, ValueError, (name, second, "(2, 5)", "(2, 3)", "broadcast")),
        Bad((X, "2"), {}, TypeError, (name, second, "tensor", "str")),
        Bad((X, None), {}, TypeError, (name, second, "tensor", "NoneType")),
        Bad((X, X.to("meta")), {}, ValueError, (name, second, "meta")),
        Bad((X, X.to(torch.complex64)), {}, TypeError, (name, second, "real", "torch.complex64")),
        Bad((X, X.to(torch.float8_e4m3fn)), {}, TypeError, (name, second, "float8")),
    ]
    if numbers_too:
        bad += [must(name, second, (X, huge), {}, ValueError) for huge in (HUGE, -HUGE)]
    else:
        bad.append(Bad((X, 2.0), {}, TypeError, (name, second, "tensor", "float")))
    Record(
        name,
        definition,
        samples,
        bad_calls=[*bad, *bad_calls],
        call={"input": plain(), second: plain(1), **(call or {})},
        gpu=make,
        torch_equivalent=twin,
        skip=NO_SUM | NO_MASK | NO_WEIGHT | fields.pop("skip", {}),
        **fields,
    )


SAFE = {"dtype_rule": "safe", "finite": True}
FOUR = data(2, 3, 4, 5)
# For gradcheck's finite differences: divisors are far from eps, and quotients far from overflow.
DIVISORS = data(3, 5, seed=1, low=0.5)
EXTREME = torch.tensor([1e-7, -2e-7, 6e-5, 0.0, 3e4], dtype=torch.float64)

_binary(
    safe_div,
    [
        Sample((data(3, 5), DIVISORS), name="plain", slow=True),
        Sample((data(3, 5), torch.where(mask(3, 5, seed=3), DIVISORS, 0.0)), name="zero divisors", smooth=False,
               slow=True),
        Sample((data(3, 5), data(3, 5, seed=2)), {"eps": 1.0, "fill_value": -7.0}, name="floor", smooth=False),
        Sample((data(3, 5), torch.where(mask(3, 5, seed=3), data(3, 5, seed=2), 0.0)),
               {"eps": 0.5, "fill_value": None}, name="divisor with a floor", smooth=False),
        Sample((data(3, 5), data(3, 1, seed=2, low=0.5)), name="divisor broadcast"),
        Sample((data(5), data(3, 5, seed=2, low=0.5)), name="numerator broadcast"),
        Sample((data(3, 5) * 1e4, EXTREME), {"fill_value": 1e9}, name="saturating", smooth=False),
        Sample((FOUR, data(2, 3, 4, 5, seed=4, low=0.5)), name="four dimensions"),
    ],
    lambda a, b, **_: a / b,
    # Divisors are 0 or at least 0.25: quotient and gradient stay in fp16's range, and dtypes can be compared.
    lambda x, y, keep: (x, torch.where(keep, y + y.sign() * 0.25, 0)),
    bad_calls=[
        *bad_floors("safe_div", X, X),
        *bad_fill_values("safe_div", X, X, none=False),
        *bad_dtypes("safe_div", X, X),
    ],
    call={"eps": 0.5, "fill_value": 2.0, "dtype": None},
    dtype_argument=True,
    **SAFE,
)  # fmt: skip

SIGNED = torch.tensor([-2.0, -0.5, 0.0, 3.0, -1.25], dtype=torch.float64)
EXPONENTS = torch.tensor([[2.0], [3.0], [-1.0]], dtype=torch.float64)
HURTS = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 2.0, 250.0, -3e4], dtype=torch.float64)
GRID = torch.cartesian_prod(HURTS, HURTS).unbind(-1)
SQUARES = torch.full((3, 1), 2.0, dtype=torch.float64)

_binary(
    safe_pow,
    [
        Sample((data(3, 5, seed=1, low=0.5), data(3, 5, seed=2, low=0.5)), name="plain", slow=True),
        Sample(GRID, name="stand-ins", smooth=False, slow=True),
        Sample((data(3, 5, seed=1, low=0.5),), {"exponent": 2.5}, name="number"),
        Sample((data(3, 5, seed=1, low=0.5),), {"exponent": -1.0}, name="negative number"),
        Sample((SIGNED,), {"exponent": 3.0}, name="negative bases", smooth=False),
        Sample((SIGNED, EXPONENTS), name="both broadcast", smooth=False),
        Sample((data(3, 5, seed=3), SQUARES), name="squares", differentiable=(0,)),
        Sample((data(5, seed=4, low=0.5), data(3, 5, seed=5)), name="base broadcast"),
        Sample((data(2, 3, 4, 5, low=0.5), data(2, 3, 4, 5, seed=4)), name="four dimensions"),
    ],
    lambda input, exponent, **_: input**exponent,
    lambda x, y, keep: (torch.where(keep, x.abs() + 0.5, -1), y.clamp(-2, 2)),
    second="exponent",
    bad_calls=bad_dtypes("safe_pow", X, X),
    call={"dtype": None},
    dtype_argument=True,
    **SAFE,
)
_binary(
    safe_atan2,
    [
        Sample((data(3, 5, seed=6), data(3, 5, seed=7, low=0.5)), name="plain", slow=True),
        Sample(GRID, name="stand-ins", smooth=False, slow=True),
        Sample((data(3, 5, seed=8), data(3, 1, seed=9, low=0.5)), name="x broadcast"),
        Sample((data(5, seed=8), data(3, 5, seed=9, low=0.5)), name="y broadcast"),
        Sample((FOUR, data(2, 3, 4, 5, seed=4, low=0.5)), name="four dimensions"),
        Sample((data(3, 5, seed=6) * 0.02, data(3, 5, seed=7, low=0.5) * 0.02), name="near the origin"),
    ],
    torch.atan2,
    lambda x, y, keep: (x + x.sign() * 0.25, torch.where(keep, y, 0)),
    numbers_too=False,
    **SAFE,
)
_binary(
    magnitude,
    [
        Sample((data(3, 5, seed=6), data(3, 5, seed=7)), name="plain", slow=True),
        Sample(GRID, name="origin", smooth=False, slow=True),
        Sample((data(3, 5, seed=8), data(3, 1, seed=9, low=0.5)), name="second broadcast"),
        Sample((data(5, seed=8), data(3, 5, seed=9, low=0.5)), name="first broadcast"),
        Sample((FOUR, data(2, 3, 4, 5, seed=4, low=0.5)), name="four dimensions"),
    ],
    torch.hypot,
    lambda x, y, keep: (x + x.sign() * 0.25, torch.where(keep, y, 0)),
    numbers_too=False,
    dtype_rule="safe",
    skip={"finite": "not a safe_ function: a magnitude that does not fit is inf"},
)
HOLES = torch.where(mask(3, 5, seed=3), data(3, 5, seed=1), 0.0)
_binary(
    xlogy,
    [
        Sample((data(3, 5), data(3, 5, seed=1, low=0.25)), name="plain", slow=True),
        Sample((HOLES, torch.where(HOLES == 0, -1.0, 2.0)), name="zeros", smooth=False, slow=True),
        Sample((data(3, 5),), {"other": 2.5}, name="number"),
        Sample((data(3, 5), data(3, 1, seed=2, low=0.25)), name="second broadcast"),
        Sample((data(5), data(3, 5, seed=2, low=0.25)), name="first broadcast"),
        Sample((FOUR, data(2, 3, 4, 5, seed=4, low=0.25)), name="four dimensions"),
        Sample(GRID, name="where torch has -inf and nan", smooth=False, differentiable=()),
    ],
    torch.xlogy,
    lambda x, y, keep: (torch.where(keep, x, 0), y.abs() + 0.25),
    dtype_rule="elementwise",
    skip={"finite": "not a safe_ function: it follows torch"},
)
