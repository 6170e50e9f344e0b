"""CudaSampler measures both times of a call on a simulated GPU, which has a queue that the host fills."""

import pytest
import torch

from benchmarks import compare, cuda_timing, report, speed, timing
from benchmarks.cuda_timing import CudaSampler

MICRO = 1e-6
GHZ = 1.5  # slower than cuda_timing.CYCLES assumes, so that a spin lasts longer


class Gpu:
    """Simulates a host at time `now` and a GPU with work until time `busy`. Its methods replace torch.cuda's
    functions."""

    def __init__(self):
        self.now = self.busy = 0.0
        self.spins = []

    def launch(self, host, gpu):
        self.now += host
        self.busy = max(self.busy, self.now) + gpu

    def kernels(self, count, host, gpu):
        """Returns a call of `count` launches. Each takes the host `host` seconds and the GPU `gpu` seconds."""
        return lambda: [self.launch(host, gpu) for _ in range(count)]

    def flush(self):
        self.launch(5 * MICRO, 350 * MICRO)

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now = max(self.now, self.busy)

    def _sleep(self, cycles):
        self.spins.append(cycles)
        self.launch(5 * MICRO, cycles / (GHZ * 1e9))

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.gpu.now += MICRO
        self.at = max(self.gpu.busy, self.gpu.now)  # the time when the GPU reaches the event

    def query(self):
        return self.gpu.now >= self.at

    def synchronize(self):
        self.gpu.now = max(self.gpu.now, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    fake = Gpu()
    for name in ("Event", "_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(cuda_timing.time, "perf_counter", fake.perf_counter)
    return fake


def test_behind_a_spin_it_is_the_gpu_that_is_timed(gpu):
    """Behind a spin the time must be the GPU's, although the host takes ten times as long to enqueue each kernel."""
    sampler = CudaSampler(gpu.kernels(20, 10 * MICRO, MICRO), gpu.flush)
    taken = sampler()
    assert taken.full and taken.seconds == pytest.approx(20 * MICRO) and taken.host == pytest.approx(200 * MICRO)
    bare = sampler.behind(0.0)
    assert not bare.full and bare.seconds == pytest.approx(201 * MICRO), "without a spin it is the host"


def test_a_kernel_that_is_longer_than_its_launch_takes_the_same_either_way(gpu):
    sampler = CudaSampler(gpu.kernels(1, 10 * MICRO, 900 * MICRO), gpu.flush)
    assert sampler().seconds == pytest.approx(900 * MICRO)
    assert sampler.behind(0.0).seconds == pytest.approx(910 * MICRO, rel=0.01)


def test_a_spin_that_was_too_short_is_noticed_and_made_longer(gpu):
    """A call of 2000 launches takes the host longer than the shortest spin; a longer spin must follow."""
    call = gpu.kernels(2000, 10 * MICRO, MICRO)
    sampler = CudaSampler(call, gpu.flush)
    short = sampler.behind(cuda_timing.SHORTEST)
    assert not short.full and short.seconds > 9 * 2000 * MICRO
    for _ in range(3):
        taken = sampler()
        assert taken.full and taken.seconds == pytest.approx(2000 * MICRO) and taken.host == pytest.approx(0.02)
    assert sampler.spin == pytest.approx(cuda_timing.MARGIN * 0.02) and sampler.spin < cuda_timing.LONGEST
    assert len(gpu.spins) == 5, "once it is long enough, no sample is taken twice"


def test_the_spin_is_shorter_again_after_an_interruption(gpu):
    delays = [0.05, 0.0, 0.0, 0.0]
    sampler = CudaSampler(lambda: gpu.launch(10 * MICRO + delays.pop(0), 20 * MICRO), gpu.flush)
    assert [round(sampler().seconds / MICRO) for _ in range(3)] == [20, 20, 20]
    assert sampler.spin == cuda_timing.SHORTEST


def test_a_call_that_waits_says_so_and_is_not_tried_for_ever(gpu):
    def indexed():  # x[mask]: a kernel that counts, a wait, a kernel that gathers
        gpu.launch(10 * MICRO, 100 * MICRO)
        gpu.synchronize()
        gpu.launch(10 * MICRO, 100 * MICRO)

    sampler = CudaSampler(indexed, gpu.flush)
    first = sampler()
    tries = len(gpu.spins)
    second = sampler()
    assert not first.full and not second.full and tries < 12 and len(gpu.spins) == tries
    assert second.seconds == pytest.approx(220 * MICRO, rel=0.01), "the GPU's and the host's together, without the spin"


def test_a_record_holds_both_times_of_every_contender(gpu, monkeypatch):
    monkeypatch.setattr(timing, "_flush_buffer", lambda device: type("Buffer", (), {"zero_": staticmethod(gpu.flush)}))
    monkeypatch.setattr(speed, "copy_of", lambda total, device: gpu.kernels(1, 8 * MICRO, 90 * MICRO))
    case = type("Case", (), {"op": "masked_mean", "variant": False, "elements": 1 << 26})
    ours, eager = gpu.kernels(1, 15 * MICRO, 100 * MICRO), gpu.kernels(4, 20 * MICRO, 200 * MICRO)

    def indexed():
        gpu.synchronize()
        gpu.launch(10 * MICRO, 300 * MICRO)

    contenders = {
        "ours": ours,
        "eager: (x * m).sum()": eager,
        "eager: x[m]": indexed,
        "compile": gpu.kernels(1, 70 * MICRO, 105 * MICRO),
    }
    record = speed._record(case, "bf16", "forward", 3, contenders, 5, "cuda")
    assert {name: round(ms * 1e3) for name, ms in record["milliseconds"].items()} == {
        "copy": 90, "ours": 100, "eager: (x * m).sum()": 800, "eager: x[m]": 310, "compile": 105,
    }  # fmt: skip
    assert [round(record["host_us"][who]) for who in ("ours", "eager: (x * m).sum()", "compile")] == [15, 80, 70]
    assert record["of_floor"] == pytest.approx(0.9)
    assert record["undisturbed"] == {"copy": 1, "ours": 1, "eager: (x * m).sum()": 1, "eager: x[m]": 0, "compile": 1}
    head, _, row = report._speed([record], "cuda")[2:5]
    cells = [[cell.strip() for cell in line.split("|")] for line in (head, row)]
    result = dict(zip(*cells))
    assert (result["GPU ms"], result["host us"], result["eager's"], result["compile's"]) == ("0.100", "15", "80", "70")
    assert report.misses({"settings": {"device": "cuda"}, "speed": [record], "overhead": [], "memory": []}) == []


def test_our_own_wait_is_not_judged(gpu):
    record = {"op": "masked_select", "direction": "forward", "undisturbed": {"ours": 0.0, "copy": 1.0}}
    results = {"settings": {"device": "cuda"}, "speed": [record], "overhead": [], "memory": []}
    assert report.misses(results) == ["masked_select forward: not judged, the GPU waited for the host"]


def test_two_checkouts_are_compared_by_both(gpu):
    def side(host, seconds):
        sampler = CudaSampler(gpu.kernels(1, host, seconds), gpu.flush)
        return type("Side", (), {"ask": lambda self, what, key: list(sampler())})()  # a list, as from JSON

    sides = {"old": side(30 * MICRO, 100 * MICRO), "new": side(10 * MICRO, 125 * MICRO)}
    record = compare.timed(sides, "forward", 3, small=False)
    assert record["ratio"] == pytest.approx(0.8) and record["quiet"] == 1
    assert (record["old_host_us"], record["new_host_us"]) == (pytest.approx(30), pytest.approx(10))


def test_the_header_says_which_ops_ran_their_kernels():
    assert report._routes({"mse_loss": "kernel", "psnr": "kernel"}) == "Kernels: 2 ops. Plain torch definitions: none."
    assert "Kernels: 1 ops. Plain torch definitions: psnr." == report._routes(
        {"psnr": "composite", "mse_loss": "kernel"}
    )
