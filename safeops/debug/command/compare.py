"""`safeops sketch FILE SCRIPT` writes the sketches of a script's step; `safeops compare A B` compares two files."""

import argparse
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from safeops.debug.command.script import CANNOT_RUN, FOUND, execute, problem_of, run_main
from safeops.debug.compare import page, run
from safeops.debug.compare.capture import Capture
from safeops.debug.compare.comparison import Comparison


def add_parser(commands):
    """The `compare` and `sketch` subcommands."""
    what = "name the first module in which two runs of a step differ by more than rounding explains"
    codes = "Exit code: 0 no difference beyond rounding, 1 a difference, 2 a file cannot be read or compared."
    parser = commands.add_parser("compare", help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=codes)
    parser.add_argument("a", metavar="A", help="a file that safeops sketch or safeops.debug.sketch wrote")
    parser.add_argument("b", metavar="B", help="another, of the same step in another setting")
    parser.add_argument("--html", metavar="FILE", help="a page: the curves of both, the first difference marked")
    parser.add_argument("--slack", type=float, default=1.0, metavar="X", help="a factor on all budgets (default: 1)")

    what = "run a script up to a step of its optimizer, and write that step's sketches for safeops compare"
    codes = "Exit code: 0 the file was written, 2 the script could not be run or had no such step, 3 it raised."
    parser = commands.add_parser("sketch", help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=codes)
    parser.add_argument("--step", type=int, default=1, metavar="N", help="which optimizer.step() ends it (default: 1)")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("file", metavar="FILE", help="the file to write")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, run as it is until that step")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="for the script")


def run_compare(arguments):
    """Print the comparison of two files; return the exit code."""
    try:
        html = arguments.html and run.path_to_write("compare", arguments.html, "--html")
        if not arguments.slack > 0:
            raise ValueError(f"compare: --slack must be positive, got {arguments.slack}")
        a, b = run.read(arguments.a), run.read(arguments.b)
        comparison = Comparison(a, b, arguments.slack)
        comparison.require_common()
        if html:
            page.write(html, comparison)
    except (OSError, ValueError) as error:
        print(f"safeops {error}", file=sys.stderr)
        return CANNOT_RUN
    print(comparison)
    return 0 if comparison.equal else FOUND


class _Enough(BaseException):
    """Ends the script when its step is written. No `except Exception` stops it."""


def run_sketch(arguments):
    """Run the script up to its step and write the file; return the exit code."""
    problem = None if arguments.module else problem_of(arguments.script)
    try:
        file = run.path_to_write("sketch", arguments.file)
        if arguments.step < 1:
            problem = f"--step must be at least 1, got {arguments.step}"
    except (OSError, ValueError) as error:
        problem = str(error).partition(": ")[2]
    if problem:
        print(f"safeops sketch: {problem}", file=sys.stderr)
        return CANNOT_RUN
    step = _Step(arguments.step, file)

    def watched():
        try:
            with step:
                run_main(arguments)
        except _Enough:
            pass

    code, crashed = execute("sketch", arguments.script, arguments.arguments, watched)
    if step.written is None:
        if not crashed:
            print(f"safeops sketch: {step.problem()}", file=sys.stderr)
            return CANNOT_RUN
        return code or 3
    print(f"safeops sketch: {step.written}")
    return 0


class _Step:
    """Captures the script's step: what runs between the ends of two calls of an optimizer, up to its reading."""

    def __init__(self, number, file):
        self.number, self.file = number, file
        self.steps, self.capture, self.written, self.result = 0, None, None, None

    def __enter__(self):
        if self.number == 1:
            self.capture = Capture().start()
        self.hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._behind_update),
        ]

    def __exit__(self, kind, error, traceback):
        for hook in self.hooks:
            hook.remove()
        if self.capture is not None and self.written is None:
            self.capture.stop()
            # A script without an optimizer is one step, if it came to its end.
            if self.steps == 0 and (kind is None or kind is SystemExit) and self.capture.entries:
                self._write("the whole script, which calls no optimizer")

    def _before_update(self, optimizer, args, kwargs):
        if self.steps + 1 == self.number and self.written is None:
            # The capture's own hook, which was registered before this one, has read the gradients.
            self.capture.stop()
            self._write(f"step {self.number}")
            raise _Enough

    def _behind_update(self, optimizer, args, kwargs):
        self.steps += 1
        if self.steps + 1 == self.number:
            self.capture = Capture().start()

    def _write(self, what):
        result = run.run_of(self.capture, self.file)
        if result.entries:
            if self.capture.rank == 0:
                run.write(self.file, result)
            self.written = f"{self.file}: {len(result.entries)} tensors of {what}"

    def problem(self):
        if self.capture is not None and not self.capture.entries:
            return "no module was called, so there is nothing to write"
        return f"the script ended after {self.steps} optimizer steps, before step {self.number}"
