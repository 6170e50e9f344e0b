"""A pretended GPU, for machines without one.

A tensor made on "cuda" is in CPU memory and remembered by its storage; so is whatever is computed from it. It says that
its device is "cuda:0", so composites run as on a GPU, and a CPU tensor beside it raises: a test, module or definition
that mixes devices is found without a GPU. Kernels are not pretended.

The fixture `gpu` is for one test. `SAFEOPS_TEST_DEVICE=cuda pytest -p tests.pretended tests/contract/vectors` runs a
folder's tests, and fails where they mix devices.
"""

import functools
import os

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FACTORIES = """tensor as_tensor empty zeros ones full arange linspace eye rand randn randint randperm scalar_tensor
    empty_strided zeros_like ones_like empty_like full_like rand_like randn_like""".split()
# Ops that may take both devices. (Torch also takes a 0-dim CPU tensor beside a GPU's, but NO_NUMBERS do not.)
TWO_DEVICES = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}
NO_NUMBERS = {"clamp", "clamp_min", "clamp_max", "cat", "stack", "index_select", "gather"}
UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}  # dtypes that CUDA cannot index

device_of = torch._C.TensorBase.device.__get__
storages = {}  # address of a storage on the GPU -> weak reference


class MixedDevices(RuntimeError):
    """Expected all tensors to be on the same device."""


def real(x):
    return type(x) in (torch.Tensor, torch.nn.Parameter) and device_of(x) == CPU


def on_gpu(x):
    return real(x) and x.untyped_storage()._cdata in storages


def mark(x, gpu=True):
    if real(x):
        storage = x.untyped_storage()
        if gpu:
            storages.setdefault(storage._cdata, StorageWeakRef(storage))
        else:
            storages.pop(storage._cdata, None)
    return x


def is_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and real(x)]
        name, here = func.overloadpacket.__name__, [on_gpu(x) for x in tensors]
        if any(here) and name == "index" and tensors[0].dtype in UNSIGNED:
            raise NotImplementedError(f"MixedDevices: CUDA has no index of {tensors[0].dtype}")
        if any(here) and not all(here) and name not in TWO_DEVICES:
            if any(not gpu and (x.dim() or name in NO_NUMBERS) for x, gpu in zip(tensors, here)):
                shapes = [f"{tuple(x.shape)} on {'cuda:0' if gpu else 'cpu'}" for x, gpu in zip(tensors, here)]
                raise MixedDevices(f"{func} of {', '.join(shapes)}")
        result = func(*args, **(kwargs or {}))
        if any(here) and name != "copy_":
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    mark(x)
        return result


def factory(make):
    @functools.wraps(make)
    def call(*args, device=None, **options):
        if not is_gpu(device):
            result = make(*args, device=device, **options)
            return result if device is None else mark(result, False)
        if (generator := options.get("generator")) is not None and generator.device == CPU:
            raise MixedDevices("a CPU's generator for a tensor on cuda:0")
        return mark(make(*args, device="cpu", **options))

    return call


def moved(to):
    def move(x, *args, **options):
        place = options.pop("device", None)
        if args and isinstance(args[0], (str, torch.device, int)):
            place, args = args[0], args[1:]
        elif args and isinstance(args[0], torch.Tensor):
            place, args = args[0].device, (args[0].dtype, *args[1:])
        if not real(x) or place is None or torch.device(place).type not in ("cpu", "cuda"):
            return to(x, *(() if place is None else (place,)), *args, **options)
        y = to(x, *args, **options) if args or options else x
        if is_gpu(place) != on_gpu(y):
            y = mark(y.clone() if y.untyped_storage()._cdata == x.untyped_storage()._cdata else y, is_gpu(place))
        return y

    return move


def pretend(patch):
    """Makes torch pretend to have a GPU until `patch`, a pytest.MonkeyPatch, is undone."""
    from safeops.core.op import registry

    for name in FACTORIES:
        patch.setattr(torch, name, factory(getattr(torch, name)))
    new_tensor, to = torch.Tensor.new_tensor, moved(torch.Tensor.to)
    instead = {
        "to": to,
        "cpu": lambda x, **_: to(x, "cpu"),
        "cuda": lambda x, *_, **__: to(x, "cuda"),
        "new_tensor": lambda x, *args, **options: mark(new_tensor(x, *args, **options), on_gpu(x)),
        "device": property(lambda x: CUDA if on_gpu(x) else device_of(x)),
        "is_cuda": property(on_gpu),
        "is_cpu": property(lambda x: device_of(x) == CPU and not on_gpu(x)),
        "get_device": lambda x: 0 if on_gpu(x) else -1,
    }
    for name, value in instead.items():
        patch.setattr(torch.Tensor, name, value)
    for name in ("current_device", "get_sync_debug_mode", "set_sync_debug_mode"):
        patch.setattr(torch.cuda, name, lambda *_: 0)
    for op in registry.values():
        for part in (op, *op.parts):
            patch.setattr(part, "cuda", [False], raising=False)


@pytest.fixture
def gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with monkeypatch.context() as patch:
        pretend(patch)
        with Watch():
            yield "cuda"
    storages.clear()


# ---- as a plugin

WHOLE_RUN = os.environ.get("SAFEOPS_TEST_DEVICE") == "cuda" and not torch.cuda.is_available()


def pytest_configure(config):
    if WHOLE_RUN:  # before collection, for test modules make tensors when imported
        patch = pytest.MonkeyPatch()
        pretend(patch)
        for owner, name in ((torch, "compile"), (torch.export, "export")):
            patch.setattr(owner, name, lambda *_, **__: pytest.skip("a trace knows no pretended device"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """Reports failures that are not about devices as expected (xfail): runs without `-p tests.pretended` find them."""
    if not WHOLE_RUN:
        yield
        return
    with Watch():
        outcome = yield
    for key in [key for key, weak in storages.items() if weak.expired()]:
        del storages[key]
    if outcome.excinfo and not issubclass(outcome.excinfo[0], pytest.skip.Exception):
        text, error = "", outcome.excinfo[1]
        while error is not None:
            text, error = text + f"{type(error).__name__}: {error}", error.__cause__ or error.__context__
        if not any(words in text for words in ("MixedDevices", "attribute 'device'", " on cpu", "is on cuda")):
            outcome.force_exception(pytest.xfail.Exception(text.partition("\n")[0]))
