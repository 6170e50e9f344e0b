"""The demo's picture: the left image, the measured disparity, two predictions, and the losses step by step."""

import io
import math

from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from PIL import Image

import safeops
from safeops.demo.data import DOFFS

COLORS = colormaps["turbo"].with_extremes(bad="black")
RANGE = Normalize(0, 64)  # px
USUAL, HAND, OURS = "#c0392b", "#b9c2c0", "#0f7b5a"


def draw(path, pair, usual, by_hand, ours):
    """usual: [(title, verdict, Run)]; by_hand, ours: Run."""
    figure = Figure(figsize=(13.6, 7.9), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    images, side = figure.subfigures(1, 2, width_ratios=(2.05, 1))
    _images(images, pair, max(usual, key=lambda entry: (entry[2].epe, len(entry[2].steps))), ours)
    curves, record = side.subplots(2, 1, height_ratios=(1.25, 1))
    _curves(curves, by_hand, ours)
    _record(record, usual)
    # 256 colors: a third of the bytes, and no visible difference.
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, format="png")
    Image.open(buffer).convert("RGB").quantize(256, kmeans=2).save(path, format="png", optimize=True)


def _images(figure, pair, worst, ours):
    title, verdict, run = worst
    heading = f"Usual loss, {title}" + ("" if any(step.moved for step in run.steps) else ": untrained")
    grid = figure.subplots(2, 2)
    truth = safeops.masked_fill(pair.truth - DOFFS, ~pair.known, math.nan)[0, 0].cpu().numpy()
    unknown = 100 * (~pair.known).float().mean().item()
    panels = [
        ("Left image of the pair", "Middlebury 2014, Motorcycle", pair.left[0].permute(1, 2, 0).cpu().numpy()),
        ("Measured disparity", f"black: unknown, {unknown:.0f} % of the pixels", truth),
        (heading, f"{verdict};  EPE {run.epe:.1f} px, bad-2.0 {run.bad2:.0f} %", _pixels(run)),
        ("safeops", f"{len(ours.steps)} steps;  EPE {ours.epe:.1f} px, bad-2.0 {ours.bad2:.0f} %", _pixels(ours)),
    ]
    for axes, (heading, note, pixels) in zip(grid.flat, panels):
        drawn = axes.imshow(pixels, cmap=COLORS, norm=RANGE)
        axes.set_title(heading, fontsize=12, fontweight="bold", loc="left", pad=22)
        note = axes.text(0, 1.025, note, transform=axes.transAxes, fontsize=10.5, color="#444444")
        note.set_in_layout(False)  # a long one must not shrink the picture
        axes.set_xticks([])
        axes.set_yticks([])
    bar = figure.colorbar(drawn, ax=grid, orientation="horizontal", shrink=0.5, aspect=45, pad=0.02)
    bar.set_label("disparity, pixels (near is red)")


def _pixels(run):
    return run.prediction[0, 0].float().cpu().numpy() - DOFFS


def _curves(axes, by_hand, ours):
    for run, color, label, width in ((by_hand, HAND, "repaired by hand", 7), (ours, OURS, "safeops", 2)):
        axes.plot([s.number for s in run.steps], [s.loss for s in run.steps], color=color, label=label, lw=width)
    axes.set_yscale("log")
    axes.set_yticks([t for t in (1, 2, 3, 5, 10, 15, 20, 50, 100) if axes.get_ylim()[0] < t < axes.get_ylim()[1]])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step")
    axes.set_title("Loss (logarithmic)", fontsize=12, fontweight="bold", loc="left")
    axes.legend(frameon=False, fontsize=10.5)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _record(axes, usual):
    """Write two lines for each usual variant: its verdict, and its loss at each step."""
    for row, (title, verdict, run) in enumerate(reversed(usual)):
        losses = "exception" if run.exception else " ".join(_short(s.loss) for s in run.steps[:8])
        axes.text(0, row + 0.48, f"{title}: {verdict}", fontsize=10.5, va="bottom")
        axes.text(0, row + 0.40, losses, fontsize=10, color=USUAL, va="top", family="monospace")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, len(usual))
    axes.axis("off")
    axes.set_title("Loss of the usual patterns, step by step", fontsize=12, fontweight="bold", loc="left")


def _short(loss):
    return f"{loss:.3g}" if math.isfinite(loss) else str(loss)
