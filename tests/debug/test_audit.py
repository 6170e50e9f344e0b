"""audit lists each pattern at its line, with count, dtypes and values; ordinary code gives no finding."""

import contextlib
import linecache
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core import check
from safeops.core.op import registry
from safeops.debug import audit, no_sync
from safeops.debug.audit.means import Means
from safeops.ops.classification import _classification

H = torch.float16


def audited(function, **options):
    with audit(**options) as result:
        function()
    return result.findings


def half(*values):
    return torch.tensor(values, dtype=H)


def overflow():
    half(4e4, 4e4).sum()  # HERE


def overflow_of_a_product():
    half(300.0) * half(300.0)  # HERE


def overflow_of_fp32():
    torch.full((2,), 100.0).exp()  # HERE


def sum_that_stops():
    torch.zeros(1, dtype=H).index_add_(0, torch.zeros(5000, dtype=torch.int64), torch.ones(5000, dtype=H))  # HERE


def nan_by_a_difference():
    torch.tensor([float("inf"), 1.0]) - torch.tensor([float("inf"), 1.0])  # HERE


def nan_by_a_mask():
    torch.tensor([float("inf"), 1.0]) * torch.tensor([0.0, 1.0])  # HERE


def divisor():
    torch.ones(3) / torch.tensor([0.0, 1e-42, 2.0])  # HERE


def divisor_of_reciprocal():
    1 / torch.tensor([0.0, 2.0])  # HERE


def log_of_zero():
    torch.log(torch.tensor([0.0, 1.0]))  # HERE


def root_without_a_gradient():
    torch.zeros(2, requires_grad=True).sqrt()  # HERE


def cast_overflow():
    torch.tensor([1e6]).half()  # HERE


def gradient_beyond_half():
    half(1e-6).requires_grad_().log()  # HERE


def root_by_a_power():
    torch.zeros(2, requires_grad=True) ** 0.5  # HERE


def log1p_of_minus_one():
    torch.log1p(torch.tensor([-1.0]))  # HERE


def arc_at_one():
    torch.ones(1, requires_grad=True).acos()  # HERE


def eps_added():
    half(1.0, 2.0) + 1e-8  # HERE


def eps_clamped():
    half(1.0, 2.0).clamp(min=1e-8)  # HERE


def eps_given():
    F.normalize(torch.ones(2, 2, dtype=H), eps=1e-12)  # HERE


def item():
    torch.ones(3).sum().item()  # HERE


def boolean_read():
    x = torch.ones(3)
    x[torch.tensor([True, False, True])]  # HERE


def boolean_write():
    x = torch.ones(3)
    x[torch.tensor([True, False, True])] = torch.zeros(2)  # HERE


def index_beyond():
    with contextlib.suppress(RuntimeError):
        torch.zeros(2, 3).gather(1, torch.tensor([[0], [3]]))  # HERE


def index_stood_in_for():
    safeops.safe_gather(torch.zeros(2, 3), 1, torch.tensor([[-1], [2]]))  # HERE


def row_of_a_table():
    with contextlib.suppress(IndexError):
        F.embedding(torch.tensor([0, 5]), torch.zeros(4, 2))  # HERE


def class_of_torch():
    with contextlib.suppress(IndexError):
        F.cross_entropy(torch.zeros(3, 4), torch.tensor([0, -100, 7]))  # HERE


def class_left_out():
    """Runs the definition alone, as on CUDA, which leaves out a wrong class without an error."""
    registry["cross_entropy"].composite(torch.zeros(3, 4), torch.tensor([0, -100, 4]))  # HERE


def class_refused():
    with contextlib.suppress(IndexError):
        safeops.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 4]))  # HERE


def half_loss():
    half(1.0, 2.0).requires_grad_().sum().backward()  # HERE


def half_scaled():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(half(2.0).requires_grad_().sum())  # HERE


def device_copy():
    torch.ones(2).to("meta")  # HERE


def saved_result():
    y = torch.ones(2, requires_grad=True).exp()
    y.clamp_(max=1)  # HERE


def saved_operand():
    x = torch.ones(2, requires_grad=True) * 2
    y = x * x
    x += 1  # HERE
    return y


