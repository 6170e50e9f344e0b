"""No op, truth, twin or module mixes devices: each sample of each op runs on a pretended GPU (tests/pretended.py)."""

import dataclasses

import pytest
import torch

import safeops
from safeops.testing import run
from tests.ops import RECORDS
from tests.pretended import MixedDevices, gpu, on_gpu  # noqa: F401


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if not isinstance(record.samples, str)])
@pytest.mark.filterwarnings("ignore:.* is broadcast with")
def test_samples(name, gpu):  # noqa: F811
    subject = dataclasses.replace(next(iter(RECORDS[name].subjects())), device=gpu)
    for sample in subject.samples:
        placed = sample.cast(torch.float32).to(gpu)
        got = run(subject.op, placed)
        assert all(on_gpu(x) for x in (*got.values, *got.grads.values()) if x.numel()), sample.name
        subject.truth(placed, got.upstream or None)
        if subject.torch_equivalent:
            try:
                run(subject.torch_equivalent, placed, unused_ok=True)
            except MixedDevices:
                raise
            except (TypeError, RuntimeError):
                pass  # torch refuses this sample


def test_a_temperature_of_the_host(gpu):  # noqa: F811
    """A 0-dim temperature on the host works with inputs on a GPU, as in torch: a module keeps it where it was built."""
    query, key = torch.randn(4, 5, device=gpu, requires_grad=True), torch.randn(4, 5, device=gpu)
    temperature = torch.tensor(0.5, requires_grad=True)
    loss = safeops.nn.InfoNCELoss(temperature=temperature)(query, key)
    assert loss.is_cuda and torch.equal(loss, safeops.info_nce_loss(query, key, temperature=0.5))
    _, slope = torch.autograd.grad(loss, (query, temperature))
    assert slope != 0
    with pytest.raises(ValueError, match="temperature"):
        safeops.info_nce_loss(query, key, temperature=torch.ones(4))


def test_a_mix_is_seen(gpu):  # noqa: F811
    x = torch.ones(3, device=gpu)
    assert x.device == (x * 2).device == x[1:].device == torch.device("cuda", 0) and x.cpu().device.type == "cpu"
    assert (x + torch.tensor(1.0)).is_cuda and x.tolist() == [1.0] * 3
    for mix in (lambda: x + torch.ones(3), lambda: x.clamp(min=torch.tensor(1.0)), lambda: torch.stack([x, x.cpu()])):
        with pytest.raises(MixedDevices):
            mix()
    with pytest.raises(ValueError, match="masked_sum: mask is on cpu, input on cuda:0"):
        safeops.masked_sum(x, torch.ones(3, dtype=torch.bool))
