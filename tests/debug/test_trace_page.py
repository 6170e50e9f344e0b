"""trace(html=...) and trace(log=...) give the counts by module and step as a page, as scalars and as verdicts."""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from safeops import cli
from safeops.debug import trace
from safeops.debug.page import history as _history
from safeops.debug.page import page as _page
from tests.debug.pages import data, unpack
from tests.debug.tracing import leaf

HALF = torch.float16


class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def paged(folder, model, *steps, action="record", **others):
    """Runs `steps`, a function for each step. Returns (tracer, the page's data)."""
    with trace(model, action=action, html=folder / "page.html", **others) as tracer:
        for step in steps:
            step()
            tracer.check()
    return tracer, data(folder / "page.html")


def backward_of(model, *values, **kwargs):
    return lambda: model(leaf(*values, **kwargs)).sum().backward()


def verdicts(tracer):
    return {module.name: (module.verdict, module.why) for module in tracer.modules}


def test_the_values_are_those_counted_by_hand(tmp_path):
    model = torch.nn.Sequential(Times(1e4), Times(1e-9))
    tracer, page = paged(
        tmp_path, model, backward_of(model, 1.0, -3.0, 0.0, 1e-3), backward_of(model, 5.0, 5.0, 5.0, 5.0)
    )
    assert (page["steps"], page["span"], page["columns"]) == (2, 1, 2)
    first, second = (page["rows"].index(name) for name in ("0 (Times)", "1 (Times)"))
    expected = {  # quantity: (forward, backward) of each step
        ("largest", first): [(3e4, 1e-5), (5e4, 1e-5)],  # step 1 wrote 1e4, -3e4, 0, 10; its gradient is 1e4 * 1e-9
        ("largest", second): [(3e-5, 1e-9), (5e-5, 1e-9)],  # 1e-5, -3e-5, 0, 1e-8
        ("subnormal", first): [(0, 1), (0, 1)],
        ("subnormal", second): [(0.75, 1), (1, 1)],  # subnormal in fp16: below 6.1e-5, not 0
        ("lost", first): [(0, 0), (0, 0)],
        ("lost", second): [(0.25, 1), (0, 1)],  # lost: 0 in fp16, as 1e-8 and 1e-9
        ("nonfinite", second): [(0, 0), (0, 0)],
    }
    for (quantity, row), steps in expected.items():
        seen = page["planes"][quantity][:, row].T
        torch.testing.assert_close(seen, torch.tensor(steps, dtype=torch.float32), rtol=2**-11, atol=0)
    # Over both steps 7 of 8 values are subnormal, and 1 of 8 is lost.
    module = next(module for module in tracer.modules if module.name == "1 (Times)")
    assert module.subnormal == (7 / 8, 1) and module.lost == (1 / 8, 1) and module.dtypes == ("float32",)
    assert module.read[0] == 5e4


def test_nan_and_inf_cells(tmp_path):
    nan, inf = float("nan"), float("inf")
    model = torch.nn.Sequential(Times(2.0))
    step = backward_of(model, nan, inf, -inf, 3.0)
    tracer, page = paged(tmp_path, model, backward_of(model, 1.0), step)
    assert page["planes"]["nonfinite"][0, 0].tolist() == [0, 0.75] and page["planes"]["largest"][0, 0].tolist() == [
        2,
        6,
    ]
    assert page["marks"] == [1] and page["findings"][0]["module"] == "0 (Times)"
    assert verdicts(tracer)["0 (Times)"][0] == "could run in half"  # the module's input was already not finite


def test_an_overflow_is_seen_before_it_happens(tmp_path):
    model = torch.nn.Sequential(Times(1000.0))
    steps = [backward_of(model, 2.0**i, dtype=HALF) for i in range(8)]
    tracer, page = paged(tmp_path, model, *steps)
    row = page["rows"].index("0 (Times)")
    assert page["planes"]["largest"][0, row].tolist() == [1000.0 * 2**i for i in range(7)] + [0]
    assert page["planes"]["nonfinite"][0, row].tolist() == [0] * 7 + [1]
    assert verdicts(tracer)["0 (Times)"] == ("overflows", "forward: an inf of finite operands, first in step 8")
    # Before the overflow, the verdict says how close the largest number is to fp16's limit.
    tracer, page = paged(tmp_path, model, *steps[:6])
    assert tracer.report is None and page["marks"] == []
    assert verdicts(tracer)["0 (Times)"] == ("runs in half", "fp16's limit is 2.05 times its largest number")


