"""The measured column of docs/gpu-model.md equals the benchmarks' results, and the document gives a reason for each
large difference from the prediction."""

import re

import pytest

from tests.kernels import measured

TEXT = measured.DOCUMENT.read_text()


def test_the_column_is_that_of_the_results():
    assert measured.with_measured(TEXT) == TEXT, "python -m tests.kernels.measured"
    shown = {row.name: row.measured for row in measured.compared(TEXT)}
    assert len(shown) > 150
    assert shown["mse_loss", "backward", "flat", "bf16"] == 1.00  # read by hand from the results
    assert shown["largest", "forward", "flat", "fp32"] == 0.89
    assert shown["masked_compact", "forward", "rows", "bf16"] == 0.77
    assert ("mse_loss", "forward", "offset", "bf16") not in shown, "that was not measured"


def test_the_column_survives_a_new_table():
    """A table without the column and with other predictions, as `make gpu-model` writes it, gets the same column."""
    head, rows = measured.table(TEXT)
    place = head.index("H100")
    fresh = [" | ".join(["", *row[:place], "0.50" if row[place] else "", *row[place + 1 : -1], ""])[1:] for row in rows]
    without = "\n".join(["| " + " | ".join(head[:-1]) + " |", "|---" * (len(head) - 1) + "|", *fresh])
    again = measured.with_measured(TEXT[: TEXT.index(measured.HEAD)] + without + "\n")
    assert [row.measured for row in measured.compared(again)] == [row.measured for row in measured.compared(TEXT)]
    assert (
        measured.summary(measured.compared(again)) in again and measured.summary(measured.compared(TEXT)) not in again
    )


def test_another_result_is_another_column(monkeypatch):
    results = measured.RESULTS.read_text()
    line = next(line for line in results.splitlines() if line.startswith("| mse_loss | backward | 1.00 |"))
    changed = measured.shares(results.replace(line, line.replace("1.00", "0.24"), 1))
    assert measured.of(("mse_loss", "backward", "flat", "bf16"), changed) == 0.24
    assert measured.of(("mse_loss", "backward", "flat", "fp32"), changed) == 1.00


def test_times_of_the_host_are_left_out():
    assert "| masked_select | forward | 0.64* |" in measured.RESULTS.read_text()
    assert ("bf16", "masked_select", "forward") not in measured.shares()
    assert measured.shares()["bf16", "masked_select", "backward"] == 0.46


def test_what_misses_has_its_reason():
    (reasons,) = re.findall(r"^## What an H100 measured\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    far = [row for row in measured.compared(TEXT) if round(abs(row.measured - row.predicted), 2) > measured.FAR]
    assert far and not [row for row in far if not re.search(rf"\b{row.name[0].split()[0]}\b", reasons)]


@pytest.mark.parametrize("op", ["absolute_sum", "regions", "kl_div True"])
def test_no_figure_of_another_op(op):
    assert measured.of((op, "forward", "flat", "bf16"), measured.shares()) is None
