"""Draws the pictures of the page on speed from the committed results: shares of a copy's speed, and factors over
rivals."""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from docs_pictures import COLOURS, STYLE, svg

import safeops

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def rows(file, *columns):
    """Returns the rows, as {column: cell}, of the file's first table that has these columns."""
    tables = re.findall(r"(?:^\|.*\n)+", (RESULTS / file).read_text(), re.MULTILINE)
    for table in tables:
        names, _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        if set(columns) <= set(names):
            return [dict(zip(names, row)) for row in cells]


def dots(title, label, points, limits, logarithmic=False):
    """Draws a row of dots for each name, and returns the SVG text. points: {name: {(color, True if filled):
    [values]}}."""
    names = list(points)[::-1]
    with plt.rc_context({**STYLE, "font.size": 8}):
        figure, axes = plt.subplots(figsize=(4.4, 0.6 + 0.165 * len(names)), layout="constrained")
        for y, name in enumerate(names):
            for (colour, filled), values in points[name].items():
                axes.plot([min(max(v, limits[0]), limits[1]) for v in values], [y] * len(values), "o", markersize=4.5,
                          color=COLOURS[colour], markerfacecolor=COLOURS[colour] if filled else "none",
                          alpha=0.4 if colour == "text" else 1)  # fmt: skip
        axes.set(title=title, xlabel=label, yticks=range(len(names)), xscale="log" if logarithmic else "linear")
        axes.set_yticklabels(names)
        if logarithmic:
            ticks = [t for t in (0.1, 0.3, 1, 3, 10, 30) if limits[0] <= t <= limits[1]]
            axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
            axes.minorticks_off()
        axes.set(ylim=(-0.8, len(names) - 0.2), xlim=(limits[0] * 0.9, limits[1] * 1.05))
        axes.axvline(1, color=COLOURS["text"], linewidth=0.8)
        axes.grid(axis="y", color=COLOURS["exact"], linewidth=0.5)
        axes.tick_params(length=0)
        return svg(figure, re.sub(r"\W+", "-", title))


def figure(drawings, caption):
    return f'<figure class="plots tall">{"".join(drawings)}<figcaption>{caption}</figcaption></figure>'


FORWARD = '<span class="dot ours full">forward</span> <span class="dot ours">backward</span>'


def cpu():
    shares, factors = {}, {}
    for row in rows("AMD-EPYC-AVX512/cpu.md", "op", "of-floor", "x-fastest-eager"):
        if row["dtype"] == "bf16" and row["elements"] == "16M" and row["op"] in safeops.__all__:
            filled = row["direction"] == "forward"
            shares.setdefault(row["op"], {})["ours", filled] = [float(row["of-floor"])]
            rivals = factors.setdefault(row["op"], {})
            for colour, column in (("ours", "x-fastest-eager"), ("torch", "x-compile")):
                if re.match(r"[\d.]+$", row[column]):
                    rivals[colour, filled] = [float(row[column])]
    drawings = (
        dots("share of a copy's speed, CPU", "1: a copy of the bytes that must move", shares, (0, 1.1)),
        dots("times as fast as torch, CPU", "1: as fast", factors, (0.3, 30), logarithmic=True),
    )
    return figure(
        drawings,
        f'{FORWARD}; on the right over <span class="dot ours full">eager torch</span> and <span class="dot torch full">'
        "torch.compile</span>. 16M elements, bf16, 2 threads of an AMD EPYC with AVX-512, torch 2.13. Below 0.3, and "
        "beyond 30: at the edge.",
    )


def h100():
    shares, factors = {}, {}
    for row in rows("NVIDIA-H100/speed.md", "case", "direction", "share"):
        if row["case"] in safeops.__all__ and "*" not in row["share"]:
            shares.setdefault(row["case"], {})["ours", row["direction"] == "forward"] = [float(row["share"])]
    for file, name, ours in (("rivals.md", "case", "ours"), ("rivals-2026-11-27.md", "contest", "GPU ms")):
        for row in rows(f"NVIDIA-H100/{file}", name, "direction", "fastest rival"):  # the later file's row wins
            contest, time = re.sub("/bf16(?=/|$)", "", row[name]), re.match(r"[\d.]+", row[ours])
            if contest != row[name] and time:
                others = [re.search(r" ([\d.]+)( \(|$)", other) for other in row["the others, ms"].split(", ")]
                others = [float(x[1]) / float(time[0]) for x in others if x and not x.string.startswith("floor")]
                filled = row["direction"] == "forward"
                points = factors.setdefault(contest, {})
                points["text", filled], points["ours", filled] = others, [float(row["ratio"])]
    drawings = (
        dots("share of a copy's speed, H100", "1: a copy of the bytes that must move", dict(sorted(shares.items())),
             (0, 1.1)),
        dots("times as fast as rivals, H100", "1: as fast", factors, (0.1, 30), logarithmic=True),
    )  # fmt: skip
    return figure(
        drawings,
        f'{FORWARD} (on the right both together); <span class="dot ours full">the fastest rival</span>, '
        '<span class="dot text full">the others</span>. bf16, an NVIDIA H100 80GB HBM3, torch 2.11, Triton 3.6: on the '
        "left 64M elements, on 26 November 2026, on the right what was compared on that day or, again, on the next. "
        "Below 0.1, and beyond 30: at the edge.",
    )


PICTURES = {"cpu": cpu, "h100": h100}
