"""trace names the op, the phase, the module, the line and the cause of the first value that is not finite."""

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.debug import trace
from tests.debug.tracing import leaf, traced


def log_of_zero(x):
    return (x * torch.log(x)).sum()  # HERE


def where_after_division(x):
    return torch.where(x > 0, 1 / x, 0).sum()  # HERE


def norm_by_hand(x):
    return (x * 0).pow(2).sum().sqrt()  # HERE


def zero_norm(x):
    y = x * 0
    return (y / y.norm()).sum()  # HERE


def half_square(x):
    return (x.half() * 200 * (x.half() * 200)).float().sum()  # HERE


def half_sum(x):
    return (x.half() + 60000).sum()  # HERE


def half_exp(x):
    return (x.half() * 6).exp().float().sum()  # HERE


def half_matmul(x):
    return ((x.half() * 200)[None] @ (x.half() * 200)[:, None]).float().sum()  # HERE


def padded_vocabulary(x):
    log_p = torch.cat([x, torch.tensor([-float("inf")])]).log_softmax(-1)
    return F.kl_div(log_p, torch.tensor([0.5, 0.5, 0.0]), reduction="sum")  # HERE


def ctc_without_room(x):
    log_p = x.expand(1, 1, 2).log_softmax(-1)
    return F.ctc_loss(log_p, torch.tensor([[1, 1]]), torch.tensor([1]), torch.tensor([2]))  # HERE


def mask_by_multiplication(x):
    return ((x / torch.tensor([0.0, 1.0])) * torch.tensor([0.0, 1.0])).sum()  # HERE


def hidden_row(x):
    return x[None].masked_fill(torch.tensor(True), float("-inf")).softmax(-1).sum()  # HERE


def one_deviation(x):
    return x[:1].std()  # HERE


def acos_at_one(x):
    return torch.acos((x - 2).clamp(-1, 1) + 1).sum()  # HERE


def acosh_at_one(x):
    return (torch.acosh(x * 0 + 1) * 0).sum()  # HERE


def in_place(x):
    y = x * 1
    y.log_()  # HERE
    return y.sum()


def of_a_slice(x):
    y = torch.cat([x, torch.tensor([float("inf")])])
    return torch.log(y[:2]).mul(2).sum()  # HERE


def all_ignored(x):
    return F.cross_entropy(x[None], torch.tensor([-100]))  # HERE


def row_by_row(x):
    rows = torch.zeros(3, 2)
    for t in range(3):
        rows[t] = (x + 1) / (1 - t)  # HERE
    return (rows * 2).sum()


def no_probability(x):
    return safeops.binary_cross_entropy(x, torch.ones(2), reduction="none").sum()  # HERE


def a_nan_of_ones_own(x):
    return (x * torch.full((2,), float("nan"))).sum()  # HERE


