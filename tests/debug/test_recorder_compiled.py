"""Steps that were compiled: the replay is eager and names the source; what only compiled code makes is narrowed down."""

import pytest
import torch

from tests.debug.recording import Positive, batches, equal, weights

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


@pytest.mark.parametrize(("backend", "guilty"), [("aot_eager", "aot_eager"), ("inductor", "inductor")])
def test_the_backend_that_is_wrong(record, backend, guilty):
    """An op whose code is wrong from this backend on. A decomposition stands for it."""
    from torch._inductor import decomposition

    if backend == "inductor":
        table, op = decomposition.decompositions, torch.ops.aten.sinc.default
        before = table.get(op)
        table[op] = lambda x: x * torch.inf
    else:
        lib = torch.library.Library("safeops_recorder_test", "DEF")
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = record(model, optimizer)
    if backend != "inductor":
        pytest.skip("nothing that is wrong in aot_eager alone is known")
    try:
        compiled = torch.compile(lambda x: model(x).sinc().mean())
        with recorder.step(x := torch.rand(2, 4)):
            compiled(x).backward()
            optimizer.step()
    finally:
        table.pop(op) if before is None else table.update({op: before})
    (report,) = recorder.reports
    assert f'backend="{guilty}"' in report.why, str(report)


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
