"""A GPU that is pretended: `pytest -p tests.pretended` with SAFEOPS_TEST_DEVICE=cuda, on a machine without one.

A tensor that is asked for on "cuda" lies on the CPU and is remembered by its storage; so is what is computed from it. It
says that its device is "cuda:0", so the composites run as they do there, and a tensor of the CPU beside it raises, as
there: a test, a module or a definition that mixes devices is seen where no GPU is.
"""

import functools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FACTORIES = """tensor as_tensor empty zeros ones full arange linspace eye rand randn randint randperm scalar_tensor
    empty_strided zeros_like ones_like empty_like full_like rand_like randn_like""".split()
# A copy, and indices of another device, are torch's own; of the others a number of the CPU may stand beside a GPU's.
COPIES = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}
NO_NUMBERS = {"clamp", "clamp_min", "clamp_max", "cat", "stack", "index_select", "gather"}

device_of = torch._C.TensorBase.device.__get__
storages = {}  # address -> weak reference, of what is on the GPU


class MixedDevices(RuntimeError):
    """Expected all tensors to be on the same device."""


def real(x):
    return type(x) in (torch.Tensor, torch.nn.Parameter) and device_of(x) == CPU


def on_gpu(x):
    return real(x) and x.untyped_storage()._cdata in storages


def mark(x, gpu=True):
    if real(x):
        key = x.untyped_storage()._cdata
        if gpu:
            storages.setdefault(key, StorageWeakRef(x.untyped_storage()))
        else:
            storages.pop(key, None)
    return x


def is_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and real(x)]
        name = func.overloadpacket.__name__
        here = [on_gpu(x) for x in tensors]
        if any(here) and not all(here) and name not in COPIES:
            for x, gpu in zip(tensors, here):
                if not gpu and (x.dim() or name in NO_NUMBERS):
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
    def made(*args, device=None, **kwargs):
        if not is_gpu(device):
            result = make(*args, device=device, **kwargs)
            return mark(result, False) if device is not None else result
        if (generator := kwargs.get("generator")) is not None and generator.device.type == "cpu":
            raise MixedDevices("a CPU's generator for a tensor on cuda:0")
        return mark(make(*args, device="cpu", **kwargs))

    return made


def moved(to):
    def move(x, *args, **kwargs):
        place = kwargs.pop("device", None)
        if args and isinstance(args[0], (str, torch.device, int)):
            place, args = args[0], args[1:]
        elif args and isinstance(args[0], torch.Tensor):
            place, args = args[0].device, (args[0].dtype, *args[1:])
        if not real(x) or place is None or torch.device(place).type not in ("cpu", "cuda"):
            return to(x, *(() if place is None else (place,)), *args, **kwargs)
        y = to(x, *args, **kwargs) if args or kwargs else x
        if is_gpu(place) != on_gpu(y):
            y = mark(y.clone() if y.untyped_storage()._cdata == x.untyped_storage()._cdata else y, is_gpu(place))
        return y

    return move


def pretend():
    from safeops import _verified

    for name in FACTORIES:
        setattr(torch, name, factory(getattr(torch, name)))
    T = torch.Tensor
    T.to = moved(T.to)
    T.cpu, T.cuda = lambda x, **_: x.to("cpu"), lambda x, *_, **__: x.to("cuda")
    T.device = property(lambda x: CUDA if on_gpu(x) else device_of(x))
    T.is_cuda = property(on_gpu)
    T.is_cpu = property(lambda x: device_of(x) == CPU and not on_gpu(x))
    T.get_device = lambda x: 0 if on_gpu(x) else -1
    torch.compile = torch.export.export = lambda *_, **__: pytest.skip("a trace knows no pretended device")
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode = lambda: 0, lambda mode: None
    _verified.Trust.__getitem__ = lambda self, index: False


pretend()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """A failure that is not about devices is another run's matter: kernels, autocast and streams are not pretended."""
    with Watch():
        outcome = yield
    if outcome.excinfo and not issubclass(outcome.excinfo[0], pytest.skip.Exception):
        text, error = "", outcome.excinfo[1]
        while error is not None:
            text, error = text + f"{type(error).__name__}: {error}", error.__cause__ or error.__context__
        if not any(words in text for words in ("MixedDevices", "attribute 'device'", " on cpu", "is on cuda")):
            outcome.force_exception(pytest.xfail.Exception(text.partition("\n")[0]))
    for key in [key for key, weak in storages.items() if weak.expired()]:
        del storages[key]
