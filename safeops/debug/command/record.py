"""`safeops run --record SCRIPT`: run a script, unmodified, with the flight recorder on, and print its findings.

Exit codes are those of `safeops trace SCRIPT`. Under torchrun each rank records itself, and one tells the finding.
"""

import functools
import multiprocessing
import sys

from safeops.debug.command.children import follow, run_torchrun
from safeops.debug.command.script import CANNOT_RUN, CRASHED, FOUND, execute, problem_of, run_main
from safeops.debug.recorder.unedited import Unedited

OPTIONS = ("folder", "action", "steps", "save_weights")


def add_options(parser):
    """The options of `--record`."""
    what = "run it as it is, with the flight recorder: a step that is not finite is kept from the weights and replayed"
    group = parser.add_argument_group("the flight recorder")
    group.add_argument("--record", action="store_true", help=what)
    group.add_argument("--folder", help="where the steps that are not finite are written (default: flight)")
    what = "at a finding, end the script (raise, the default) or go on without the step (warn)"
    group.add_argument("--action", choices=("raise", "warn"), help=what)
    group.add_argument("--steps", type=_positive, help="how many steps are kept (default: 2)")
    group.add_argument("--save-weights", action="store_true", default=None, help="write the weights of the step, too")


def run(arguments):
    """Run the script under the recorder; return the exit code."""
    script = arguments.script
    options = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
    if problem := None if arguments.module else problem_of(script):
        print(f"safeops run: {problem}", file=sys.stderr)
        return CANNOT_RUN
    if arguments.module and script in ("torch.distributed.run", "torch.distributed.launcher.run"):
        words = ["run", "--record", *(word for name, value in options.items() for word in _words(name, value))]
        code, crashed = execute("run", script, [], lambda: run_torchrun(words, arguments.arguments))
        return FOUND if crashed else code
    try:
        watcher = _watcher(options)
    except OSError as error:
        print(f"safeops run: {error}", file=sys.stderr)
        return CANNOT_RUN
    children_found = False

    def watched():
        nonlocal children_found
        with follow(watcher, functools.partial(_watcher, options), _print_of_child) as found, watcher:
            try:
                run_main(arguments)
            finally:
                children_found = found()

    code, crashed = execute("run", script, arguments.arguments, watched)
    if crashed and code:
        return code
    result = _print(watcher, crashed or children_found)
    sys.stdout.flush()
    return FOUND if result or children_found else CRASHED if crashed else code


def _watcher(options):
    return Unedited(_tell, **options)


def _words(name, value):
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]


def _tell(report):
    if not report.is_elsewhere:
        print(f"safeops run: {report}", flush=True)


def _print_of_child(watcher, name):
    """Print a line about a process that the script started. Returns True if it had findings."""
    return _print(watcher, True, f" in {name}" if name != multiprocessing.current_process().name else "")


def _print(watcher, crashed, where=""):
    """Print what the recording came to; the findings were printed as they came. Returns True if there are any."""
    steps = f"{watcher.steps} step{'s' * (watcher.steps != 1)}{where}"
    elsewhere = watcher.reports and all(report.is_elsewhere for report in watcher.reports)
    if watcher.found and not elsewhere:
        print(f"safeops run: {watcher.found} of {steps} not finite, kept from the weights")
    elif not (watcher.found or crashed):
        scaled = watcher.overflows
        no = f"GradScaler handled {scaled} overflow{'s' * (scaled != 1)}; no other" if scaled else "no"
        print(f"safeops run: {no} NaN or inf reached a loss or a gradient in {steps}")
    for note in watcher.notes if not crashed or watcher.found else ():
        print(f"safeops run: {note}")
    return bool(watcher.found)


def _positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number
