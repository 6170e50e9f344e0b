"""Divergences of p = softmax(target / T) and q = softmax(input / T). Each is a sum over a row's classes of a term."""

import functools

import torch

from safeops.core import check, loss_reduction
from safeops.core.composed_loss import ARGUMENTS as ROW_ARGUMENTS
from safeops.core.composed_loss import finish, validate, vectors
from safeops.core.definitions import absolute, kept
from safeops.core.dtypes import LARGEST, compute_dtype, wide_on_cpu
from safeops.core.library import declare_raw, only
from safeops.core.op import Op
from safeops.core.symbolic import as_float, symbolic
from safeops.ops.classification import _best_classes
from safeops.ops.classification._support import SUPPORT, restrict
from safeops.ops.divergences import _support

INF = float("inf")
ROW_STATS = 6  # numbers that forward saves per row, for backward: see _row_stats
EXAMPLE = "torch.zeros(2, 3), torch.eye(2, 3)"

# ---- definitions: each function returns a class's term, from u = log p, v = log q, p, q and the mixture weight beta


def kl(u, v, p, q, beta):
    """p log(p / q), and 0 where p is 0."""
    none = p == 0
    return p * (torch.where(none, 0, u) - torch.where(none, 0, v))


def js(u, v, p, q, beta):
    """beta p log(p / m) + (1 - beta) q log(q / m), m = beta p + (1 - beta) q.

    smaller, larger: min(p, q) and max(p, q). d = log(smaller / larger). share: the factor of smaller in m, beta for p
    or 1 - beta for q.
    (1) m / larger = 1 + share (e^d - 1), so log(larger / m) = -log1p(share expm1(d))
    (2) log(smaller / m) = d + log(larger / m)
    """
    d = torch.where((p == 0) & (q == 0), 0, v - u)
    larger = d > 0  # q is larger than p
    d = torch.where(larger, -d, d)
    share = torch.where(larger, beta * torch.ones_like(d), 1 - beta)  # (torch.where of two numbers would be fp32)
    log = torch.log1p(share * torch.expm1(d))
    smaller = torch.where(torch.minimum(p, q) == 0, 0, d) - log
    return beta * p * torch.where(larger, smaller, -log) + (1 - beta) * q * torch.where(larger, -log, smaller)


def tv(u, v, p, q, beta):
    return absolute(p - q) / 2


def _rows(terms):
    """Returns the op's definition, a function that computes the divergence of each row from the function `terms`."""

    def definition(input, target, keep=None, temperature=1.0, beta=0.5):
        compute = compute_dtype(input.dtype, target.dtype)
        x, y = (wide_on_cpu(x.to(compute)) for x in (input, target))
        if keep is not None:  # select before arithmetic: NaN * 0 is NaN
            x, y = (torch.where(keep.unsqueeze(-1), x, 0) for x in (x, y))
        v, u = ((x / temperature).log_softmax(-1) for x in (x, y))
        total = terms(u, v, u.exp(), v.exp(), beta).sum(-1)
        return (total if keep is None else torch.where(keep, total, 0)).to(compute)

    return definition


# ---- gradients of the logits, times T. input: q h - q sum(q h), with h = d(term)/dq. target: p f - p sum(p f), with
# f = d(term)/dp. A constant that is added to h or f cancels.


def _slopes(terms, u, v, p, q, beta):
    """Returns (q h, p f) of each class, where h and f may lack a constant."""
    if terms is kl:
        return -p, kl(u, v, p, q, beta)
    if terms is js:
        log = torch.log(beta * p + (1 - beta) * q)
        shares = (1 - beta, q, v), (beta, p, u)
        return tuple(by * share * torch.where(share == 0, 0, own - log) for by, share, own in shares)
    sign = torch.sign(p - q) / 2
    return -q * sign, p * sign


def _row_stats(terms, input, target, keep, temperature, beta):
    """(6, *rows): maximum (the largest logit) and log_total = log sum exp((x - maximum) / T) of input, then of target,
    sum(q h), sum(p f). In a row whose logits are all -inf, log_total is -inf."""
    compute = compute_dtype(input.dtype, target.dtype)
    x, y = (x.detach().double() for x in (input, target))
    if keep is not None:
        x, y = (torch.where(keep.unsqueeze(-1), x, 0) for x in (x, y))
    maxima = [x.amax(-1, keepdim=True) if x.shape[-1] else x.sum(-1, keepdim=True) for x in (x, y)]
    x, y = ((x - torch.where(maximum == -INF, 0, maximum)) / temperature for x, maximum in zip((x, y), maxima))
    log_totals = [x.logsumexp(-1, keepdim=True) for x in (x, y)]
    v, u = (x - log_total for x, log_total in zip((x, y), log_totals))
    sums = [slope.sum(-1, keepdim=True) for slope in _slopes(terms, u, v, u.exp(), v.exp(), beta)]
    row_stats = torch.stack([maxima[0], log_totals[0], maxima[1], log_totals[1], *sums]).squeeze(-1)
    return (row_stats if keep is None else torch.where(keep, row_stats, 0)).to(compute)


