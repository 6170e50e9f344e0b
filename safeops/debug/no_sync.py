"""no_sync: raise an error where a training step makes the host wait for the device."""

import contextlib
import functools
import warnings

import torch

from safeops.core.private_torch import STEPS_OPTIMIZER, OpOverload, TorchDispatchMode
from safeops.debug.common.facts import facts, run, tensors_in
from safeops.debug.common.source import called_by, line, traceback_frames, user_frames

# ATen op that makes the host wait: (what the user wrote, what to write instead).
_READS = {
    "_local_scalar_dense": ("item(), float(), int(), bool() or print of a tensor", "keep the value on the device"),
    "is_nonzero": ("bool() of a tensor", "torch.where, or keep the value on the device"),
    "equal": ("torch.equal", "(a == b).all(), kept on the device"),
    "allclose": ("torch.allclose", "torch.isclose(a, b).all(), kept on the device"),
    "nonzero": ("nonzero(), whose size depends on values", "safeops.masked_compact(x, mask, capacity=n)"),
    "masked_select": ("masked_select, whose size depends on values", "safeops.masked_compact(x, mask, capacity=n)"),
    "_masked_select": ("masked_select, whose size depends on values", "safeops.masked_compact(x, mask, capacity=n)"),
    "_unique2": (
        "unique, whose size depends on values",
        "a fixed number of classes (torch.nn.functional.one_hot with it)",
    ),
    "unique_dim": ("unique, whose size depends on values", "a fixed number of classes"),
    "unique_consecutive": ("unique, whose size depends on values", "a fixed number of classes"),
    "bincount": ("bincount, whose size depends on values", "torch.zeros(n).scatter_add_"),
}
_INDEX = "a boolean index, whose size depends on values"


class SynchronizationError(RuntimeError):
    """Raised by `no_sync`. `.line` is the user's source line, `.what` names the call that waited."""

    def __init__(self, what, instead, frames):
        self.what, self.line = what, line(frames[0]) if frames else None
        where = f"\n  {self.line}".replace("\n", "\n  ") if self.line else ""
        super().__init__(
            f"no_sync: the host waits for the device: {what}{where}" + (f"\n  instead: {instead}" if instead else "")
        )


class no_sync(TorchDispatchMode):
    """Raise SynchronizationError, with the line, where the code inside makes the host wait for a device.

    That is: reading a value (item, float, bool, print, tolist, cpu), results whose size depends on values (a boolean
    index, nonzero, unique, masked_select), blocking copies to or from the device, `synchronize()`. On CUDA, torch's own
    sync debug mode is switched on as well, which also sees what ops do inside.

    Args:
        cpu: treat CPU tensors as if they were on a device, to test a step on a machine without one. (`x.cpu()` of a
            CPU tensor returns x and runs no op, so it is not seen.)
        allow_scaler: let GradScaler.step read its one flag per step, which a step with a GradScaler cannot avoid.

    Example:
        >>> x = torch.tensor([1.0, -1.0])
        >>> with safeops.debug.no_sync(cpu=True):
        ...     y = safeops.masked_mean(x, x > 0)
        >>> with safeops.debug.no_sync(cpu=True):
        ...     y = x[x > 0].mean()
        Traceback (most recent call last):
        ...
        safeops.debug.SynchronizationError: no_sync: the host waits for the device: a boolean index, ...
    """

    def __init__(self, *, cpu: bool = False, allow_scaler: bool = True):
        super().__init__()
        self.cpu, self.allow_scaler = cpu, allow_scaler

    def __enter__(self) -> "no_sync":
        if not self.cpu and not torch.accelerator.is_available():
            text = "there is no device here but the CPU, so nothing is checked; cpu=True lets the CPU stand for one"
            warnings.warn(f"no_sync: {text}", stacklevel=2)
        self.stack = contextlib.ExitStack()
        for owner, name in (*_WAITS, *(_CPU_READS if self.cpu else ())):
            self._forbid(owner, name)
        if torch.cuda.is_available():
            self.stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, kind, error, traceback) -> None:
        super().__exit__(kind, error, traceback)
        self.stack.close()
        # torch's sync debug mode also raises outside dispatched ops: in a `synchronize` that was imported by name.
        if _by_torch(error):
            raise SynchronizationError("a call that is no op", None, traceback_frames(traceback)) from error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        what, instead = self._waiting(func, args, kwargs)
        if what and not (self.allow_scaler and called_by(STEPS_OPTIMIZER, 2, "grad_scaler.py")):
            raise SynchronizationError(what, instead, user_frames(2)[0])
        try:
            with self._scalers_read():
                return run(func, args, kwargs)
        except RuntimeError as error:
            if not _by_torch(error):
                raise
            raise SynchronizationError(str(func), None, user_frames(2)[0]) from error

    def _waiting(self, func, args, kwargs):
        """(what, instead) if this op makes the host wait, else (None, None)."""
        tensors = list(tensors_in((*args, *kwargs.values())))
        if not any(self._on_device(x) for x in tensors) or not isinstance(func, OpOverload):
            return None, None
        name = facts(func).name
        if name in _READS:
            return _READS[name]
        if name == "index" or name.startswith(("index_put", "_index_put")):
            indices = [x for x in args[1] if isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)]
            # One value written through a single mask runs as masked_fill, which does not wait.
            if indices and (name == "index" or args[2].numel() != 1 or len(args[1]) > 1):
                return _INDEX, "mask= of the losses and reductions, or safeops.masked_compact(x, mask, capacity=n)"
        if name == "repeat_interleave" and kwargs.get("output_size") is None and not isinstance(args[-1], int):
            return "repeat_interleave, whose size depends on values", "output_size="
        if name in ("_to_copy", "copy_"):
            return self._copy(name, args, kwargs)
        return None, None

    def _copy(self, name, args, kwargs):
        source, blocking = args[-1 if name == "copy_" else 0], not kwargs.get("non_blocking", False)
        if name == "copy_" and isinstance(args[-1], bool):
            source, blocking = args[1], not args[-1]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        if blocking and (source.device.type == "cpu") != (torch.device(target).type == "cpu"):
            return (
                f"a copy from {source.device} to {target}",
                "safeops.to_device, or non_blocking=True from pinned memory",
            )
        return None, None

    def _on_device(self, x):
        return self.cpu or x.device.type not in ("cpu", "meta")

    @contextlib.contextmanager
    def _scalers_read(self):
        """Let GradScaler's own read through torch's sync debug mode."""
        allowed = self.allow_scaler and torch.cuda.is_available() and called_by(STEPS_OPTIMIZER, 3, "grad_scaler.py")
        if allowed:
            torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            if allowed:
                torch.cuda.set_sync_debug_mode("error")

    def _forbid(self, owner, name):
        original = getattr(owner, name)

        @functools.wraps(original)
        def waits(*args, **kwargs):
            raise SynchronizationError(f"{name}()", None, user_frames(2)[0])

        inherited = name not in vars(owner)
        setattr(owner, name, waits)
        self.stack.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, original)))


def _by_torch(error):
    """True if torch's own sync debug mode raised the error."""
    by_safeops = isinstance(error, SynchronizationError)
    return isinstance(error, RuntimeError) and not by_safeops and "called a synchronizing CUDA operation" in str(error)


# _WAITS: calls that wait on purpose. _CPU_READS: reads of CPU tensors that dispatch no op.
_WAITS = (
    (torch.accelerator, "synchronize"),
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
)
_CPU_READS = tuple((torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__repr__"))
