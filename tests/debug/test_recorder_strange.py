"""The recorder beside unusual programs: it finds their NaN, and changes nothing that is not its own."""

import random
import threading
import weakref

import numpy
import pytest
import torch

from tests.debug.recording import Positive, batches, equal, weights
from tests.debug.test_recorder_body import run_source


def finding(recorder):
    (report,) = recorder.reports
    assert report.op == "log", str(report)
    return report


# ---- the block

COUNT = 0


def test_a_global_that_the_block_counts_in(record, model, optimizer):
    global COUNT
    COUNT, recorder = 5, record(model, optimizer)
    with recorder.step(x := torch.zeros(2, 4)):
        COUNT += 1
        model(x).mean().backward()
    finding(recorder)
    assert COUNT == 6


class Private:
    def step(self, recorder, model, __x):
        with recorder.step(__x):

            def __inner(__value):
                return model(__value)

            __inner(__x).mean().backward()


def test_functions_with_private_names(record, model, optimizer):
    recorder = record(model, optimizer)
    Private().step(recorder, model, torch.zeros(2, 4))
    finding(recorder)


@pytest.mark.parametrize(
    "lines",
    [
        "sum = sum([1, 2])",
        "n: int; n += 1",
        "parts = [0 for x in range(2)]",
        "if n: y = x\n    else: y = 1 - x\n    z = y",
        "for n in range(2):\n        y = x\n        z = y\n    else: z = y",
        "match n:\n        case [a, *b]: pass\n        case {'a': c, **rest}: pass\n        case _ as d: pass",
    ],
)
def test_statements_of_the_block(record, model, optimizer, lines):
    recorder = record(model, optimizer)
    source = f"n = 1\nwith recorder.step(x):\n    {lines}\n    model(x).mean().backward()\n"
    run_source(source, {"recorder": recorder, "model": model, "x": torch.zeros(2, 4)})
    finding(recorder)
    assert not recorder.reports[0].notes


def test_a_variable_that_contains_itself(record, model, optimizer):
    recorder, config = record(model, optimizer), {"scale": 1}
    config["self"] = config
    with recorder.step(x := torch.zeros(2, 4)):
        (model(x).mean() * config["scale"]).backward()
    finding(recorder)


@pytest.mark.parametrize("loops", [False, True])
def test_outputs_live_no_longer_than_without_it(record, model, optimizer, loops):
    """Logits are the largest tensors of many steps: those of the last step go when the block assigns new ones."""
    recorder, alive = record(model, optimizer), []
    for x in batches(4, bad=0):
        if loops:
            with recorder.step(x):
                for part in x.chunk(2):
                    logits = model(part)
                    logits.mean().backward()
                    alive.append(weakref.ref(logits))
        else:
            with recorder.step(x):
                logits = model(x)
                logits.mean().backward()
                alive.append(weakref.ref(logits))
        assert [ref() is not None for ref in alive] == [False] * (len(alive) - 1) + [True]


def test_a_replay_that_raises_is_not_called_finite(record, model, optimizer):
    recorder, runs = record(model, optimizer), []
    with recorder.step(x := torch.zeros(2, 4)):
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("gone")
        model(x).mean().backward()
    (report,) = recorder.reports
    assert report.notes == ["the replay ended with KeyError: 'gone'"] and "finite: " not in report.why


# ---- what it puts back


def test_generators_of_the_program_draw_each_number_once(record, model, optimizer):
    def made():
        return torch.Generator().manual_seed(3), numpy.random.default_rng(3), random.Random(3)

    recorder, seen = record(model, optimizer), []
    first, second, third = made()
    with recorder.step(x := torch.zeros(2, 4)):
        seen.append((torch.rand(1, generator=first).item(), second.random(), third.random()))
        model(x).mean().backward()
    finding(recorder)
    a, b, c = made()
    expected = [(torch.rand(1, generator=a).item(), b.random(), c.random()) for _ in range(2)]
    assert seen == expected[:1] * 2
    assert (torch.rand(1, generator=first).item(), second.random(), third.random()) == expected[1]