def _backward(terms, grad, input, target, row_stats, keep, temperature, beta, needed):
    compute = compute_dtype(input.dtype, target.dtype, grad.dtype)
    x, y = (x.to(compute) for x in (input, target))
    if keep is not None:
        x, y = (torch.where(keep.unsqueeze(-1), x, 0) for x in (x, y))
    max_x, log_total_x, max_y, log_total_y, *sums = row_stats.to(compute).unsqueeze(-1)
    v, u = (x - max_x) / temperature - log_total_x, (y - max_y) / temperature - log_total_y
    p, q = u.exp(), v.exp()
    g = (grad.to(compute) / temperature).unsqueeze(-1)
    results = []
    for slope, share, total, x, need in zip(_slopes(terms, u, v, p, q, beta), (q, p), sums, (input, target), needed):
        slope = g * (slope - torch.where(share == 0, 0, share * total))
        slope = slope if keep is None else torch.where(keep.unsqueeze(-1), slope, 0)
        results.append(slope.to(x.dtype) if need else x.new_empty(0))
    return tuple(results)


def _sums(terms, input, target, row_stats, keep, temperature, beta):
    """(3, *rows): sum(q h), sum(p f) and sum(term) over a shard of the classes. row_stats[:4]: maximum and log_total of
    both operands' whole rows."""
    compute = compute_dtype(input.dtype, target.dtype)
    x, y = (x.detach().double() for x in (input, target))
    if keep is not None:
        x, y = (torch.where(keep.unsqueeze(-1), x, 0) for x in (x, y))
    max_x, log_total_x, max_y, log_total_y = row_stats[:4].double().unsqueeze(-1)
    v, u = (x - max_x) / temperature - log_total_x, (y - max_y) / temperature - log_total_y
    operands = u, v, u.exp(), v.exp(), beta
    sums = torch.stack([x.sum(-1) for x in (*_slopes(terms, *operands), terms(*operands))])
    return (sums if keep is None else torch.where(keep, sums, 0)).to(compute)


# ---- op


def _fake(input, target, *_):
    rows, dtype = input.shape[:-1], compute_dtype(input.dtype, target.dtype)
    return input.new_empty(rows, dtype=dtype), input.new_empty((ROW_STATS, *rows), dtype=dtype)


def _fake_backward(grad, input, target, row_stats, keep, temperature, beta, *needed):
    return only(needed, (input, target))


def _fake_sums(input, target, *_):
    return input.new_empty((3, *input.shape[:-1]), dtype=compute_dtype(input.dtype, target.dtype))


# ---- record


def validate_options(name, reduction, empty, temperature, beta=0.5):
    loss_reduction.validate_options(name, reduction, empty)
    check.number(name, "temperature", temperature, above=0, maximum=LARGEST)
    check.number(name, "beta", beta, minimum=0.001, maximum=0.999)


def validate_module(name, reduction, empty, *options):
    """The checks of a module's constructor."""
    *numbers, tail = options
    validate_options(name, reduction, empty, *numbers)
    check.choice(name, "tail", tail, _best_classes.TAILS)


