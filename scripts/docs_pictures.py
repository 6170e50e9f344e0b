"""Draws the pictures of the functions' pages: an op's results beside those of torch's usual expression, for fp16
operands on the CPU.

A picture is two drawings as SVG, of the value and of the gradient; the page's style sheet sets their colors. The line
"exact" is the op's own result for fp64 operands, which the tests compare with definitions from outside safeops.
"""

import io
import re
import warnings

import matplotlib
import torch
from torch import where  # noqa: F401  (for the expressions)

import safeops
from benchmarks.case import build, names
from benchmarks.losses import ELEMENTS
from safeops.core.op import registry

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"exact": "#000001", "torch": "#000002", "ours": "#000003", "text": "#000004"}  # on a page: var(--plot-...)
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "safeops", "font.size": 10, "font.family": "sans-serif",
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.formatter.limits": (-4, 5),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), COLOURS["text"]),
}  # fmt: skip
DTYPES = {"exact": torch.float64, "torch": torch.float16, "ours": torch.float16}
# Our expression with the options that the benchmark's case uses.
OPTIONS = {
    "box_iou_loss": 'safeops.box_iou_loss(x, y, kind="giou")',
    "cosine_embedding_loss": "safeops.cosine_embedding_loss(a, b, y, margin=0.2)",
}
HUNDRED = torch.tensor(100, dtype=torch.float16)

# name: (our expression, torch's expression, start and end of x)
NUMBERS = {
    "apply_where": ("safeops.apply_where(x > 0, x, torch.sqrt, fill_value=0)", "where(x > 0, x.sqrt(), 0)", -1, 2),
    "log1mexp": ("safeops.log1mexp(x)", "(1 - x.exp()).log()", -0.01, 0.001),
    "magnitude": ("safeops.magnitude(x, HUNDRED)", "(x**2 + HUNDRED**2).sqrt()", 0, 500),
    "safe_acos": ("safeops.safe_acos(x)", "x.acos()", 0.97, 1.01),
    "safe_acosh": ("safeops.safe_acosh(x)", "x.acosh()", 0.99, 1.03),
    "safe_asin": ("safeops.safe_asin(x)", "x.asin()", 0.97, 1.01),
    "safe_atan2": ("safeops.safe_atan2(x, 0.01 / HUNDRED)", "x.atan2(0.01 / HUNDRED)", -1e-3, 1e-3),
    "safe_div": ("safeops.safe_div(HUNDRED, x, eps=0.05, fill_value=None)", "HUNDRED / (x + 1e-8)", 0, 0.4),
    "safe_exp": ("safeops.safe_exp(x)", "x.exp()", 8, 14),
    "safe_log": ("safeops.safe_log(x, eps=1e-8)", "(x + 1e-8).log()", -2e-5, 1e-4),
    "safe_pow": ("safeops.safe_pow(x, 0.5)", "x**0.5", -0.002, 0.01),
    "safe_reciprocal": ("safeops.safe_reciprocal(x, eps=0.01)", "where(x.abs() < 0.01, 0, 1 / x)", -0.05, 0.05),
    "safe_rsqrt": ("safeops.safe_rsqrt(x, eps=1e-8)", "(x + 1e-8).rsqrt()", -1e-3, 5e-3),
    "safe_sqrt": ("safeops.safe_sqrt(x)", "x.sqrt()", -2e-4, 1e-3),
    "xlogy": ("safeops.xlogy(x, x)", "x * x.log()", 0, 1e-3),
}
# name: (start and end of the first tensor, the value of each other tensor). torch's expression is the benchmark's.
LOSSES = {
    "binary_cross_entropy": (0, 2e-5, 1), "binary_cross_entropy_with_logits": (-20, 20, 1),
    "charbonnier_loss": (0, 500, 0), "gaussian_kl_div": (0, 500, 0), "gaussian_nll_loss": (0, 5, 0, 1e-4),
    "hinge_embedding_loss": (-2, 2, -1), "huber_loss": (-3, 3, 0), "js_div": (0, 1e-3, 0.5), "kl_div": (-20, 0, 0.5),
    "l1_loss": (-3, 3, 0), "log_cosh_loss": (-20, 20, 0), "margin_ranking_loss": (-2, 2, 0, 1),
    "mse_loss": (0, 500, 0), "poisson_nll_loss": (8, 14, 2), "quantile_loss": (-3, 3, 0),
    "sigmoid_focal_loss": (-20, 20, 1), "smooth_l1_loss": (-3, 3, 0), "soft_margin_loss": (-20, 20, 1),
}  # fmt: skip
# Ops whose torch expressions fail: SCALED on operands of large or small size, SIZED on many operands.
SCALED = (
    "box_iou_loss cosine_embedding_loss cosine_similarity cross_entropy lpips_distance masked_norm masked_rms "
    "masked_std masked_sum_of_squares masked_var multilabel_soft_margin_loss normalize psnr safe_norm segment_sum "
    "si_sdr_loss ssim ssim_loss triplet_margin_loss"
).split()
SIZED = "dice_loss generalized_dice_loss masked_mean masked_sum total_variation tversky_loss".split()
ROWS = ("masked_log_softmax", "masked_softmax")
PICTURES = {*NUMBERS, *LOSSES, *SCALED, *SIZED, *ROWS}
names()  # registers the benchmarks' cases