CASES = [  # (what the step does, op, phase, kind, a part of why, a part of the replacement)
    (log_of_zero, "log", "forward", "undefined", "log(0) is -inf", "safe_log"),
    (where_after_division, "reciprocal", "forward", "undefined", "reciprocal(0) is inf", "safe_reciprocal"),
    (norm_by_hand, "div", "backward", "undefined", "div(1, 0) is inf", "safe_sqrt"),
    (zero_norm, "div", "forward", "undefined", "div(0, 0) is nan", "safe_div"),
    (half_square, "mul", "forward", "overflow", "mul(400, 400) is 160000", "safeops.fp32_region"),
    (half_exp, "exp", "forward", "overflow", "exp(12) is 162755, too large for float16", "safeops.safe_exp"),
    (half_matmul, "mm", "forward", "overflow", "does not fit float16", "safeops.fp32_region"),
    (padded_vocabulary, "mul", "forward", "came in", "and inf * 0 is NaN", "safeops.kl_div"),
    (ctc_without_room, "_ctc_loss", "forward", "undefined", "no finite value", "safeops.ctc_loss"),
    (half_sum, "sum", "forward", "overflow", "(at most 60000), and its result does not fit float16", "masked_sum"),
    (mask_by_multiplication, "div", "forward", "undefined", "div(0, 0) is nan", "safe_div"),
    (hidden_row, "_softmax", "forward", "undefined", "2 -inf of 2 elements, from masked_fill", "masked_softmax"),
    (one_deviation, "std", "forward", "undefined", "not more elements", "masked_std"),
    (acos_at_one, "rsqrt", "backward", "undefined", "rsqrt(0) is inf", "safe_acos"),
    (acosh_at_one, "rsqrt", "backward", "undefined", "rsqrt(0) is inf", "safe_acosh"),
    (in_place, "log_", "forward", "undefined", "log_ has no finite value for these operands", "safe_log"),
    (all_ignored, "nll_loss_forward", "forward", "undefined", "no finite value", "safeops.cross_entropy"),
    (of_a_slice, "log", "forward", "undefined", "log(0) is -inf", "safe_log"),
    (row_by_row, "div", "forward", "undefined", "div(1, 0) is inf", "safe_div"),
    (no_probability, "_binary_cross_entropy", "forward", "undefined", "no finite value", "with_logits on what went in"),
    (a_nan_of_ones_own, "full", "forward", "came in", "full wrote 2 NaN of 2 elements", "mask"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_the_cause_is_named(case):
    loss, op, phase, kind, why, instead = case
    x = leaf(0.0, 2.0)
    report = traced(lambda: loss(x).backward()).report
    assert (report.op, report.phase, report.kind) == (op, phase, kind), str(report)
    assert why in report.why and instead in (report.instead or ""), str(report)
    assert report.line.file == __file__ and report.line.text.rstrip().endswith("# HERE"), str(report)
    assert report.line.function == loss.__name__ and report.lines[1].function == "<lambda>"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("make, kinds, cells", [
    (lambda x: (x - 1).sqrt(), "1 NaN", ("1", "")),
    (lambda x: x.reciprocal(), "1 inf", ("", "1")),
    (lambda x: x.log(), "1 -inf", ("", "1")),
], ids=["NaN", "inf", "-inf"])  # fmt: skip
def test_a_value_that_is_alone_of_its_kind(make, kinds, cells, dtype):
    report = traced(lambda: make(leaf(2.0, 0.0, 3.0, dtype=dtype)).sum().backward()).report
    assert report.output.kinds() == f"{kinds} of 3 elements" and report.output.first == (1,)
    assert report.output.nonfinite == 1 and report.frames[-1].cells()[6:8] == cells
    assert report.kind == "undefined" and report.reached == "the loss"


@pytest.mark.parametrize("loss", [
    lambda x, mask: safeops.mse_loss(x, torch.zeros(4), mask=mask),
    lambda x, mask: safeops.masked_mean(x, mask),
    lambda x, mask: safeops.masked_mean(x, mask & x.isnan()),
])  # fmt: skip
def test_a_mask_that_keeps_what_it_should_hide(loss):
    def report(mask):
        x = leaf(1.0, float("nan"), 2.0, float("nan"))
        return traced(lambda: (safeops.masked_mean(x) if mask is None else loss(x, mask)).backward()).report

    right = torch.tensor([True, False, True, False])
    wrong = report(~right)
    assert wrong.kind == "came in" and "the mask keeps some of it" in wrong.why, str(wrong)
    assert "inverted: True keeps" in wrong.instead and wrong.line.text.strip().startswith("lambda x, mask")
    assert report(right) is None and "the mask" not in report(None).why


def test_a_clean_step_has_no_report():
    x = leaf(1.0, 2.0)
    tracer = traced(lambda: (x * x.log()).sum().backward())
    assert tracer.report is None and tracer.steps == 1


def test_safeops_is_clean_where_the_usual_code_is_not():
    x, y = leaf(0.0, 2.0), torch.tensor([float("nan"), 1.0])
    mask = torch.tensor([False, True])
    assert traced(lambda: safeops.mse_loss(safeops.safe_log(x), y, mask=mask).backward()).report is None
    assert traced(lambda: F.mse_loss(torch.log(x), y).backward()).report is not None
    assert x.grad.isnan().any()


def test_what_reaches_nothing_is_no_finding():
    x = leaf(0.0, 2.0)

    def step():
        print_me = torch.log(x.detach())  # a metric that is -inf and has no gradient
        scores = x[None].masked_fill(torch.tensor([True, False]), float("-inf")).softmax(-1)
        (scores * x).sum().backward()
        return print_me

    assert traced(step).report is None


def test_what_is_logged_around_a_step_is_no_finding():
    w = leaf(1.0, 2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def steps():
        for _ in range(2):
            loss = w.square().sum()
            perplexity = (loss * 1000).exp()  # inf and attached to the graph, but no backward starts from it
            loss.backward()
            optimizer.step()
            accuracy = torch.zeros(()) / torch.zeros(())  # NaN, after which the last step has no backward
        return perplexity, accuracy

    assert traced(steps).reports == []
    with trace(action="record") as tracer:
        steps()
        w.detach().sub(w.detach()).log()
        assert tracer.check().reached == "a result"  # check() reports it, since it asks for all results


def test_without_a_backward_pass_every_last_result_counts():
    report = traced(lambda: torch.log(torch.zeros(3)) + 1).report
    assert report.op == "log" and report.reached == "a result"


def test_counts_of_operands_and_result():
    x = torch.tensor([[1.0, 2.0, -4.0], [1e-6, 3.0, 1e-9]], dtype=torch.float16)
    y = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float16)
    report = traced(lambda: x / y).report
    assert [str(operand.counts) for operand in report.inputs] == ["float16 (2, 3) on cpu", "float16 (3,) on cpu"]
    assert [operand.value for operand in report.inputs] == [2.0, 0.0]
    counts = report.inputs[0].counts
    assert (counts.largest, counts.subnormal, counts.zero) == (4, 1, 1)
    assert report.output.first == (0, 1) and report.output.kinds() == "2 inf of 6 elements"


def test_modules_by_name_with_the_model_and_without():
    class Bad(torch.nn.Module):
        def forward(self, x):
            return torch.log(x - x)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Bad()))
    step = lambda: model(torch.ones(1, 2)).sum().backward()  # noqa: E731
    assert traced(step, model).report.module == "1.0 (Bad)"
    assert traced(step).report.module == "Sequential.1.0 (Bad)"
    # After a module raises, it must not stay on the stack of modules.
    broken = torch.nn.Sequential(torch.nn.Linear(3, 3), Bad())

    def after_an_error():
        with pytest.raises(RuntimeError):
            broken(torch.ones(1, 2))
        torch.log(torch.zeros(1))

    assert traced(after_an_error).report.module == ""


def test_the_first_of_two_and_the_table_before_it():
    x = leaf(0.0, 2.0)

    def step():
        a = x * 3
        b = torch.log(a)
        (b / (a * 0)).sum().backward()

    report = traced(step).report
    assert report.op == "log" and [frame.op for frame in report.frames] == ["mul", "log"]
    text = str(report)
    assert "what ran before" in text and "float32 2" in text and "test_trace.py" in text
