"""Times a training step of the demo network under each tool of safeops.debug, and under torch's detect_anomaly."""

import tempfile
import warnings

GOAL = 1.5  # a traced step may take 1.5 times as long as a plain step


def measure(device: str, rounds: int) -> list[dict]:
    """Returns a record for each tool: milliseconds of a step, and their ratio to those of a plain step in the same
    rounds."""
    import torch

    from safeops import debug

    from .timing import interleave

    step, model, optimizer, batch = training_step(device)

    def anomaly():
        with warnings.catch_warnings(), torch.autograd.detect_anomaly():
            step()

    tracer = debug.trace(model, action="record")  # as users do: one context around many steps

    def traced():
        with tracer:
            step()

    logger = debug.trace(model, action="record", log=Unwritten())  # html= records these values, too

    def logged():
        with logger:
            step()

    def audited():
        with debug.audit():
            step()

    def located():
        with debug.locate_errors(model):
            step()

    def unsynchronised():
        with debug.no_sync():
            step()

    folder = tempfile.TemporaryDirectory()
    recorder = debug.recorder(model, optimizer, folder=folder.name)

    def recorded():
        with recorder.step(batch):
            step()

    calls = {"plain": step, "trace": traced, "trace log=": logged, "detect_anomaly": anomaly, "locate_errors": located}
    calls |= {"no_sync": unsynchronised, "audit": audited, "recorder": recorded}
    with folder, recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # detect_anomaly warns at each use that it is slow
        samples = interleave(calls, rounds, device, cold=False)
    if tracer.report:
        raise RuntimeError(f"the step that is measured went wrong: {tracer.report}")
    plain = samples["plain"].time()
    return [
        {
            "tool": name,
            "milliseconds": samples[name].time() * 1e3,
            "x_plain": samples[name].time() / plain,
            "undisturbed": samples[name].share_clean(),
        }
        for name in calls
    ]


class Unwritten:
    """A SummaryWriter that writes nothing, so that only the tracer's own time is measured."""

    def add_scalar(self, *args):
        pass

    add_histogram = add_scalar


def training_step(device: str):
    """Returns (a function that runs one step, the network, its optimizer, the batch). A step has fp16 autocast,
    GradScaler and Adam, and the demo's image pair and loss."""
    import torch

    from safeops.demo import data, losses, network, training

    pair = data.load(device)
    torch.manual_seed(0)
    model = network.StereoNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), training.LEARNING_RATE / 10)
    scaler = torch.amp.GradScaler(device, init_scale=training.INIT_SCALE)

    def step():
        optimizer.zero_grad()
        with torch.amp.autocast(device, dtype=torch.float16):
            loss = losses.with_safeops(model(pair.left, pair.right), pair.truth)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, model, optimizer, (pair.left, pair.right, pair.truth)
