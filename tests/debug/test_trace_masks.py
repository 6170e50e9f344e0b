"""For a NaN in the data, trace names the line whose mask should have removed the NaN but did not."""

import pytest
import torch
import torch.nn.functional as F

from safeops.debug.trace.block import Block
from tests.debug.tracing import traced

NAN = float("nan")


def error(p, y):
    return (p - y).abs().sqrt()


PRODUCTS = {
    "mul": lambda p, y, m: (error(p, y) * m).sum(),
    "in place": lambda p, y, m: (p - y).mul_(m.float()).sum(),
    "weights": lambda p, y, m: (m * torch.tensor([2.5, 1.0, 0.3]) * error(p, y)).sum(),
    "rows": lambda p, y, m: (error(p[:, None], y[:, None].expand(3, 4)) * m[:, None]).sum(),
    "more masks": lambda p, y, m: (error(p, y) * m.expand(2, 3)).sum(),
    "addcmul": lambda p, y, m: torch.addcmul(torch.zeros(3), error(p, y), m.float()).sum(),
    "dot": lambda p, y, m: torch.dot(m.float(), error(p, y)),
    "mv": lambda p, y, m: (m.float().expand(2, 3) @ error(p, y)).sum(),
    "mm": lambda p, y, m: (m.float()[:, None].t() @ error(p, y)[:, None]).sum(),
    "mm, a column": lambda p, y, m: (torch.ones(3, 2).mul(error(p, y)[:, None]).t() @ m.float()[:, None]).sum(),
    "addmm": lambda p, y, m: torch.addmm(torch.ones(1, 1), m.float()[None], error(p, y)[:, None]).sum(),
    "einsum": lambda p, y, m: torch.einsum("i,i->", error(p, y), m.float()),
    "einsum, rows": lambda p, y, m: torch.einsum("ij,i->j", error(p[:, None], y[:, None].expand(3, 4)), m * 1.0).sum(),
    "cross entropy": lambda p, y, m: F.binary_cross_entropy_with_logits(p, y, weight=m.float()),
}
LATE = {
    "masked_fill": lambda p, y, m: error(p, y).masked_fill(~m, 0).sum(),
    "where": lambda p, y, m: torch.where(m, error(p, y), 0).sum(),
    "index": lambda p, y, m: error(p, y)[m].sum(),
    "nan_to_num": lambda p, y, m: error(p, y).nan_to_num(0).sum(),
    "of a product": lambda p, y, m: torch.where(m, p * y, 0).sum(),
    "further on": lambda p, y, m: (error(p, y) + 1).masked_fill(~m, 0).mul(2).sum(),
}


def report_of(loss, target=(1.0, NAN, 0.5), mask=(True, False, True)):
    p = torch.tensor([0.5, 0.0, 2.0], requires_grad=True)
    return traced(lambda: loss(p, torch.tensor(target), torch.tensor(mask)).backward()).report


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_mask_is_named(name):
    report = report_of(PRODUCTS[name])
    assert report.kind == "came in" and "NaN * 0 is NaN: a product does not mask" in report.why, str(report)
    assert "select instead" in report.instead and report.line.function == "<lambda>", str(report)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_keeps_it_is_not_blamed(name):
    assert "does not mask" not in report_of(PRODUCTS[name], mask=(False, True, True)).why


@pytest.mark.parametrize("name", PRODUCTS)
def test_where_counts_cannot_be_read_before_the_step_ends(name, monkeypatch):
    """On a GPU trace cannot read its counts of NaN before the step ends, so it keeps every product as a candidate: it
    must not blame a product of finite operands."""
    monkeypatch.setattr(Block, "finite", lambda self, row: False)
    assert "does not mask" in report_of(PRODUCTS[name]).why
    assert "does not mask" not in report_of(PRODUCTS[name], mask=(False, True, True)).why
    assert report_of(PRODUCTS[name], target=(1.0, 0.25, 0.5)) is None


@pytest.mark.parametrize("name", LATE)
def test_a_mask_after_the_arithmetic_is_named(name):
    report = report_of(LATE[name])
    assert report.kind == "came in" and report.reached == "a gradient" and report.phase == "forward", str(report)
    assert "masked after the arithmetic: its gradient is NaN * 0; mask the operands before" in report.why, str(report)
    assert "apply_where" in report.instead and report.line.function == "<lambda>" and report.op in (name, "where",
        "masked_fill"), str(report)  # fmt: skip


def test_a_mask_before_the_arithmetic_is_right():
    assert report_of(lambda p, y, m: error(p, torch.where(m, y, 9)).masked_fill(~m, 0).sum()) is None


def test_of_a_right_and_a_late_mask_the_late_one_is_named():
    def loss(p, y, m):
        right = error(p, torch.where(m, y, 9)).sum()
        return right + torch.where(m, error(p, y), 0).sum()  # LATE

    report = report_of(loss)
    assert report.line.text.endswith("# LATE"), str(report)


def test_a_zero_of_what_is_learned_is_no_mask():
    assert "does not mask" not in report_of(lambda p, y, m: (p * y).sum()).why
