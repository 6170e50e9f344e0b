"""Write a file of a step's sketches."""

import os
from typing import Any

import torch

from safeops.debug.compare import run
from safeops.debug.compare.capture import Capture
from safeops.debug.compare.names import model_of


class sketch:
    """Write what the modules of a step return, and their gradients, as a few numbers each, for `safeops compare`.

    with safeops.debug.sketch(model, "a.json"):
        loss = train_step(model, batch)  # forward, backward, and the optimizer's step if there is one

    Run it in two settings with the same weights, batch and seeds, with a file for each; then `safeops compare a.json
    b.json` names the first module in which they differ. See docs/compare.md.

    Kept of each tensor: its shape and dtype, norm, largest magnitude and mean, a random projection to 64 numbers, and
    the counts of NaN, inf and zeros: 2 KB. Outputs and their gradients come from hooks, the parameters' gradients are
    those that the first optimizer's step reads, or those that are there at the end. A recomputation in backward
    (checkpointing) is no call of its own.

    Args:
        model: the module that the step trains; also as DistributedDataParallel, FSDP or torch.compile wrap it: names
            are those without the wrapper. None: every module that is called, with its outermost module's class first.
        file: path of the file, written when the context ends without an exception. On several ranks the first of them
            writes one file for all; each must end its context.
        probes: compiled functions are compiled once more inside, with the sketches in their graph; False leaves their
            code as it is, and keeps only what comes out of each compiled module.
        scaler: the torch.amp.GradScaler in use: gradients are divided by its scale.

    Raises:
        TypeError: `model` is no module, or `file` no path.
        FileNotFoundError, IsADirectoryError: the file cannot be written.
        RuntimeError: no module was called inside.

    Example:
        >>> import os, tempfile
        >>> file = os.path.join(tempfile.mkdtemp(), "a.json")
        >>> model = torch.nn.Linear(3, 2)
        >>> with safeops.debug.sketch(model, file):
        ...     model(torch.ones(4, 3)).sum().backward()
        >>> os.path.getsize(file) < 10_000
        True
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        file: str | os.PathLike,
        *,
        probes: bool = True,
        scaler: Any = None,
    ):
        if model is not None and model_of(model) is None:
            raise TypeError(f"sketch: model must be a torch.nn.Module or None, got {type(model).__name__}")
        self._file = run.path_to_write("sketch", file)
        self._capture = Capture(model, probes, scaler)

    def __enter__(self) -> "sketch":
        if self._capture.running or self._capture.entries:
            raise RuntimeError("sketch: this sketch was used already; make another")
        self._capture.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._capture.stop()
        if kind is not None:
            return
        result = run.run_of(self._capture, os.path.basename(self._file))
        if not result.entries:
            raise RuntimeError("sketch: no module was called inside, so there is nothing to write")
        if self._capture.rank == 0:
            run.write(self._file, result)
