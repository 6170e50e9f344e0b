"""One mixed-precision training run, as the PyTorch recipe has it, with a record of every step."""

import contextlib
import dataclasses
import math
import statistics
import time

import torch

import safeops
from safeops.core.private_torch import enable_onednn
from safeops.demo.data import FOCAL_BASELINE
from safeops.demo.network import StereoNet

LEARNING_RATE = 0.02
# The default, 65536, overflows the fp16 weight gradients of this network with any loss: the scaler would skip eleven
# steps to reach this scale, at which they stay below a tenth of 65504. So the loss itself causes any step skipped now.
INIT_SCALE = 32.0
# A run that moves no weight for so many steps never will: the data stay the same, and the scale is down to a sixteenth.
PATIENCE = 4


@dataclasses.dataclass
class Step:
    number: int  # from 1
    loss: float
    scale: float  # of the GradScaler, before the step
    finite_gradients: bool
    moved: bool  # a weight changed
    skipped: bool  # the GradScaler refused the step
    epe: float  # mean |error| in disparity over the measured pixels, before the step


@dataclasses.dataclass
class Run:
    name: str
    steps: list = dataclasses.field(default_factory=list)
    exception: str | None = None
    gave_up: bool = False
    scale: float = INIT_SCALE  # of the GradScaler, at the end
    prediction: torch.Tensor | None = None  # of the network as it ended
    epe: float = math.nan  # px
    bad2: float = math.nan  # % of measured pixels more than 2 px off
    depth_error: float = math.nan  # m, mean |error| in depth
    seconds: float = 0.0

    @property
    def skipped(self):
        return sum(s.skipped for s in self.steps)

    @property
    def nonfinite_losses(self):
        return sum(not math.isfinite(s.loss) for s in self.steps)

    @property
    def nonfinite_gradients(self):
        return sum(not s.finite_gradients for s in self.steps)

    @property
    def learned(self):
        """It ran to its end, every loss was finite, and the error fell to less than half."""
        return (
            self.exception is None
            and not self.gave_up
            and self.nonfinite_losses == 0
            and self.epe < self.steps[0].epe / 2
        )


@contextlib.contextmanager
def cpu_settings():
    """One thread, and torch's own kernels instead of oneDNN's.

    A second thread gains these small fp16 layers little, and on a busy machine they wait for it. oneDNN's fp16
    convolutions, which CPUs with AVX-512 FP16 would take, are five times slower on so few channels.
    """
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    enable_onednn(False)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        enable_onednn(onednn)


@cpu_settings()
def train(loss_function, pair, *, steps, seed=0, on_step=lambda step: None):
    """Train a fresh network, equal for equal seeds; stop at an exception or after PATIENCE idle steps."""
    device = pair.left.device.type
    torch.manual_seed(seed)
    network = StereoNet().to(device)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: _rate(n, steps))
    scaler = torch.amp.GradScaler(device, init_scale=INIT_SCALE)
    truth = pair.truth.clone()  # some losses write into their arguments
    run, idle, start = Run(loss_function.__name__), 0, time.perf_counter()
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        with torch.amp.autocast(device, dtype=torch.float16):
            disparity = network(pair.left, pair.right)
            epe = _errors(disparity.detach(), pair)[0]
            try:
                loss = loss_function(disparity, truth)
                scaler.scale(loss).backward()
            except RuntimeError as error:
                run.exception = f"{type(error).__name__} at step {number}: {error}"
                break
        scaler.unscale_(optimizer)
        gradients = [p.grad for p in network.parameters()]
        finite = all(bool(g.isfinite().all()) for g in gradients)
        moved = finite and any(bool(g.any()) for g in gradients)
        scaler.step(optimizer)
        scaler.update()
        run.scale = scaler.get_scale()
        skipped = run.scale < scale
        if not skipped:
            schedule.step()
        run.steps.append(Step(number, loss.item(), scale, finite, moved, skipped, epe))
        on_step(run.steps[-1])
        idle = 0 if moved else idle + 1
        if idle == PATIENCE:
            run.gave_up = True
            break
    with torch.no_grad(), torch.amp.autocast(device, dtype=torch.float16):
        run.prediction = network(pair.left, pair.right)
    run.epe, run.bad2, run.depth_error = _errors(run.prediction, pair)
    run.seconds = time.perf_counter() - start
    return run


def _rate(n, steps):
    """Factor of the learning rate: a warm-up over a fifth of the steps, times a half cosine down to 0."""
    return min(1, (n + 1) / max(1, steps // 5)) * (1 + math.cos(math.pi * n / steps)) / 2


def _errors(disparity, pair):
    """(EPE in px, bad-2.0 in %, depth error in m), over the measured pixels."""
    off = (disparity - pair.truth).abs()
    depth = safeops.safe_div(pair.truth.new_tensor(FOCAL_BASELINE), disparity, eps=1)
    depth_off = (depth - FOCAL_BASELINE / pair.truth).abs()  # inf where it is unknown: masked out below
    epe, bad = (safeops.masked_mean(x, pair.known) for x in (off, (off > 2).float()))
    return epe.item(), 100 * bad.item(), safeops.masked_mean(depth_off, pair.known).item()


@cpu_settings()
def loss_milliseconds(loss_function, prediction, truth, repeats=9):
    """Median time of the loss alone, forward and backward, on a given prediction."""
    times = []
    for _ in range(repeats):
        disparity = prediction.detach().requires_grad_()
        _wait(disparity)
        start = time.perf_counter()
        with torch.amp.autocast(disparity.device.type, dtype=torch.float16):
            loss = loss_function(disparity, truth)
        loss.backward()
        _wait(disparity)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def _wait(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize()