def test_beyond_the_limit_in_float32(tmp_path):
    model = torch.nn.Sequential(Times(65519.0), torch.nn.LayerNorm(2))
    tracer, _ = paged(tmp_path, model, backward_of(model, 1.0, -1.0))
    assert verdicts(tracer)["0 (Times)"][0] == "could run in half"  # the largest rounds to 65504, which half holds
    model[0].factor = 65520.0
    result = verdicts(paged(tmp_path, model, backward_of(model, 1.0, -1.0))[0])
    assert result["0 (Times)"] == ("overflows", "forward: writes 6.55e+04, beyond fp16's 65504")
    assert result["1 (LayerNorm)"] == ("overflows", "forward: reads 6.55e+04, beyond fp16's 65504")
    model[0].factor = 1e-9
    assert verdicts(paged(tmp_path, model, backward_of(model, 1.0, 2.0))[0])["0 (Times)"] == (
        "underflows",
        "forward: 100% of the values would be 0 in fp16",
    )


def test_what_has_no_finite_value_is_no_overflow(tmp_path):
    class Log(torch.nn.Module):
        def forward(self, x):
            return x.log()

    model = torch.nn.Sequential(Log())
    for x in (0.0, -1.0):  # -inf, NaN
        tracer, _ = paged(tmp_path, model, backward_of(model, x))
        assert verdicts(tracer)["0 (Log)"] == (
            "not finite",
            "forward: NaN or inf made of finite operands, first in step 1",
        )


@pytest.mark.parametrize("kind, lr, slope", [
    (torch.optim.Adam, 1e-3, 0.0),  # eps=1e-8 is 0 in half, so the update is 0 / 0
    (torch.optim.SGD, 6e4, 2.0),  # the update overflows to inf
])  # fmt: skip
def test_an_optimizer_is_no_module_also_in_half(tmp_path, kind, lr, slope):
    model = Times(1.0)
    model.weight = torch.nn.Parameter(torch.ones(1, dtype=HALF))
    optimizer = kind(model.parameters(), lr=lr)

    def step():
        (model.weight * slope).sum().backward()
        optimizer.step()

    tracer, _ = paged(tmp_path, model, step)
    assert not model.weight.isfinite().any()
    assert verdicts(tracer)[kind.__name__] == (
        "stays in float32", "forward: NaN or inf made of finite operands, first in step 1")  # fmt: skip


def test_a_module_used_twice_in_a_step_and_one_never_used(tmp_path):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.times, self.idle = Times(1e-3), torch.nn.ModuleList([torch.nn.Linear(2, 2)])

        def forward(self, x):
            return self.times(self.times(x))

    model = Twice()
    tracer, page = paged(tmp_path, model, backward_of(model, 1.0, 70.0))
    row = page["rows"].index("times (Times)")
    assert page["planes"]["largest"][0, row].item() == pytest.approx(0.07, rel=2**-11)
    assert page["planes"]["subnormal"][:, row].flatten().tolist() == [0.25, 0.5]  # 1e-6; twice the gradient 1e-6
    assert tracer.modules[-1].name == "idle.0 (Linear)" and tracer.modules[-1].verdict == "never ran"
    assert "idle.0 (Linear)" not in page["rows"] and len(page["modules"]) == len(tracer.modules)


def test_what_was_meant_or_handled_is_no_overflow(tmp_path):
    class Masked(torch.nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.tensor([True, False, False]), float("-inf")).softmax(0)

    model = torch.nn.Sequential(Masked())
    tracer, page = paged(tmp_path, model, lambda: model(leaf(1.0, 2.0, 3.0))[1].backward())
    assert verdicts(tracer)["0 (Masked)"][0] == "could run in half"
    assert page["planes"]["nonfinite"][0, 0].item() == pytest.approx(1 / 6, rel=2**-11)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def scaled():
        with torch.autocast("cpu", HALF):
            loss = model(torch.full((1, 2), 100.0)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    with trace(model, html=tmp_path / "page.html") as tracer:
        scaled()
    page = data(tmp_path / "page.html")
    assert verdicts(tracer)["Linear"] == ("runs in half", "backward: NaN or inf that came to it, was meant, or that "
                                          "GradScaler handled")  # fmt: skip
    assert len(tracer.overflows) == 1 and page["marks"] == [0] and page["findings"][0]["phase"] == "backward"
    seen = verdicts(tracer)
    assert not any("an inf" in why for _, why in seen.values()) and seen["GradScaler"][0] == "stays in float32"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_what_only_the_loss_scale_made_large_is_no_overflow(tmp_path, optimizer):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))

        def forward(self, x):
            return self.weight * x

    model = Model()
    optimizer = optimizer(model.parameters(), 0.1)

    def run(x, init_scale=2.0**20):
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        with trace(model, html=tmp_path / "page.html") as tracer:
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1.0, x])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        page = data(tmp_path / "page.html")
        return verdicts(tracer), page["planes"]["largest"][:, page["rows"].index("Model"), 0].tolist(), tracer

    seen, largest, tracer = run(2.0)
    assert largest == [8, 2.0**21] and seen["Model"] == ("could run in half", "fp16's limit is 8,188 times its "
                                                        "largest number without the loss scale")  # fmt: skip
    assert not [why for verdict, why in seen.values() if verdict == "overflows"], seen
    assert [m.verdict for m in tracer.modules if m.name in (type(optimizer).__name__, "GradScaler")] == [
        "stays in float32"] * 2 == [m.verdict for m in tracer.modules[-2:]]  # fmt: skip
    assert run(2.0**17, 2.0)[0]["Model"][0] == "overflows"  # with or without the loss scale