class Divergence(Op):
    """The record of a divergence of each row. I/O: the forward reads both operands once, or twice if its terms need the
    probabilities; the backward reads them, and writes the gradients. Saved: six numbers a row."""

    differentiable = ("input", "target")
    compiled = ("cpu", "cuda")
    shards = "divergence"
    example, validate_options = EXAMPLE, staticmethod(validate_module)
    sums = None  # the raw op that runs `_sums`; None for kl, whose sums need no second read of the operands

    def __init__(self, name, module, terms):
        self.module, self.terms = module, terms
        definition = _rows(terms)

        def composite(input, target, keep=None, temperature=1.0, beta=0.5):
            operands = input, target, keep, temperature, beta
            return definition(*operands), _row_stats(terms, *operands)

        def composite_backward(grad, input, target, row_stats, keep=None, temperature=1.0, beta=0.5, *needed):
            needed = needed or (True, True)
            return _backward(terms, grad, input, target, row_stats, keep, temperature, beta, needed)

        forward = declare_raw(
            f"_{name}",
            "(Tensor input, Tensor target, Tensor? keep=None, float temperature=1.0, float beta=0.5) -> "
            "(Tensor loss, Tensor row_stats)",
            fake=_fake,
            composite=composite,
            triton=f"divergences.divergence.{name}",
        )
        backward = declare_raw(
            f"_{name}_backward",
            "(Tensor grad, Tensor input, Tensor target, Tensor row_stats, Tensor? keep=None, float temperature=1.0, "
            "float beta=0.5, bool need_input=True, bool need_target=True) -> (Tensor, Tensor)",
            fake=_fake_backward,
            composite=composite_backward,
            triton=f"divergences.divergence_backward.{name}_backward",
        )
        if terms is not kl:
            self.sums = declare_raw(
                f"_{name}_sums",
                "(Tensor input, Tensor target, Tensor row_stats, Tensor? keep=None, float temperature=1.0, "
                "float beta=0.5) -> Tensor",
                fake=_fake_sums,
                composite=functools.partial(_sums, terms),
                triton=f"divergences.divergence.{name}_sums",
            )
        super().__init__(name, forward, backward, definition, also=(self.sums,))

    def prepare(self, *operands):
        return not any(symbolic(number) for number in operands[3:]), operands

    def validate(self, *arguments):
        """Nothing to do: the public function has validated its arguments."""

    def gradients(self, grad, needs, operands, results):
        x = operands
        return self.backward(grad, x.input, x.target, *results, x.keep, x.temperature, x.beta, *needs[:2])


# ---- for the public functions


def divergence(
    name, op, input, target, mask, weight, reduction, denominator, empty, temperature, best, restriction, beta=0.5,
    swap=False,
):  # fmt: skip
    """Validate the arguments, compute the divergences of the rows with `op`, and reduce them.

    best: (target_values, target_indices, tail). restriction: (support, support_threshold). swap: exchange input and
    target."""
    values, indices, tail = best
    _best_classes.validate_form(name, target, *best)
    operands = {"input": input} if target is None else {"input": input, "target": target}
    rows = vectors(name, **operands)
    if target is None:
        _best_classes.validate_best(name, input, values, indices, input.shape[-1], "input")
        operands |= {"target_values": values, "target_indices": indices}
    validate(name, rows, mask, weight, reduction, denominator, empty, **operands)
    validate_options(name, reduction, empty, temperature, beta)
    keep, temperature, beta = kept(mask, weight), as_float(temperature), as_float(beta)
    support = _support.validate(name, restriction, input.shape, input=input, target=target)
    if isinstance(support, tuple):
        entries = _support.entries_of(name, support, keep, rows, input.shape[-1])
        pair = (target, input) if swap else (input, target)
        loss = _support.of_entries(op.terms, entries, *map(entries.gather, pair), temperature, beta)
        keep = entries.keep.reshape(rows)
        return finish(name, loss.reshape(rows), keep, weight, reduction, denominator, empty)
    if support is not None:
        keep = _support.with_classes(name, support, keep, rows)
        input, target = restrict(input, support), restrict(target, support)
    exists = None if keep is None else keep.expand(rows).contiguous()
    if target is None:
        indices = _best_classes.listed(name, values, indices, exists, input.shape[-1], "input", input.shape)
        input, target = _best_classes.distributions(input, values, indices, exists, temperature, tail)
        temperature = 1.0
    pair = (target, input) if swap else (input, target)
    loss = op.call(*pair, exists, temperature, beta)
    return finish(name, loss, keep, weight, reduction, denominator, empty)


OF_BOTH = """\
            A bool one, or a threshold, costs a copy of both operands. In CSR form only the logits of its classes are
            read.
"""
ARGUMENTS = (
    """\
        temperature: divides the logits of both, above 0. (Distillation multiplies the loss by its square, to keep the
            size of the gradients.)
"""
    + _best_classes.ARGUMENTS
    + SUPPORT.replace("is masked out.\n", "is masked out.\n" + OF_BOTH, 1)
    + ROW_ARGUMENTS
    + """
    Raises:
        IndexError: on the CPU, an index out of range in a kept row; it is raised before anything is computed. On other
            devices, and in compiled code, such an index is left out.
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type, or there is no target.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.
"""
)
