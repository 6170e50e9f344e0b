"""H100 measurements for the table of docs/gpu-model.md: `python -m tests.kernels.measured` writes that column anew.

The figures are those of benchmarks/results/NVIDIA-H100/speed.md, at 64M elements. A row of the table has one if the
benchmarks have its op in its layout. Rows of 1,024 elements were measured where the model has 4,096, since either fits
a block, and 32,000 classes where it has 32,768.
"""

import re
import statistics
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, RESULTS = ROOT / "docs" / "gpu-model.md", ROOT / "benchmarks" / "results" / "NVIDIA-H100" / "speed.md"
HEAD = "| op | direction | layout | dtype | instr. | regs | KiB | rounds | bound by | H200 | 4M |"
COLUMN = "measured"
FAR = 0.1  # a difference from which docs/gpu-model.md has to give a reason

CASES = {  # the benchmark of an op of the table, where they differ by name
    "absolute_sum": None,
    "regions": None,  # of masked images of 16 classes; dice_loss was measured, of 4
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
    "binary_cross_entropy_with_logits False": "binary_cross_entropy_with_logits",  # without weights of classes
    "gaussian_nll_loss False": "gaussian_nll_loss",
    "kl_div False": "kl_div",
    "poisson_nll_loss True False": "poisson_nll_loss",
    "sigmoid_focal_loss True": "sigmoid_focal_loss",
}
ROWS = ("softmax", "log_softmax", "normalize", "cosine", "triplet_margin_loss", "cross_entropy", "safe_index_select")
ENDS = {  # (layout, op, None for any other) -> how the benchmark's name ends; other layouts have none
    **{("flat", op): "" for op in (None, "safe_gather")},
    ("flat", "grad_norm"): "_large",
    ("list", "grad_norm"): "_layers",
    **{("rows", op): "" for op in ROWS},
    ("rows", "masked_compact"): "_rows",
    ("rows of 32768", "softmax"): "_32768",
    **{("images", op): "" for op in ("ssim", "total_variation")},
}


class Row(NamedTuple):
    """A row of the table: (op, direction, layout, dtype), and shares of a copy's speed."""

    name: tuple
    predicted: float  # on an H100; in fp32 on an H200, since no other was worked out
    measured: float


def shares(text=None):
    """{(dtype, benchmark, direction): share} at 64M elements, but of the rows that may hold time of the host."""
    results = {}
    for section in (text or RESULTS.read_text()).split("\n## ")[1:]:
        dtype, size = section.splitlines()[0].split(", ")
        if size == "64M":
            for case, direction, share in re.findall(r"^\| (\w+) \| (\w+) \| ([\d.]+) \|", section, re.MULTILINE):
                results[dtype, case, direction] = float(share)
    return results


def of(name, measured):
    """The measured share of a row of the table, or None."""
    op, direction, layout, dtype = name
    end = ENDS.get((layout, op), ENDS.get((layout, None)))
    case = CASES.get(op, op)
    return None if end is None or case is None else measured.get((dtype, case + end, direction))


def table(text):
    """(head, rows) of the document: lists of cells."""
    lines = text[text.index(HEAD) :].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (lines[0], *lines[2:]) if line]
    return cells[0], cells[1:]


def compared(text=None):
    """The rows that have both."""
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
    """The document with the column, and the sentence that sums it up."""
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