def test_what_the_scaler_handles_is_listed_last(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with trace(model, action="record", html=tmp_path / "page.html"):
        for i in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF):
                loss = model(torch.full((1, 2), float("nan") if i == 4 else 100.0)).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    findings = data(tmp_path / "page.html")["findings"]
    assert [finding["step"] for finding in findings] == [5, 1, 2, 3, 4]


def test_functions_optimizers_and_rerun_forwards_have_their_places(tmp_path):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return 300 * g * ctx.saved_tensors[0] ** 2

    class Cubed(torch.nn.Module):
        def forward(self, x):
            return Cube.apply(x)

    model = torch.nn.Sequential(Cubed(), torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def loss_function(x):
        return (x * 7).sum()

    def step():
        optimizer.zero_grad()
        loss_function(checkpoint(model, leaf([2.0]), use_reentrant=False)).backward()
        optimizer.step()

    with trace(html=tmp_path / "page.html") as tracer:
        step()
    page = data(tmp_path / "page.html")
    assert tracer.steps == page["steps"] == 1
    largest = {name: page["planes"]["largest"][:, i, 0].tolist() for i, name in enumerate(page["rows"])}
    assert largest["Sequential.0 (Cubed)"] == [8, 8400]  # 300 * 7 * 2^2
    assert largest["Sequential.1 (Linear)"] == [8, 56]  # the weight's gradient: 7 * 2^3
    assert largest["loss_function (test_trace_page.py)"] == [56, 7]
    assert largest["SGD"] == [27, -1]  # 1 - 0.5 * 56
    assert verdicts(tracer)["SGD"][0] == "stays in float32"


def test_gradients_that_accumulate(tmp_path):
    w = leaf(2.0)

    def twice():
        for _ in range(2):
            (w * 3).sum().backward()

    _, page = paged(tmp_path, None, twice)
    assert page["planes"]["largest"][:, page["rows"].index("AccumulateGrad"), 0].tolist() == [-1, 6]


def test_many_findings_are_cut(tmp_path):
    model = torch.nn.Sequential(Times(2.0))
    _, page = paged(tmp_path, model, *[backward_of(model, float("nan"))] * 60)
    assert page["found"] == 60 and len(page["findings"]) == 50 and page["marks"] == list(range(60))


def test_a_long_run_shares_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(_history, "COLUMNS", 8)
    model = torch.nn.Sequential(Times(1e-3))
    steps = [backward_of(model, float(i), 1e-3) for i in range(1, 22)]
    tracer, page = paged(tmp_path, model, *steps)
    assert (page["steps"], page["span"], page["columns"]) == (21, 4, 6)
    expected = [4e-3, 8e-3, 12e-3, 16e-3, 20e-3, 21e-3]
    assert page["planes"]["largest"][0, 0].tolist() == pytest.approx(expected, rel=2**-11)
    assert page["planes"]["subnormal"][0, 0].tolist() == [0.5] * 6
    for steps in range(1, 70):  # the columns must be right for any number of steps
        history = _history.History()
        for i in range(steps):
            history._append(torch.full((1, 2, 6), float(i)))
        assert len(history.columns) <= 8 and sum(c[0, 0, -1].item() for c in history.columns) == sum(range(steps))
        assert [c[0, 0, 0].item() for c in history.columns][-1] == steps - 1


def test_modules_that_come_later(tmp_path):
    model = torch.nn.Sequential(Times(2.0), Times(4.0))
    _, page = paged(tmp_path, model, backward_of(model[0], 1.0), backward_of(model, 1.0))
    row = page["rows"].index("1 (Times)")
    assert page["planes"]["largest"][0, row].tolist() == [-1, 8]


def test_the_page_is_one_file_and_names_are_text(tmp_path):
    model = torch.nn.Sequential()
    model.add_module("</script><b>&", Times(2.0))
    _, page = paged(tmp_path, model, backward_of(model, 1.0))
    assert page["rows"][0] == "</script><b>& (Times)"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>" not in text and text.count("</script>") == 2
    assert not re.search(r"https?:|\bsrc=|@import|url\(|fetch\(|@data@|@page", text)
    assert "default-src 'none'" in text  # the policy forbids the browser to load anything


def test_whatever_the_defaults_are(tmp_path):
    model = torch.nn.Sequential(Times(2.0))
    x = torch.ones(3)
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode():
            _, page = paged(tmp_path, model, lambda: model(x))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert page["planes"]["largest"][0].tolist() == [[2]]


def test_a_run_without_a_step(tmp_path):
    with trace(html=tmp_path / "page.html") as tracer:
        pass
    assert data(tmp_path / "page.html")["rows"] == [] and tracer.modules == []


def test_the_page_is_written_when_the_run_fails(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError), trace(html="page.html"):
        backward_of(Times(2.0), 1.0)()
        monkeypatch.chdir(tmp_path / "elsewhere")
        raise KeyError
    assert data(tmp_path / "page.html")["steps"] == 1


def test_planes_keep_three_digits_and_the_limit():
    x = torch.cat([torch.randn(1000).mul(20).exp(), torch.tensor([0.0, -1.0, 65504.0, 2.0**-14, 1.0 - 2**-11])])
    seen = unpack(_page.pack(x))
    torch.testing.assert_close(seen, x, rtol=2**-11, atol=0)
    assert seen[-5:].tolist() == x[-5:].tolist()


class Writer:
    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))

    def add_histogram(self, tag, values, step):
        self.histograms.setdefault(tag, []).append((step, values.tolist()))


