"""to_device: what moves and what does not; on a GPU that copies late, no race where the plain pattern has one."""

import collections
import dataclasses

import numpy as np
import pytest
import torch

import safeops
from tests.amp.late_copies import GPU, LateCopies, Stream

Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


@pytest.fixture
def gpu(monkeypatch):
    with LateCopies(monkeypatch) as mode:
        yield mode


def result_on(gpu, moved):
    gpu.arrive()
    return moved.as_subclass(torch.Tensor)


# ---- on the host


def test_on_the_device_already_means_the_same_objects():
    array = np.zeros(3, dtype=np.float32)
    batch = {"x": torch.from_numpy(array), "names": ["a", "b"], "pair": Pair(torch.ones(2), 3)}
    for device in ("cpu", torch.device("cpu")):
        assert safeops.to_device(batch, device) is batch
    safeops.to_device(batch, "cpu")["x"][0] = 5  # the result shares the batch's memory
    assert array[0] == 5


def test_to_another_device_in_every_container():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)], enforce_sorted=True)
    shared = torch.ones(2, 3)
    batch = [Pair(shared, 7), {"s": Sample(shared, "left"), "t": (torch.arange(4), None)}, packed, np.ones(2), "text"]
    moved = safeops.to_device(batch, "meta")
    assert type(moved[0]) is Pair and moved[0].image.is_meta and moved[0].label == 7
    assert moved[1]["s"].x is moved[0].image and moved[1]["s"].name == "left"  # a tensor that occurs twice moves once
    assert moved[1]["t"][0].is_meta and moved[1]["t"][0].dtype == torch.int64 and moved[1]["t"][1] is None
    assert moved[2].data.is_meta and moved[2].batch_sizes is packed.batch_sizes
    assert moved[3] is batch[3] and moved[4] == "text"
    assert shared.device.type == "cpu" and batch[0].image is shared


def test_from_a_device_to_the_host_and_layouts():
    x = torch.arange(6.0, device="meta").reshape(2, 3).t()
    moved = safeops.to_device(x, "meta")
    assert moved is x
    sparse = torch.eye(3).to_sparse()
    assert safeops.to_device([sparse], "meta")[0].layout == torch.sparse_coo


def test_bad_arguments_are_named():
    x = torch.ones(2)
    for arguments, options, error, words in (
        (("gpu7",), {}, TypeError, "device must name a device, got 'gpu7'"),
        ((None,), {}, TypeError, "device must name a device, got None"),
        (("cpu",), {"stream": 3}, TypeError, r"stream must be a torch.cuda.Stream, got int"),
        (("cpu",), {"host_reused": 0}, TypeError, "host_reused must be True or False, got 0"),
    ):
        with pytest.raises(error, match=f"to_device: {words}"):
            safeops.to_device(x, *arguments, **options)


# ---- on a GPU that copies late


def test_the_plain_pattern_has_the_race(gpu):
    x = gpu.pin(torch.arange(4.0))
    moved = x.to(GPU, non_blocking=True)
    x.fill_(7)  # the host writes the next batch
    assert result_on(gpu, moved).tolist() == [7.0] * 4


@pytest.mark.parametrize("pinned", [True, False])
def test_the_host_buffer_may_be_written_at_once(gpu, pinned):
    x = torch.arange(4.0)
    if pinned:
        gpu.pin(x)
    batch = {"x": x, "rows": [x.reshape(2, 2).t(), x[1:3]]}
    moved = safeops.to_device(batch, "cuda")
    assert len(gpu.queue) == 3  # the copies are asynchronous
    assert all(source is not x for _, source, _ in gpu.queue)
    x.fill_(7)
    assert result_on(gpu, moved["x"]).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert result_on(gpu, moved["rows"][0]).tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert result_on(gpu, moved["rows"][1]).tolist() == [1.0, 2.0]


def test_a_promise_not_to_write_saves_the_copy_of_what_is_pinned(gpu):
    pinned, pageable = gpu.pin(torch.arange(4.0)), torch.arange(4.0)
    moved = safeops.to_device([pinned, pageable], "cuda", host_reused=False)
    sources = [source for _, source, _ in gpu.queue]
    assert sources[0] is pinned and sources[1] is not pageable
    pageable.fill_(7)
    assert result_on(gpu, moved[1]).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_side_stream_is_waited_for_and_told_of_the_reader(gpu):
    side, current = Stream("side"), gpu.current
    moved = safeops.to_device({"x": torch.ones(3)}, "cuda:0", stream=side)["x"]
    assert [stream for _, _, stream in gpu.queue] == [side]
    assert moved.recorded is current  # record_stream: memory is not reused before the copy is done
    assert current.waits_for == [side] and gpu.current is current
    gpu.queue.clear()
    plain = safeops.to_device(torch.ones(3), "cuda")
    assert gpu.queue[0][2] is current and plain.recorded is None
    side.device = torch.device("cuda", 1)
    with pytest.raises(ValueError, match="to_device: stream is of cuda:1, device is cuda:0"):
        safeops.to_device(torch.ones(3), "cuda", stream=side)
    with pytest.raises(ValueError, match="to_device: stream is of cuda:1, device is cpu"):
        safeops.to_device(torch.ones(3), "cpu", stream=side)


def test_what_is_there_already_stays_and_leaving_the_gpu_waits(gpu):
    there = torch.ones(2).to(GPU)
    assert safeops.to_device([there], "cuda")[0] is there and not gpu.queue


def test_strides_dtypes_and_gradients_are_kept(gpu):
    for x in (torch.ones(2, 3).t(), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(2).half()):
        moved = safeops.to_device(x, "cuda")
        assert moved.stride() == x.stride() and moved.dtype == x.dtype
    leaf = torch.ones(2, requires_grad=True)
    safeops.to_device(leaf, "cuda")
    (source,) = [source for _, source, _ in gpu.queue if source.requires_grad]
    (grad,) = torch.autograd.grad(source.sum(), leaf)
    assert grad.tolist() == [1.0, 1.0]
