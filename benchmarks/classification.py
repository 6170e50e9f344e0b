"""Cases of softmax, and of losses of logits and a class for each row. Forward and backward each read the input once."""

import functools

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, keep_mask
from .shapes import LOGITS, SHAPES, tensor


def softmax(name, function, suffix):
    @case(name + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        ours = getattr(safeops, name)
        x = tensor(n, dtype, device, 0, shape)
        mask = keep_mask(x.numel(), device).view(shape)

        def pattern(x):
            return function(x.masked_fill(~mask, float("-inf")), dim)

        return Case(
            (x,),
            forward_bytes=2 * s + 1,  # read x, mask; write y
            backward_bytes=3 * s + 1,  # read dy, x, mask; write dx
            ours=lambda x: ours(x, mask, dim),
            eager={f"{function.__name__}(x.masked_fill(~m, -inf))": pattern},
            compiled=pattern,
            variant=bool(suffix),
            aten=lambda x: function(x, dim),
            arithmetic=True,
        )


@case("softmax_no_mask")
def plain_softmax(n, dtype, device):
    """masked_softmax without a mask, compared with torch's own softmax: both move equal bytes."""
    shape, dim = SHAPES[""](n)
    s = dtype.itemsize
    return Case(
        (tensor(n, dtype, device, 0, shape),),
        forward_bytes=2 * s,  # read x; write y
        backward_bytes=3 * s,  # read dy, x; write dx
        ours=lambda x: safeops.masked_softmax(x, dim=dim),
        eager={"x.softmax(-1)": lambda x: x.softmax(dim)},
        compiled=lambda x: x.softmax(dim),
        variant=True,
    )


@case("multi_margin_loss")
def multi_margin_loss(n, dtype, device):
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    index = torch.randint(shape[1], shape[:1], generator=torch.Generator(device).manual_seed(3), device=device)
    wide = {"F.multi_margin_loss(x, y)": lambda x: F.multi_margin_loss(x.float(), index)}  # no fp16 on the CPU
    return Case(
        (tensor(n, dtype, device, 0, shape),),
        forward_bytes=s,  # read x
        backward_bytes=2 * s,  # read x; write dx
        ours=lambda x: safeops.multi_margin_loss(x, index),
        eager=wide,
        compiled=lambda x: F.multi_margin_loss(x.float(), index),
        variant=True,
    )


@case("multilabel_margin_loss")
def multilabel_margin_loss(n, dtype, device):
    """The op sorts each row twice, so it takes far longer than a copy of its bytes."""
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    generator = torch.Generator(device).manual_seed(3)
    index = torch.randint(shape[1], (shape[0], 8), generator=generator, device=device)
    y = F.pad(index, (0, shape[1] - 8), value=-1)
    wide = {"F.multilabel_margin_loss(x, y)": lambda x: F.multilabel_margin_loss(x.float(), y)}  # no fp16
    return Case(
        (tensor(n, dtype, device, 0, shape),),
        forward_bytes=s + 8,  # read x, y
        backward_bytes=s + 8,  # read the classes; write dx
        ours=lambda x: safeops.multilabel_margin_loss(x, y),
        eager=wide,
        compiled=lambda x: F.multilabel_margin_loss(x.float(), y),
        variant=True,
        counted=False,
    )


@case("multilabel_soft_margin_loss")
def multilabel_soft_margin_loss(n, dtype, device):
    """The loss is the mean of binary_cross_entropy_with_logits, so it moves that loss's bytes."""
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    y = tensor(n, dtype, device, 1, shape).detach().sigmoid()
    return Case(
        (tensor(n, dtype, device, 0, shape),),
        forward_bytes=2 * s,  # read x, y
        backward_bytes=3 * s,  # read x, y; write dx
        ours=lambda x: safeops.multilabel_soft_margin_loss(x, y),
        eager={"F.multilabel_soft_margin_loss(x, y)": lambda x: F.multilabel_soft_margin_loss(x, y)},
        compiled=lambda x: F.multilabel_soft_margin_loss(x, y),
        variant=True,
    )


def classification(name, suffix, **options):
    """Registers cases of a loss on LOGITS' shapes. options: passed to our function and to torch's."""

    @case(name + suffix)
    def build(n, dtype, device):
        shape = LOGITS[suffix.removesuffix("_smoothing")](n)
        s = dtype.itemsize
        x = tensor(n, dtype, device, 0, shape)
        generator = torch.Generator(device).manual_seed(1)
        rows = (shape[0], *shape[2:])
        target = torch.randint(0, shape[1], rows, generator=generator, device=device)
        function, its_twin = getattr(safeops, name), getattr(F, name)

        def theirs(x):
            return its_twin(x, target, **options)

        reads = name == "cross_entropy"  # nll_loss looks at one element of each row
        return Case(
            (x,),
            forward_bytes=s if reads else (8 + s) / shape[1],  # read x; or the class and one element of each row
            backward_bytes=2 * s if reads else s,  # read x; write dx
            ours=lambda x: function(x, target, **options),
            eager={f"F.{name}(x, target)": theirs},
            compiled=theirs,
            variant=bool(suffix),
            aten=theirs,
            arithmetic=reads,
            counted=reads and suffix != "_images",
        )


def nll_function(name, pattern, element, suffixes=("",)):
    """Registers cases of a loss that is a function of each row's cross entropy, so it moves cross_entropy's bytes.
    element: that function, as users write it. pattern: its text."""
    for suffix in suffixes:
        case(name + suffix)(functools.partial(_nll_function, name, pattern, element, suffix))


def _nll_function(name, pattern, element, suffix, n, dtype, device):
    shape, s, function = LOGITS[suffix](n), dtype.itemsize, getattr(safeops, name)
    generator = torch.Generator(device).manual_seed(1)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator, device=device)

    def theirs(x):
        return element(F.cross_entropy(x, target, reduction="none")).mean()

    return Case(
        (tensor(n, dtype, device, 0, shape),),
        forward_bytes=s,  # read x
        backward_bytes=2 * s,  # read x; write dx
        ours=lambda x: function(x, target),
        eager={f'l = F.cross_entropy(x, target, reduction="none"); {pattern}': theirs},
        compiled=theirs,
        variant=bool(suffix),
        aten=theirs,
        arithmetic=True,
        counted=suffix != "_images",
    )


