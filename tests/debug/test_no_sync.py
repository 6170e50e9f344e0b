"""no_sync raises, with the line, where the host would wait for the device. CPU tensors stand for a device's tensors."""

import pytest
import torch

import safeops
from safeops.debug import SynchronizationError, no_sync

X, I = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1])

WAITS = {
    "item": lambda: X.sum().item(),
    "float": lambda: float(X.sum()),
    "bool": lambda: bool((X > 0).all()),
    "print": lambda: str(X),
    "tolist": lambda: X.sum().tolist(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 0),
    "masked_select": lambda: X.masked_select(X > 0),
    "read": lambda: X[X > 0],
    "write": lambda: X.clone().__setitem__(X > 0, torch.ones(2)),
    "write at a mask and an index": lambda: X.expand(2, 3).clone().__setitem__((X[:2] > 0, I), 0),
    "write at an index and a mask": lambda: X.expand(2, 3).clone().__setitem__((0, X > 0), torch.ones(2)),
    "write at two masks": lambda: X.expand(2, 3).clone().__setitem__((X[:2] > 0, X > 1), 0),
    "write at a mask of bytes": lambda: X.clone().index_put_(((X > 0).byte(),), torch.ones(2)),
    "read at a mask and an index": lambda: X.expand(2, 3)[X[:2] > 0, I],
    "index_put": lambda: X.clone().index_put_((X > 0,), torch.ones(2)),
    "unique": lambda: X.unique(),
    "bincount": lambda: torch.arange(3).bincount(),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 3])),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "synchronize": lambda: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_what_waits_raises_with_its_line(wait):
    with pytest.raises(SynchronizationError, match="waits for the device") as caught, no_sync(cpu=True):
        WAITS[wait]()
    assert caught.value.line.file == __file__ and f'"{wait}"' in caught.value.line.text


@pytest.mark.parametrize(
    "works",
    [
        lambda: X.clone().__setitem__(X > 0, 0.0),  # one number for all: torch runs masked_fill, which does not wait
        lambda: X[torch.tensor([0, 1])],
        lambda: X.repeat_interleave(2),
        lambda: X.repeat_interleave(torch.tensor([1, 2, 3]), output_size=6),
        lambda: X.half().float(),
        lambda: torch.zeros(3).copy_(X),
        lambda: safeops.masked_compact(X, X > 0, capacity=2),
        lambda: safeops.mse_loss(X, X, mask=X > 0),
        lambda: safeops.safe_gather(X, 0, torch.tensor([5, 0])),
        lambda: safeops.masked_softmax(X, X > 0),
    ],
)
def test_what_does_not_wait_passes(works):
    with no_sync(cpu=True):
        works()


def imported_by_name():
    raise RuntimeError("called a synchronizing CUDA operation")  # as torch.cuda.set_sync_debug_mode's error


def test_what_torch_alone_sees_raises_with_its_line():
    with pytest.raises(SynchronizationError, match="a call that is no op") as caught, no_sync(cpu=True):
        imported_by_name()
    assert caught.value.line.function == "imported_by_name"
    with pytest.raises(RuntimeError, match="^another$"), no_sync(cpu=True):
        raise RuntimeError("another")


def test_the_backward_pass_too():
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = X.clone().requires_grad_()
    with pytest.raises(SynchronizationError) as caught, no_sync(cpu=True):
        Waits.apply(x).sum().backward()
    assert caught.value.line.function == "backward"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a device")
def test_cpu_tensors_are_no_device():
    with pytest.warns(UserWarning, match="so nothing is checked; cpu=True"), no_sync():
        assert X.sum().item() == 2.0


def test_the_scalers_own_read_is_allowed_or_not():
    model, scaler = torch.nn.Linear(3, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    with no_sync(cpu=True):
        step()
    with pytest.raises(SynchronizationError), no_sync(cpu=True, allow_scaler=False):
        step()


def test_copies_between_devices():
    with pytest.raises(SynchronizationError, match="a copy from meta to cpu"), no_sync():
        no_sync(cpu=True).__torch_dispatch__(
            torch.ops.aten._to_copy.default, (), (torch.empty(2, device="meta"),), {"device": torch.device("cpu")}
        )


def test_everything_is_put_back():
    before = torch.cuda.synchronize
    for _ in range(2):
        with pytest.raises(SynchronizationError), no_sync(cpu=True):
            X.sum().item()
    assert torch.cuda.synchronize is before and X.sum().item() == 2.0