def test_an_optimizer_that_the_recorder_was_not_given_steps_once(record, model, optimizer):
    other = torch.nn.Linear(4, 1)
    of_other, recorder = torch.optim.SGD(other.parameters(), 0.1), record(model, optimizer)
    with recorder.step(x := torch.zeros(2, 4)):
        other(x).mean().backward()
        of_other.step()
        after = weights(other)
        model(x).mean().backward()
        optimizer.step()
    finding(recorder)
    assert equal(weights(other), after)


class Sign(torch.optim.Optimizer):
    """An optimizer that expects a gradient of each parameter, and counts."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                self.state[p]["last"] = p.grad.sign()
                p.sub_(self.state[p]["last"], alpha=group["lr"])


def test_an_optimizer_that_asks_for_each_gradient(record, model):
    optimizer = Sign(model.parameters())
    recorder, seen = record(model, optimizer), []
    for x in batches():
        with recorder.step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        seen.append(weights(model))
    finding(recorder)
    assert equal(seen[2], seen[1]) and not equal(seen[3], seen[2])
    assert optimizer.param_groups[0]["steps"] == 4
    assert all(state["last"].isfinite().all() for state in optimizer.state.values())


def test_a_loss_after_the_last_update(record, model, optimizer):
    """The replay goes on to the end of the block."""
    recorder = record(model, optimizer)
    with recorder.step(x := torch.zeros(2, 4)):
        model(x + 1).mean().backward()
        optimizer.step()
        model(x).mean().backward()
    assert "later weights" in finding(recorder).notes[0]


def test_two_optimizers_under_one_scaler(record):
    """The gradients of a skipped update lie there until their turn comes: they belong to no later step."""
    scaler, models = (
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.nn.ModuleList([torch.nn.Linear(4, 3), Positive()]),
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    recorder = record(models, optimizers)
    for x in batches():
        with recorder.step(x):
            for m, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                scaler.scale(m(x).square().mean()).backward()
                scaler.step(optimizer)
            scaler.update()
    assert finding(recorder).step == 3 and scaler.get_scale() == 4


def test_a_group_that_was_added_later(record, model, optimizer):
    """Its gradients are scanned, and a replay leaves them as they were."""
    recorder, late = record(model, optimizer), torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    with recorder.step(x := torch.ones(2, 4)):
        (model(x).mean() + (late - 1).sqrt().sum()).backward()
        optimizer.step()
    assert recorder.reports[0].line.text.count("sqrt") and late.isfinite().all()
    late.grad = torch.ones(3)
    with recorder.step(x := torch.zeros(2, 4)):
        (model(x).mean() + late.sum()).backward()
    assert torch.equal(late.grad, torch.full((3,), 2.0))


def test_backward_is_as_it_was_after_steps_in_two_threads(record):
    backward, begun, ended = torch.autograd.backward, threading.Barrier(2), threading.Event()
    models = [Positive(), Positive()]
    recorders = [record(m, torch.optim.SGD(m.parameters(), 0.1)) for m in models]

    def train(i):
        with recorders[i].step(x := torch.full((2, 4), float(i))):
            begun.wait(10)
            models[i](x).mean().backward()
            if i:
                ended.wait(10)  # the thread that began first may end first
        ended.set()

    threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.autograd.backward is backward and [r.found for r in recorders] == [1, 0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, StopIteration, SystemExit])
def test_an_exception_leaves_nothing_behind(record, model, error):
    backward, optimizer = torch.autograd.backward, torch.optim.AdamW(model.parameters(), 0.1)
    recorder = record(model, optimizer)

    def raises(*_):
        raise error

    with pytest.raises(error), recorder.step(x := torch.zeros(2, 4)):
        model(x).mean().backward()
        gradient = model.inner.weight.grad
        optimizer.register_step_pre_hook(raises)  # while gradients are hidden
        optimizer.step()
    assert torch.autograd.backward is backward and model.inner.weight.grad is gradient