CASES = {
    overflow: ("half-overflow", "float16 (2,) on cpu, largest 40000"),
    overflow_of_a_product: ("half-overflow", "largest 300"),
    overflow_of_fp32: ("overflow", "exp of float32 (2,) on cpu, largest 100"),
    sum_that_stops: ("half-sum", "index_add_ of float16 (1,) on cpu: 1 lost a part, the first is 2048 of 5000"),
    nan_by_a_difference: ("nan-born", "1 NaN"),
    nan_by_a_mask: ("times-mask", "1 not finite where the mask is 0"),
    divisor: ("small-divisor", "2 below 1.17549e-38, the smallest 0"),
    divisor_of_reciprocal: ("small-divisor", "1 below 1.17549e-38, the smallest 0"),
    log_of_zero: ("domain", "1 at or below 0"),
    root_without_a_gradient: ("domain", "2 at or below 0"),
    cast_overflow: ("half-overflow", "half of float32 (1,) on cpu, largest 1e+06"),
    gradient_beyond_half: ("domain", "where the gradient does not fit half"),
    root_by_a_power: ("domain", "power 0.5 of float32 (2,) on cpu, 2 at or below 0"),
    log1p_of_minus_one: ("domain", "1 at or below -1"),
    arc_at_one: ("domain", "1 at or beyond 1"),
    eps_added: ("eps-is-zero", "adds 1e-08 to float16 (2,)"),
    eps_clamped: ("eps-is-zero", "floor 1e-08"),
    eps_given: ("eps-is-zero", "1e-12"),
    item: ("sync-read", "item of float32 () on cpu"),
    boolean_read: ("boolean-index", "2 of 3 kept"),
    boolean_write: ("boolean-write", "2 of 3 written"),
    index_beyond: ("index-range", "1 of 2 are not in [0, 3), the first is 3"),
    index_stood_in_for: ("index-range", "1 of 2 are not in [0, 3), the first is -1"),
    row_of_a_table: ("index-range", "1 of 2 are not in [0, 4), the first is 5"),
    class_of_torch: ("index-range", "1 of 3 are not in [0, 4), the first is 7"),
    class_left_out: ("index-range", "1 of 3 are not in [0, 4), the first is 4"),
    class_refused: ("index-range", "1 of 3 are not in [0, 4), the first is 4"),
    half_loss: ("half-loss", "backward of float16 ()"),
    half_scaled: ("half-loss", "GradScaler.scale of float16 ()"),
    device_copy: ("device-copy", "float32 (2,) on cpu to meta"),
    saved_result: ("saved-write", "ExpBackward0"),
    saved_operand: ("saved-write", "MulBackward0"),
}


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_classes_that_a_kernel_on_a_gpu_would_leave_out(name, monkeypatch):
    """Under audit a GPU runs the definition, which reports wrong classes but raises no error, since that would wait."""
    module = sys.modules[f"safeops.ops.classification.{name}"]
    monkeypatch.setattr(module, "is_watched", lambda input: bool(check.watchers))
    monkeypatch.setattr(_classification, "has_missing_class", lambda *_: False)
    x = torch.zeros(3, 4, requires_grad=True)
    with audit(select=["index-range"]) as result:
        loss = getattr(safeops, name)(x, torch.tensor([0, -100, 4]), weight=torch.arange(1.0, 5.0))
    assert [finding.detail for finding in result.findings] == ["1 of 3 are not in [0, 4), the first is 4"]
    want = getattr(safeops, name)(x[:1], torch.tensor([0]), weight=torch.arange(1.0, 5.0))
    torch.testing.assert_close(loss, want)
    assert torch.autograd.grad(loss, x)[0][1:].eq(0).all()


@pytest.mark.parametrize("pattern", CASES, ids=lambda case: case.__name__)
def test_each_pattern_at_its_line(pattern):
    code, detail = CASES[pattern]
    findings = audited(pattern, select=[code])
    assert [finding.code for finding in findings] == [code]
    assert detail in findings[0].detail, findings[0].detail
    assert findings[0].line.text.rstrip().endswith("# HERE") and findings[0].line.file == __file__
    assert findings[0].instead in str(findings[0]) and findings[0].count == 1


def standardized(dtype=H):
    x = torch.full((4,), 3.0, dtype=dtype)
    (x - x.mean()) * torch.rsqrt(x.var() + (1e-9 if dtype is H else 0))


def all_ignored():
    F.cross_entropy(torch.zeros(1, 2), torch.tensor([-100]))


def padded_vocabulary():
    logits = torch.tensor([[1.0, 2.0, -float("inf")]])
    F.kl_div(logits.log_softmax(-1), logits.softmax(-1), reduction="batchmean")


def ctc_without_room():
    F.ctc_loss(torch.zeros(1, 1, 2).log_softmax(-1), torch.tensor([[1, 1]]), torch.tensor([1]), torch.tensor([2]))