def token_log_probs(suffix, with_argmax):
    """Registers a case. It adds the log probability of each row's class and the row's entropy: from one tensor the
    backward runs once."""

    @case("token_log_probs" + suffix)
    def build(n, dtype, device):
        rows, classes = shape = LOGITS[""](n)
        target = torch.randint(0, classes, (rows,), generator=torch.Generator(device).manual_seed(1), device=device)

        def ours(x):
            got = safeops.token_log_probs(x, target, with_argmax=with_argmax)
            return got.log_prob + got.entropy

        def theirs(x):
            result = log_prob_and_entropy(x.float().log_softmax(-1), target)
            return result + 0 * (x.argmax(-1) == target) if with_argmax else result

        return Case(
            (tensor(n, dtype, device, 0, shape),),
            forward_bytes=dtype.itemsize,  # read x
            backward_bytes=2 * dtype.itemsize,  # read x; write dx
            ours=ours,
            eager={"x.float().log_softmax(-1), gathered, and its entropy" + ", argmax" * with_argmax: theirs},
            compiled=theirs,
            aten=lambda x: F.cross_entropy(x, target, reduction="none"),
            variant=with_argmax,
            arithmetic=True,
        )


def log_prob_and_entropy(log_p, target):
    return log_p.gather(-1, target[:, None]).squeeze(-1) - (log_p.exp() * log_p).sum(-1)


for _suffix in SHAPES:
    softmax("masked_softmax", torch.softmax, _suffix)
softmax("masked_log_softmax", torch.log_softmax, "")
token_log_probs("", False)
token_log_probs("_argmax", True)
for _suffix in LOGITS:
    classification("cross_entropy", _suffix)
classification("cross_entropy", "_smoothing", label_smoothing=0.1)
classification("nll_loss", "")
nll_function(
    "softmax_focal_loss", "((1 - exp(-l))^2 l).mean()", lambda l: (1 - torch.exp(-l)) ** 2 * l, ("", "_images")
)
