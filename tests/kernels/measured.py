"""Fills the column of H100 measurements in the table of docs/gpu-model.md: `python -m tests.kernels.measured`.

The figures come from benchmarks/results/NVIDIA-H100/speed.md, at 64M elements. A row has one if the benchmarks measure
its op in its layout. Some lengths differ: the benchmarks have rows of 1,024 elements where the model has 4,096 (one
block holds either row), and 32,000 classes where the model has 32,768.
"""

import re
import statistics
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, RESULTS = ROOT / "docs" / "gpu-model.md", ROOT / "benchmarks" / "results" / "NVIDIA-H100" / "speed.md"
HEAD = "| op | direction | layout | dtype | instr. | regs | KiB | rounds | bound by | H200 | 4M |"
COLUMN = "measured"
FAR = 0.1  # docs/gpu-model.md gives a reason for a larger difference

CASES = {  # op of the table -> its benchmark, where the names differ; None: it has no benchmark
    "absolute_sum": None,
    "regions": None,  # 16 classes with a mask; the benchmark of dice_loss has 4
    "count": "masked_count",
    "square_sum": "masked_sum_of_squares",
    "largest": "masked_amax",
    "smallest": "masked_amin",
    "linear slope": "masked_sum_of_squares",
    "equal slope": "masked_amax",
    "exponential slope": "masked_logsumexp",
    **{op: f"masked_{op}" for op in ("norm", "rms", "logsumexp", "var", "std", "softmax", "log_softmax")},
    "cosine": "cosine_similarity",
    "masked_compact": "masked_compact_50",
    "binary_cross_entropy_with_logits False": "binary_cross_entropy_with_logits",  # without class weights
    "gaussian_nll_loss False": "gaussian_nll_loss",
    "kl_div False": "kl_div",
    "poisson_nll_loss True False": "poisson_nll_loss",
    "sigmoid_focal_loss True": "sigmoid_focal_loss",
}
ROWS = ("softmax", "log_softmax", "normalize", "cosine", "triplet_margin_loss", "cross_entropy", "safe_index_select")
ENDS = {  # (layout, op or None for any op) -> end of the benchmark's name; other layouts have no benchmark
    **{("flat", op): "" for op in (None, "safe_gather")},
    ("flat", "grad_norm"): "_large",
    ("list", "grad_norm"): "_layers",
    **{("rows", op): "" for op in ROWS},
    ("rows", "masked_compact"): "_rows",
    ("rows of 32768", "softmax"): "_32768",
    **{("images", op): "" for op in ("ssim", "total_variation")},
}


class Row(NamedTuple):
    """A row of the table. name: (op, direction, layout, dtype). predicted, measured: its shares of the copy
    bandwidth."""

    name: tuple
    predicted: float  # for an H100; for an H200 in fp32, which has no H100 prediction
    measured: float


def shares(text=None):
    """Returns {(dtype, benchmark, direction): share of the copy bandwidth} at 64M elements. Rows that may include the
    host's time are left out."""
    results = {}
    for section in (text or RESULTS.read_text()).split("\n## ")[1:]:
        dtype, size = section.splitlines()[0].split(", ")
        if size == "64M":
            for case, direction, share in re.findall(r"^\| (\w+) \| (\w+) \| ([\d.]+) \|", section, re.MULTILINE):
                results[dtype, case, direction] = float(share)
    return results


def of(name, measured):
    """Returns the measured share of the row `name`, or None if no benchmark measures it."""
    op, direction, layout, dtype = name
    end = ENDS.get((layout, op), ENDS.get((layout, None)))
    case = CASES.get(op, op)
    return None if end is None or case is None else measured.get((dtype, case + end, direction))


def table(text):
    """Returns (head, rows) of the document's table, as lists of cells."""
    lines = text[text.index(HEAD) :].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:]) if line]
    return cells[0], cells[1:]


def compared(text=None):
    """Returns the rows that have a prediction and a measurement."""
    head, rows = table(text or DOCUMENT.read_text())
    h200, h100, predicted = (head.index(name) for name in ("H200", "H100", COLUMN))
    return [Row(tuple(row[:4]), float(row[h100] or row[h200]), float(row[predicted])) for row in rows if row[predicted]]


def summary(rows):
    apart = [abs(row.measured - row.predicted) for row in rows]
    return (
        f"Of {len(rows)} rows that have both, the median difference is {statistics.median(apart):.2f}, and "
        f"{sum(round(d, 2) <= FAR for d in apart)} are within {FAR}."
    )


def with_measured(text):
    """Returns the document with a new column and a new summary sentence."""
    head, rows = table(text)
    if head[-1] == COLUMN:
        head, rows = head[:-1], [row[:-1] for row in rows]
    result = shares()
    lines = [
        [*head, COLUMN],
        *([*row, "" if (measured := of(row[:4], result)) is None else f"{measured:.2f}"] for row in rows),
    ]
    drawn = ["| " + " | ".join(line) + " |" for line in lines]
    text = text[: text.index(HEAD)] + "\n".join([drawn[0], "|---" * len(lines[0]) + "|", *drawn[1:]]) + "\n"
    sentence = r"Of \d+ rows that have both, the median difference is [\d.]+, and\s+\d+ are within [\d.]+\."
    changed, count = re.subn(sentence, summary(compared(text)), text)
    assert count == 1, f"{DOCUMENT.name}: one sentence sums the column up, not {count}"
    return changed


if __name__ == "__main__":
    DOCUMENT.write_text(with_measured(DOCUMENT.read_text()))