ADVICE = {  # what happens: (code, what the advice names)
    overflow: ("half-overflow", "masked_sum"),
    lambda: half(12.0).exp(): ("half-overflow", "safeops.safe_exp"),
    overflow_of_a_product: ("half-overflow", "safeops.fp32_region"),
    lambda: half(300.0, 300.0)[None] @ half(300.0, 300.0)[:, None]: ("half-overflow", "safeops.fp32_region"),
    lambda: F.mse_loss(half(300.0), half(0.0)): ("half-overflow", "safeops.mse_loss"),
    overflow_of_fp32: ("overflow", "safeops.safe_exp"),
    lambda: torch.full((1,), 3e38) * 2: ("overflow", "scale the operands down"),
    all_ignored: ("nan-born", "safeops.cross_entropy"),
    padded_vocabulary: ("nan-born", "safeops.kl_div"),
    ctc_without_room: ("overflow", "safeops.ctc_loss"),
    lambda: half(0.5).acosh(): ("domain", "safeops.safe_acosh"),
    lambda: torch.ones(1, requires_grad=True).acosh(): ("domain", "safeops.safe_acosh"),
    lambda: torch.zeros(1).log2(): ("domain", "/ math.log(2)"),
    standardized: ("nan-born", "infinite"),
    lambda: standardized(torch.float32): ("nan-born", "infinite"),
    sum_that_stops: ("half-sum", "safeops.segment_sum"),
}


@pytest.mark.parametrize("pattern", ADVICE)
def test_the_advice_is_for_the_function(pattern):
    code, instead = ADVICE[pattern]
    findings = audited(pattern)
    (finding,) = [finding for finding in findings if finding.code == code]
    assert instead in finding.instead, finding.instead
    assert code == "half-overflow" and "sum" in instead or "masked_sum," not in finding.instead
    assert not any("mask" in finding.instead for finding in findings if pattern is standardized)


def test_sums_in_half_that_keep_what_was_added():
    """Rounding, and terms that cancel, must not be taken for a sum that has stopped growing."""
    g = torch.Generator().manual_seed(0)
    index, terms = torch.randint(0, 4, (400,), generator=g), torch.randn(400, generator=g).to(torch.bfloat16)
    assert not audited(lambda: torch.zeros(4, dtype=torch.bfloat16).scatter_add_(0, index, terms))
    assert not audited(lambda: torch.zeros(4, dtype=torch.bfloat16).index_add(dim=0, index=index, source=terms))


def test_a_line_is_one_entry_for_each_pattern():
    with audit() as result:
        x = torch.zeros(2)
        x.log().sum().item(), x.log2().sum().item(), x.log10().sum().tolist()
        x.log()
    assert [finding.code for finding in result.findings].count("domain") == 4
    assert str(result).count("domain:") == 2 and "(3 times)" in str(result) and str(result).count("sync-read:") == 1


def test_every_code_has_a_case():
    several = {"rank-means"}  # needs several processes: tests/distributed/watching.py
    assert {code for code, _ in CASES.values()} == set(audit.CODES) - several


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_classes_are_watched_by_the_definition_alone(name):
    """While somebody watches, wrong classes must reach the definition, which reports them: a GPU's kernel would leave
    them out silently. (The meta device stands for a GPU.)"""
    takes = registry[name].prepare
    operands = [(torch.zeros(3, 4, device=d), torch.zeros(3, dtype=torch.int64, device=d)) for d in ("cpu", "meta")]
    rest = (None, None, -100, 0.0, 0.0, 1.0, None)[: 7 if name == "cross_entropy" else 3]
    assert [takes(*both, *rest)[0] for both in operands] == [True, True]
    with audit():
        assert [takes(*both, *rest)[0] for both in operands] == [True, False]


def test_ordinary_code_gives_no_finding():
    def step():
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x, y, mask = torch.randn(16, 4), torch.randn(16, 2), torch.rand(16, 1) > 0.5
        for _ in range(2):
            optimizer.zero_grad()
            with torch.amp.autocast("cpu", dtype=H):
                prediction = model(x)
                loss = safeops.mse_loss(prediction, y, mask=mask)
                loss = loss + safeops.masked_mean(safeops.safe_div(y, prediction), mask) * 0.1
                loss = loss + F.cross_entropy(prediction, torch.zeros(16, dtype=torch.int64))
            loss.backward()
            optimizer.step()

    assert [str(finding) for finding in audited(step)] == []


