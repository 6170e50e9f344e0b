"""Steps that were compiled: the eager replay names the source; what only compiled code makes is narrowed down."""

import pytest
import torch

from tests.debug.recording import Positive, batches, equal, weights
from tests.debug.test_trace import CASES
from tests.debug.test_trace_masks import LATE, PRODUCTS

pytestmark = pytest.mark.slow


def test_the_line_of_a_compiled_step(record):
    model = Positive()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    recorder, compiled = record(model, optimizer), torch.compile(model)
    for x in batches():
        before = weights(model)
        with recorder.step(x):
            optimizer.zero_grad()
            compiled(x).square().mean().backward()
            optimizer.step()
        assert equal(before, weights(model)) == (x[2, 0] == 0)
    (report,) = recorder.reports
    assert report.op == "log" and "# HERE" in report.line.text and not report.notes


def test_recording_breaks_no_graph_and_recompiles_nothing(record):
    """Also where a step was replayed in between."""
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph

    function = torch.compile(lambda x: model(x).square().mean(), backend=backend, fullgraph=True)
    recorder = record(model, optimizer)
    for x in batches(8):
        with recorder.step(x):
            optimizer.zero_grad()
            function(x).backward()
            optimizer.step()
    assert len(compiled) == 1 and recorder.found == 1


def test_a_compiled_update(record):
    """A compiled optimizer's hooks are not asked before its update: the report says that the weights are later ones."""
    model = Positive()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update, recorder = torch.compile(optimizer.step, backend="eager"), record(model, optimizer)
    for x in batches(3):
        with recorder.step(x):
            optimizer.zero_grad()
            model(x).mean().backward()
            update()
    assert recorder.found == 1 and recorder.reports[0].step == 3


class Sneaky(torch.nn.Module):
    """Finite in eager mode, not so when Dynamo traces it."""

    def forward(self, x):
        return x * (torch.inf if torch.compiler.is_compiling() else 1)


def test_the_submodule_that_is_wrong_where_compiled(record):
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(4)]
    blocks[2].append(Sneaky())
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)})
    model.forward = lambda x: blocks[3](blocks[2](blocks[1](blocks[0](x))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder, compiled = record(model, optimizer), torch.compile(model.forward, backend="eager")
    with recorder.step(x := torch.rand(2, 4)):
        compiled(x).mean().backward()
        optimizer.step()
    (report,) = recorder.reports
    assert report.kind == "not repeated" and 'backend="eager"' in report.why and "Dynamo" in report.why
    assert "blocks.2.2 (Sneaky)" in report.why, str(report)
    torch.manual_seed(0)


def test_inductor_s_code_that_is_wrong(record):
    """A pass of Inductor's own takes log for exp."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Wrong(CustomGraphPass):
        def __call__(self, graph):
            for node in graph.nodes:
                if node.target is torch.ops.aten.exp.default:
                    node.target = torch.ops.aten.log.default

        def uuid(self):
            return "safeops-test"

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    with config.patch(post_grad_custom_post_pass=Wrong()):
        compiled = torch.compile(lambda x: (model(x) * 0).exp().mean())
        with recorder.step(x := torch.rand(2, 4)):
            compiled(x).backward()
            optimizer.step()
    (report,) = recorder.reports
    assert 'backend="inductor"' in report.why and "the code that Inductor generates" in report.why, str(report)
    assert 'with torch.compile(backend="aot_eager") it is finite' in report.notes


def test_a_fault_that_nothing_repeats(record):
    model, runs = torch.nn.Linear(4, 4), []
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1))
    with recorder.step(x := torch.rand(2, 4)):
        runs.append(1)
        (model(x).mean() * (torch.nan if len(runs) == 1 else 1)).backward()
    (report,) = recorder.reports
    assert report.kind == "not repeated" and "do not repeat the fault" in report.why
    assert any("deterministic algorithms on it is finite" in note for note in report.notes)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_a_loss_that_was_compiled_whole(record, case):
    """The replay says of it what trace says of the eager code."""
    loss, op, phase, kind, why, instead = case
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([0.0, 2.0]))])
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1))
    compiled = torch.compile(loss, backend="aot_eager")
    with recorder.step(()):
        compiled(model[0]).backward()
    (report,) = recorder.reports
    assert (report.op, report.phase, report.kind) == (op, phase, kind), str(report)
    assert why in report.why and instead in (report.instead or ""), str(report)
    assert report.line.text.rstrip().endswith("# HERE") and report.line.function == loss.__name__


@pytest.mark.parametrize("name", [*PRODUCTS, *LATE])
def test_a_mask_that_does_not_mask_compiled(record, name):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([0.5, 0.0, 2.0]))])
    recorder = record(model, torch.optim.SGD(model.parameters(), 0.1))
    compiled = torch.compile((PRODUCTS | LATE)[name], backend="aot_eager")
    batch = torch.tensor([1.0, torch.nan, 0.5]), torch.tensor([True, False, True])
    with recorder.step(batch):
        compiled(model[0], *batch).backward()
    (report,) = recorder.reports
    assert report.kind == "came in" and ("does not mask" in report.why) == (name in PRODUCTS), str(report)
    assert report.line.function == "<lambda>"
