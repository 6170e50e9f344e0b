"""The processes that a watched script starts: each is watched as the script is, and leaves a file if it found any.

A process is followed by its `run`, which is pickled to a child that is spawned and is there in one that is forked.
torchrun starts its workers by command lines: to these the tool is added.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.process import BaseProcess

from safeops.debug.trace.report import NonFiniteError

_watching = None  # the tool of this process, which a forked child has inherited


class _Watched:
    """The `run` of a process, under the tool that `make()` makes; `show(tool, name)` prints what it found."""

    def __init__(self, run, make, show, folder):
        self.run, self.make, self.show, self.folder = run, make, show, folder

    def __call__(self):
        watcher = _watching
        if watcher is None:
            watcher = self.make()
            watcher.__enter__()
        else:  # what the parent found before the fork is the parent's to tell
            watcher._restart()
        try:
            with follow(watcher, self.make, self.show, self.folder):
                self.run()
        finally:
            try:
                watcher.__exit__(*sys.exc_info())
            except NonFiniteError:  # the report says it
                sys.exit(1)
            finally:
                if self.show(watcher, multiprocessing.current_process().name):
                    open(os.path.join(self.folder, str(os.getpid())), "w").close()
                sys.stdout.flush()


@contextlib.contextmanager
def follow(watcher, make, show, folder=None):
    """Watch the processes that are started inside. Gives a function: whether one of them has found something."""
    global _watching
    start, before = BaseProcess.start, _watching

    def watched(process):
        target = getattr(process._target, "__module__", None) or ""
        if not target.startswith("torch.utils.data."):  # a loader's workers make data, which may well hold NaN
            process.run = _Watched(process.run, make, show, folder)
        start(process)

    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="safeops-"))
        BaseProcess.start, _watching = watched, watcher
        try:
            yield lambda: bool(os.listdir(folder))
        finally:
            BaseProcess.start, _watching = start, before


def run_torchrun(options, arguments):
    """`python -m torch.distributed.run` with its arguments, whose workers run under the tool: the words `options`."""
    from torch.distributed import run

    parsed = run.get_args_parser().parse_args(arguments)
    options = [*options, *["-m"] * parsed.module, parsed.training_script]
    parsed.training_script, parsed.module = "safeops", True
    parsed.training_script_args = [*options, *parsed.training_script_args]
    run.run(parsed)