def test_in_place_on_what_nobody_saved_is_no_finding():
    def step():
        x = torch.ones(2, requires_grad=True)
        y = x * 2  # its backward does not need y
        y += 1
        y.sum().backward()

    assert audited(step, select=["saved-write"]) == []


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.where(x > 0),
        lambda x: torch.argwhere(x),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x) and torch.allclose(x, x),
        lambda x: 1.0 in x,
        lambda x: torch.is_nonzero(x[0]),
        lambda x: x.long().bincount(),
    ],
)
def test_reads_by_another_name(read):
    assert {finding.code for finding in audited(lambda: read(torch.ones(3)))} == {"sync-read"}
    assert audited(lambda: torch.where(torch.ones(3) > 0, 1.0, 2.0)) == []


def test_a_nan_that_one_of_two_operands_brought_is_not_born_there():
    assert audited(lambda: torch.tensor([torch.nan, 1.0]) + torch.ones(2), select=["nan-born"]) == []


def test_counts_by_line():
    def step():
        for i in range(5):
            half(4e4, 4e4 + i).sum()
        half(4e4, 4e4).sum()

    assert [finding.count for finding in audited(step)] == [5, 1]
    with audit() as result:
        step()
    assert "(5 times)" in str(result) and str(result).count("half-overflow") == 2
    with audit() as result:
        pass
    assert str(result) == "audit: none of the patterns happened"


def test_values_and_gradients_are_what_they_were():
    def step():
        x = half(1.0, 2.0, 0.0).requires_grad_()
        y = (x / x.sum() + 1e-8).log().clamp(min=-5).float().sum()
        y.backward()
        return y.detach(), x.grad

    plain = step()
    with audit():
        seen = step()
    torch.testing.assert_close(seen, plain, rtol=0, atol=0, equal_nan=True)


def test_select():
    assert audited(eps_added, select=["half-overflow"]) == []
    with pytest.raises(ValueError, match="audit: unknown code 'eps' in select=; the codes are half-overflow, "):
        audit(select=["eps"])
    with pytest.raises(TypeError, match="audit: select must be a list of codes, got the str 'domain'"):
        audit(select="domain")


def test_the_scalers_own_read_is_no_finding():
    model, scaler = torch.nn.Linear(3, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    assert [str(finding) for finding in audited(step)] == []
    assert [finding.code for finding in audited(lambda: scaler.get_scale())] == ["sync-read"]


def test_beside_no_sync():
    with no_sync(cpu=True), audit() as result:
        torch.ones(2) / torch.tensor([0.0, 1.0])
    assert [finding.code for finding in result.findings] == ["small-divisor"]


def test_transforms_pass_unseen_and_code_still_compiles_whole():
    f = torch.compile(lambda x: torch.log(x) * 2, backend="eager", fullgraph=True)

    assert audited(lambda: torch.func.vmap(torch.log)(torch.zeros(2, 2))) == []
    # This backend runs the ops one by one in generated code: audit sees these calls, but not torch.compile's tracing.
    assert [finding.line.function for finding in audited(lambda: f(torch.zeros(2)))] == ["forward"]


def test_what_an_error_of_safeops_reads_for_its_message_is_no_wait_of_the_users():
    with audit() as result, pytest.raises(IndexError, match="class index 9"):
        safeops.dice_loss(torch.zeros(2, 4, 3), torch.tensor([[0, 9, 0], [1, 2, 3]]))
    assert result.findings == []


def test_a_warning_of_torch_is_at_the_users_line(monkeypatch):
    shown = []
    monkeypatch.setattr("warnings.showwarning", lambda *args: shown.append(args))
    before, x = warnings.showwarning, torch.ones(2)
    warnings.simplefilter("always")  # pytest restores its own filters afterwards
    with audit():
        torch.nn.functional.mse_loss(x[:, None], x)  # HERE
        warnings.warn("the user's own", stacklevel=1)
    assert warnings.showwarning is before
    assert [args[2] for args in shown] == [__file__] * 2
    assert linecache.getline(__file__, shown[0][3]).rstrip().endswith("# HERE")
    with audit():
        warnings.showwarning = print  # a handler set inside the context must remain after it
    assert warnings.showwarning is print


@pytest.mark.parametrize("reduction, count", [("mean", 1), ("sum", 0)])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_sum_is_no_mean_that_ranks_could_divide_differently(by_name, reduction, count):
    means, x, y = Means(), torch.randn(4, 3, requires_grad=True), torch.zeros(4, 3)
    args, kwargs = ((x, y), {"reduction": reduction}) if by_name else ((x, y, None, None, reduction), {})
    loss = F.mse_loss(*args, **kwargs)
    means.note(F.mse_loss, "mse_loss", args, kwargs, loss)
    means.reached(loss)
    assert sum(map(len, means.counts.values())) == count
