"""The page of a Comparison: one file without scripts, which loads nothing. Curves are SVG."""

import html
import math
from pathlib import Path

from safeops.debug.compare.entry import FORWARD
from safeops.debug.compare.projection import LARGEST
from safeops.debug.page.page import style

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 230, 52, 12, 26, 22  # px of a chart, and its margins
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">"""
STYLE = """
.charts { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
.grid { stroke: var(--line); } .a { stroke: var(--accent); } .b { stroke: var(--hot); stroke-dasharray: 5 3; }
.difference { stroke: var(--ink); } .budget { stroke: var(--quiet); stroke-dasharray: 2 3; }
polyline { fill: none; stroke-width: 1.6; } .first { stroke: var(--hot); stroke-width: 2; }
circle { fill: transparent; } tr.differs td { color: var(--hot); } tr.found td { font-weight: 600; }
"""


def write(file, comparison):
    """Write the page of a Comparison into a file."""
    Path(file).write_text(_page(comparison), encoding="utf-8")


def _page(comparison):
    a, b = map(html.escape, comparison.names)
    parts = [
        HEAD,
        f'<link rel="icon" href="data:,">\n<title>safeops compare: {a} and {b}</title>',
        f"<style>{style()}{STYLE}</style>",
        f"<h1>{a} and {b}, module by module</h1>",
        f"<pre>{html.escape(str(comparison))}</pre>",
    ]
    for phase, first in ((FORWARD, comparison.forward), ("backward", comparison.backward)):
        rows = [d for d in comparison.differences if (d.phase == FORWARD) == (phase == FORWARD)]
        if rows:
            parts += [f"<h2>{phase.capitalize()}, in the order of execution</h2>", '<div class="charts">']
            mark = rows.index(first) if first else None
            parts.append(_chart(f"norm: a {a} (solid), b {b} (dashed)", rows, mark, _norms(rows)))
            parts.append(_chart("difference (solid) and its budget (dotted)", rows, mark, _differences(rows)))
            parts += ["</div>", _table(rows, first)]
    return "\n".join([*parts, "</html>\n"])


def _norms(rows):
    return {"a": [d.a.norm for d in rows], "b": [d.b.norm for d in rows]}


def _differences(rows):
    return {"difference": [d.difference for d in rows], "budget": [d.budget for d in rows]}


def _chart(title, rows, mark, curves):
    """Curves over the rows, on a logarithmic axis; 0 lies at its foot, what is not finite at its top."""
    numbers = [math.log10(y) for ys in curves.values() for y in ys if 0 < y < math.inf] or [0.0]
    low, high = math.floor(max(min(numbers), max(numbers) - 20)), math.ceil(max(numbers) + 1e-9)
    high = max(high, low + 1)

    def x(i):
        return LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(rows)

    def y(value):
        log = high if value == math.inf else math.log10(value) if value > 0 else low
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - min(max(log, low), high)) / (high - low)

    parts = [f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f'<title>{title}</title><text x="{LEFT}" y="14">{title}</text>')
    for decade in range(low, high + 1, max(1, (high - low) // 5)):
        line = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line:.1f}" y2="{line:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{line + 4:.1f}" text-anchor="end">1e{decade}</text>')
    if mark is not None:
        parts.append(f'<line class="first" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        anchor = "end" if mark > len(rows) / 2 else "start"
        name = html.escape(rows[mark].module)
        parts.append(f'<text x="{x(mark):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{name}</text>')
    for name, values in curves.items():
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline class="{name}" points="{points}"/>')
    for i, row in enumerate(rows):
        text = ", ".join(f"{name} {values[i]:.3g}" for name, values in curves.items())
        height = y(next(iter(curves.values()))[i])
        title = html.escape(f"{row.module}, {row.what}: {text}")
        parts.append(f'<circle cx="{x(i):.1f}" cy="{height:.1f}" r="6"><title>{title}</title></circle>')
    return "\n".join([*parts, "</svg>"])


def _table(rows, first):
    head = ("module", "what", "call", "norm a", "norm b", "largest a", "largest b", "difference", "budget", "ratio")
    numbers = 3  # columns before the first of numbers
    lines = ["<details><summary>All numbers</summary><div><table><tr>"]
    lines += [f"<th{' class=number' if i >= numbers else ''}>{name}</th>" for i, name in enumerate(head)]
    for d in rows:
        values = (d.a.norm, d.b.norm, d.a.stats[LARGEST], d.b.stats[LARGEST], d.difference, d.budget, d.ratio)
        kind = "found" if d is first else "differs" if d.differs else ""
        cells = [html.escape(d.module), html.escape(d.what), str(d.call + 1)]
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        row += "".join(f"<td class=number>{value:.3g}</td>" for value in values)
        lines.append(f'<tr class="{kind}{" differs" if kind == "found" else ""}">{row}')
    return "\n".join([*lines, "</table></div></details>"])