# ---- the numbers of a picture: (label of the x axis, x, {"exact", "torch", "ours": (values, gradients)}, torch's
# expression)


def of_numbers(label, ours, text, theirs, x):
    """Returns the numbers for an elementwise function: its value and gradient at each x."""
    lines = {}
    for who, dtype in DTYPES.items():
        leaf = x.half().to(dtype, copy=True).requires_grad_()
        y = (theirs if who == "torch" else ours)(leaf)
        lines[who] = y.detach().double(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0].double()
    return label, x.half().double(), lines, text


def of_cases(label, x, cases, pattern):
    """Returns the numbers for a benchmark's function: at each x, the first element of its result and the largest
    magnitude of its gradient. cases: a (Case, operands) for each x. pattern: which of the case's patterns is torch's
    expression."""
    lines = {who: [] for who in DTYPES}
    for case, operands in cases:
        for who, dtype in DTYPES.items():
            leaves = [t.detach().half().to(dtype).requires_grad_(t.requires_grad) for t in operands]
            y = ([*case.eager.values()][pattern] if who == "torch" else case.ours)(*leaves)
            gradient = torch.autograd.grad(y.double().sum(), leaves[0])[0]
            lines[who].append((y.detach().double().flatten()[0], gradient.double().abs().max()))
    lines = {who: tuple(map(torch.stack, zip(*pairs))) for who, pairs in lines.items()}
    return label, torch.tensor(x, dtype=torch.float64), lines, [*case.eager][pattern]


def lines_of(name):
    if name in NUMBERS:
        ours, text, start, stop = NUMBERS[name]
        ours, theirs = (eval(f"lambda x: {code}", globals()) for code in (ours, text))
        return of_numbers("x", ours, text, theirs, torch.linspace(start, stop, 401))
    if name in LOSSES:
        (start, stop, *others), (text, element), loss = LOSSES[name], ELEMENTS[name], getattr(safeops, name)
        tensors = [torch.full((401,), y, dtype=torch.float16) for y in others]
        names = registry[name].names
        label = ", ".join([names[0], *map("{} {}".format, names[1:], others)])
        text = f"F.{name}({', '.join(['x', 'y', 'z'][: len(names)])})" if "'none'" in text else text
        return of_numbers(label, lambda x: loss(x, *tensors, reduction="none"), text, lambda x: element(x, *tensors),
                          torch.linspace(start, stop, 401))  # fmt: skip
    if name in ROWS:
        mask, softmax = torch.arange(8) < torch.arange(9).unsqueeze(1), getattr(torch, name.removeprefix("masked_"))

        def row(x):  # element 0 is x - x.detach() = 0, so x.grad is its gradient
            return torch.cat([x[:, None] - x.detach()[:, None], torch.linspace(-1, 1, 7).to(x).expand(9, 7)], 1)

        return of_numbers(
            "elements that are kept, of 8", lambda x: getattr(safeops, name)(row(x), mask)[:, 0],
            f"{softmax.__name__}(x.masked_fill(~m, -inf), -1)",
            lambda x: softmax(row(x).masked_fill(~mask, -torch.inf), -1)[:, 0], torch.arange(9.0),
        )  # fmt: skip
    if name in SCALED:
        scales = torch.logspace(-5, 4, 28).tolist()
        case = build("cross_entropy_images" if name == "cross_entropy" else name, 4096, torch.float16, "cpu")
        return of_cases("factor on the operands", scales, [(case, [x * s for x in case.inputs]) for s in scales], 0)
    sizes = [2**i for i in range(6, 21)]
    cases = (build(name, n, torch.float16, "cpu") for n in sizes)
    # absolute values, since a sum of numbers of both signs would stay small
    cases = ((case, [(x.detach().abs() + 0.1).requires_grad_() for x in case.inputs]) for case in cases)
    return of_cases("elements", sizes, cases, 1 if name == "masked_mean" else 0)