def test_the_same_counts_for_tensorboard():
    writer = Writer()
    model = torch.nn.Sequential(Times(4.0))
    with trace(model, action="record", log=writer) as tracer:
        for values in ((1.0, 2.0), (1e-6, 2.0), (1.0, float("inf")), (1.0, 2.0)):
            backward_of(model, *values)()
            tracer.check()
    scalars = writer.scalars
    assert scalars["trace_forward_largest/0_Times"] == [(1, 8), (2, 8), (3, 4), (4, 8)]
    assert scalars["trace_backward_largest/0_Times"] == [(i, 4) for i in (1, 2, 3, 4)]
    assert scalars["trace_forward_underflow/0_Times"] == [(2, 0.5), (3, 0), (4, 0)]  # from the first underflow on
    assert scalars["trace_forward_nonfinite/0_Times"] == [(3, 0.5), (4, 0)]
    assert "trace_forward_becomes_0/0_Times" not in scalars
    assert writer.histograms["trace_backward/log2_largest"] == [(i, [2.0]) for i in (1, 2, 3, 4)]
    assert all(re.fullmatch(r"[-/\w.]+", tag) for tag in scalars)  # TensorBoard renames tags with other characters
    assert verdicts(tracer)["0 (Times)"][0] == "underflows"


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"html": "missing/page.html"}, FileNotFoundError, "missing/page.html': no such folder"),
        ({"html": "."}, IsADirectoryError, "is a folder"),
        ({"html": 3}, TypeError, "int"),
        ({"log": []}, TypeError, "log must have add_scalar and add_histogram, got list"),
    ],
)
def test_errors_come_before_the_run(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        trace(**arguments)


def test_modules_are_counted_on_demand():
    with pytest.raises(RuntimeError, match="html= or log="):
        _ = trace().modules


def test_the_command(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.ones(2, requires_grad=True)\n(x * 3).sum().backward()\n")
    page = tmp_path / "page.html"
    assert cli.main(["trace", "--html", str(page), str(script)]) == 0
    assert f"{page} shows" in capsys.readouterr().out and data(page)["rows"] == ["train.py"]
    assert cli.main(["trace", "--html", str(tmp_path / "no" / "page.html"), str(script)]) == 2
    assert "no such folder" in capsys.readouterr().err
