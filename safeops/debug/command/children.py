"""Watch the processes that a watched script starts. A child with findings leaves a file named by its process id.

`process.run` is replaced by a wrapper: a spawned child gets it pickled, a forked child inherits it. torchrun starts
its workers by command line, so there the tool is added to the command line.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.process import BaseProcess

from safeops.debug.trace.report import NonFiniteError

_watching = None  # the tool of this process; a forked child inherits it


class _Watched:
    """A process's `run` under the tool that `make()` returns. `show(tool, name)` prints the tool's findings."""

    def __init__(self, run, make, show, folder):
        self.run, self.make, self.show, self.folder = run, make, show, folder

    def __call__(self):
        watcher = _watching
        if watcher is None:
            watcher = self.make()
            watcher.__enter__()
        else:  # the parent reports what it found before the fork
            watcher._restart()
        try:
            with follow(watcher, self.make, self.show, self.folder):
                self.run()
        finally:
            try:
                watcher.__exit__(*sys.exc_info())
            except NonFiniteError:  # `show` prints the report
                sys.exit(1)
            finally:
                if self.show(watcher, multiprocessing.current_process().name):
                    open(os.path.join(self.folder, str(os.getpid())), "w").close()
                sys.stdout.flush()


@contextlib.contextmanager
def follow(watcher, make, show, folder=None):
    """Watch the processes started inside. Yields a function that returns True if any of them has findings."""
    global _watching
    start, before = BaseProcess.start, _watching

    def watched(process):
        target = getattr(process._target, "__module__", None) or ""
        if not target.startswith("torch.utils.data."):  # DataLoader workers: their data may hold NaN on purpose
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
    """Run `python -m torch.distributed.run ARGUMENTS` with workers that run `safeops OPTIONS SCRIPT ...`."""
    from torch.distributed import run

    parsed = run.get_args_parser().parse_args(arguments)
    options = [*options, *["-m"] * parsed.module, parsed.training_script]
    parsed.training_script, parsed.module = "safeops", True
    parsed.training_script_args = [*options, *parsed.training_script_args]
    run.run(parsed)