# ---- the drawings


def picture(name):
    """Returns (our expression, torch's expression, the two drawings as SVG text)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        label, x, lines, text = lines_of(name)
    drawings = (_draw(title, label, x, {who: line[i] for who, line in lines.items()})
                for i, title in enumerate(("value", "gradient")))  # fmt: skip
    ours = OPTIONS.get(name) or NUMBERS.get(name, ["safeops"])[0]
    return ours.replace("HUNDRED", "torch.tensor(100)"), text.replace("HUNDRED", "100"), "".join(drawings)


def _draw(title, label, x, lines):
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(3.7, 2.6), layout="constrained")
        logarithmic = bool(x[-1] > 100 * x[0] > 0)
        axes.set(xlabel=label, xscale="log" if logarithmic else "linear")
        axes.set_title(f"largest {title}" if logarithmic and title == "gradient" else title)
        ours = lines["ours"][lines["ours"].isfinite()]
        if logarithmic and 0 < 1000 * ours.min() < ours.max():
            axes.set_yscale("log")
        elif not logarithmic:
            axes.locator_params("x", nbins=5)
        marker = {"marker": "o", "markersize": 3} if len(x) < 10 else {}
        axes.margins(x=0.02, y=0.08)
        axes.plot(x, lines["ours"], color=COLOURS["ours"], linewidth=1.8, **marker)
        axes.plot(x, lines["torch"], color=COLOURS["torch"], linewidth=1.4, linestyle=(0, (4, 2)), **marker)
        axes.set_ylim(axes.get_ylim())  # fixed before the exact line is drawn, which may be far outside of fp16's range
        axes.plot(x, lines["exact"], color=COLOURS["exact"], linewidth=5, zorder=1)
        _shade(axes, x, lines["torch"], torch.log if logarithmic else torch.Tensor.double)
        return svg(figure, title)


def _shade(axes, x, line, scale):
    """Shades the ranges of x where torch's line is not finite, and writes NaN or inf into wide ranges."""
    kinds = ["NaN" if v.isnan() else "inf" if v.isinf() else "" for v in line]
    starts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    ends = [x[0], *((x[i - 1] + x[i]) / 2 for i in starts[1:]), x[-1]]
    for i, low, high in zip(starts, ends, ends[1:]):
        if kinds[i]:
            axes.axvspan(low, high, color=COLOURS["torch"], alpha=0.14, linewidth=0)
            if scale(high) - scale(low) > 0.07 * (scale(x[-1]) - scale(x[0])):
                middle = (low * high).sqrt() if scale is torch.log else (low + high) / 2
                axes.text(middle, 1, kinds[i], transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=9,
                          color=COLOURS["torch"])  # fmt: skip


def svg(figure, title):
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue()[file.getvalue().index("<svg") :], flags=re.DOTALL)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--plot-{name})")
    text = re.sub(r'(id="|#)(?=\w)(?!0000)', rf"\1{title}-", text)  # ids must be unique on a page of two drawings
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{title}"', text, count=1)
