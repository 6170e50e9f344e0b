"""torch.compile and torch.export: whole graphs, static and dynamic shapes, the same values and gradients."""

from __future__ import annotations

import torch

from safeops.core import private_torch

from .compare import assert_outcomes_close, assert_right
from .registry import check
from .sample import NotApplicable, Sample
from .subject import Subject, run


def _compiled(subject, samples, backend, dynamic, plain=False):
    """Compile once and run on each sample. Returns the number of graphs that were compiled."""
    torch.compiler.reset()
    counter = private_torch.counting_backend(backend)
    compiled = torch.compile(subject.op, fullgraph=True, dynamic=dynamic, backend=counter)
    for sample in samples:
        eager = run(subject.op, sample)
        got = run(compiled, sample, eager.upstream or None)
        label = f"compiled by {backend}, {'dynamic' if dynamic else 'static'} shapes"
        assert_outcomes_close(got, eager, label)
        assert_right(sample, got, subject.truth(sample, eager.upstream or None), label)
        if plain:  # without gradients it is a graph of its own
            values = run(compiled, sample, grad=False, keys=())
            assert_right(sample, values, subject.truth(sample), f"{label}, without gradients")
    torch.compiler.reset()
    return counter.frame_count


def _two_sizes(sample: Sample):
    return [sample, sample.tiled(2), sample.tiled(3)]


@check(
    "torch.compile(fullgraph=True) traces it, static and dynamic, with the same values and gradients",
    slow=True,
)
def check_compile(subject: Subject, sample: Sample) -> None:
    _compiled(subject, [sample.cast(torch.float16)], "aot_eager", dynamic=False, plain=True)
    try:
        sizes = _two_sizes(sample.cast(torch.float32))
    except NotApplicable:
        _compiled(subject, [sample.cast(torch.float32)], "aot_eager", dynamic=False)
        return
    graphs = _compiled(subject, sizes, "aot_eager", dynamic=True)
    if graphs > 2:  # one, or two if a size of 1 or a broadcast needs its own graph
        raise AssertionError(f"dynamic shapes: {graphs} graphs for {len(sizes)} sizes: it recompiles for each")


@check("the code Inductor makes of it gives the same values and gradients, dynamic shapes too", slow=True, once=True)
def check_inductor(subject: Subject, sample: Sample) -> None:
    _compiled(subject, [sample.cast(torch.float16)], "inductor", dynamic=False)
    try:
        sizes = _two_sizes(sample.cast(torch.float32))
    except NotApplicable:
        return
    _compiled(subject, sizes[:2], "inductor", dynamic=True)


class _Module(torch.nn.Module):
    """The op as a module of its tensors; the other arguments are constants of the exported program."""

    def __init__(self, op, sample):
        super().__init__()
        self.op, self.sample, self.keys = op, sample.map(lambda t: t.new_empty(0)), list(sample.operands())

    def forward(self, tensors):
        call = self.sample.replace(dict(zip(self.keys, tensors)))
        return self.op(*call.args, **call.kwargs)


@check(
    "torch.export takes it, with a dynamic first axis; the program gives the same values and stays differentiable",
    slow=True,
)
def check_export(subject: Subject, sample: Sample) -> None:
    cast = sample.cast(torch.float16)
    shape = cast.shape()
    sizes, dynamic = [cast], None
    if shape and shape[0] > 1:
        sizes = _two_sizes(cast)
        axis = {0: torch.export.Dim.AUTO}
        spans = [cast._full(t, -len(shape)) for t in cast.operands().values()]
        dynamic = ([axis if full else None for full in spans],)
    keys = list(cast.operands())
    program = torch.export.export(_Module(subject.op, cast), ([cast.get(k) for k in keys],), dynamic_shapes=dynamic)
    module = program.module()

    def exported(*args, **kwargs):
        operands = Sample(args, kwargs).operands()
        return module([operands[k] for k in keys])

    for sized in sizes:
        eager = run(subject.op, sized)
        assert_outcomes_close(run(exported, sized, eager.upstream or None), eager, "the exported program differs")
