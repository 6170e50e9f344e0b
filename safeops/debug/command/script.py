"""`safeops trace SCRIPT` and `safeops audit SCRIPT`: run a script, unmodified, under the tool, and print its report.

If nothing is found, the script's `sys.exit(n)` gives the exit code n. Under torchrun all ranks give one report.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import runpy
import sys
import time
import tokenize
import traceback

import torch
import torch.distributed as dist

from safeops.core import PACKAGE
from safeops.debug.audit.audit import audit
from safeops.debug.command.children import follow, run_torchrun
from safeops.debug.common.advice import SCALED, STUCK, of_error
from safeops.debug.errors.locate_errors import LocatedError, locate_errors
from safeops.debug.trace.report import NonFiniteError
from safeops.debug.trace.trace import trace

FOUND, CANNOT_RUN, CRASHED = 1, 2, 3
PROGRESS = 30  # seconds between two progress lines of a run with --html
_HERE = os.path.join(PACKAGE, "debug", "")
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
# Files whose frames a printed traceback omits: the runner, the tools, and torch's calls into their modes.
_TOOLS = (
    _HERE,
    os.path.join(PACKAGE, "safe", ""),
    "<frozen runpy",
    *(f"{_TORCH}{name}" for name in ("_compile.py", f"_dynamo{os.sep}", "_ops.py", "overrides.py")),
)
_IMPORTLIB = importlib.util.__file__  # (which is frozen from Python 3.11 on)
_CODES = (
    "Exit code: 0 nothing found, 1 something found (whatever else happened), 2 the script could not be run (no such "
    "file or module, it does not parse), 3 the script ended with an exception of its own; else the script's own."
)


def add_parser(commands):
    """The `trace` and `audit` subcommands."""
    for tool, what in (
        ("trace", "run a script and name the op, module and line of its first NaN or inf"),
        ("audit", "run a script and list the unsafe patterns as they happen"),
    ):
        parser = commands.add_parser(tool, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=_CODES)
        if tool == "trace":
            parser.add_argument("--last", type=int, default=12, help="ops before it to show (default: 12)")
            what = "a page of the largest, underflowing and non-finite values by module and step, to look at"
            parser.add_argument("--html", metavar="FILE", help=what)
            what = "at an error, name the op that caused it, as safeops.debug.locate_errors does"
            parser.add_argument("--locate", action="store_true", help=what)
        else:
            parser.add_argument("--select", help=f"comma-separated codes, of: {', '.join(audit.CODES)}")
            what = "exit 1 also where nothing but waits for a device and copies were found"
            parser.add_argument("--strict", action="store_true", help=what)
        what = "SCRIPT is a module's name, as for python -m"
        parser.add_argument("-m", dest="module", action="store_true", help=what)
        parser.add_argument("script", metavar="SCRIPT", help="a Python file, run as it is")
        parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="for the script")


def run(arguments):
    """Run the script under the tool; return the exit code."""
    tool, script, html = arguments.command, arguments.script, getattr(arguments, "html", None)
    options = {"last": arguments.last} if tool == "trace" else {"select": arguments.select}
    try:
        watcher = _watcher(tool, **options, html=html)
        watcher._told = _progress() if html else None
    except (ValueError, OSError) as error:
        print(f"safeops {error}", file=sys.stderr)
        return CANNOT_RUN
    if problem := None if arguments.module else problem_of(script):
        print(f"safeops {tool}: {problem}", file=sys.stderr)
        return CANNOT_RUN

    make = functools.partial(_watcher, tool, **options)
    show = functools.partial(_print_of_child, getattr(arguments, "strict", False))
    children_found = False

    def watched():
        nonlocal children_found
        with _before_the_end(watcher), follow(watcher, make, show) as found, watcher, _locating(arguments):
            try:
                run_main(arguments)
            finally:
                children_found = found()

    if arguments.module and script in ("torch.distributed.run", "torch.distributed.launcher.run"):
        chosen = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        strict = ["--strict"] * getattr(arguments, "strict", False) + ["--locate"] * getattr(arguments, "locate", False)
        code, crashed = execute(tool, script, [], lambda: run_torchrun([tool, *chosen, *strict], arguments.arguments))
        return FOUND if crashed else code
    hint = "; safeops trace --locate tells more of it"
    code, crashed = execute(tool, script, arguments.arguments, watched, hint)
    if crashed and code:
        return code
    if tool == "trace":
        result = _print_trace(watcher, crashed or children_found)
        if html:
            print(f"safeops trace: {html} shows the range of the numbers, by module and step")
    else:
        result = _print_audit(watcher, crashed or children_found, arguments.strict)
    sys.stdout.flush()
    return FOUND if result or children_found else CRASHED if crashed else code


def run_main(arguments):
    """Run the script, or the module, as `__main__`."""
    if arguments.module:
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments.script, run_name="__main__")


def _watcher(tool, last=None, select=None, html=None):
    """Make the tool (a trace or an audit), for this process or for one that the script starts."""
    if tool == "trace":
        watcher = trace(last=last, html=html)
        watcher._announces = False  # this command prints the report
    else:
        watcher = audit(select if select is None else [code.strip() for code in select.split(",")])
    watcher._everyone = True  # under torchrun, one report of all ranks
    return watcher


def _print_of_child(strict, watcher, name):
    """Print the findings of a process that the script started. Returns True if they make the exit code 1."""
    found = watcher.reports or watcher.overflows if isinstance(watcher, trace) else watcher.findings
    if found:
        print(f"in {name}:")
    return _print_trace(watcher, True) if isinstance(watcher, trace) else _print_audit(watcher, True, strict)


def execute(tool, script, arguments, run, hint=""):
    """Call `run()` as Python would run the script, and print the exception that ends it. Returns (exit code, crashed); a
    module that could not begin gives (CANNOT_RUN, True).

    hint: text to add to the message about a RuntimeError that is no LocatedError."""
    with _as_main(script, arguments):
        try:
            run()
        except NonFiniteError:
            pass  # the caller prints the report
        except SystemExit as end:
            return _exit_code(end), False
        except KeyboardInterrupt:
            print(f"safeops {tool}: interrupted", file=sys.stderr)
            return 130, False
        except BaseException as error:
            if problem := _problem_of_module(script, error):
                print(f"safeops {tool}: {problem}", file=sys.stderr)
                return CANNOT_RUN, True
            _print_traceback(error)
            located = isinstance(error, LocatedError) or not isinstance(error, RuntimeError)
            print(f"safeops {tool}: {script} ended with the exception above{'' if located else hint}", file=sys.stderr)
            if (instead := of_error(error)) and "\n  instead: " not in str(error):
                print(f"safeops {tool}: instead: {instead}", file=sys.stderr)
            return 0, True
    return 0, False


@contextlib.contextmanager
def _before_the_end(watcher):
    """Merge the ranks' audits before the script destroys the process group that the merge needs."""
    if not dist.is_available() or isinstance(watcher, trace):  # (a trace merges at each step)
        yield
        return
    destroy = dist.destroy_process_group

    def meet(group=None):
        if group in (None, dist.group.WORLD):
            watcher._put_together()
        destroy(group)

    dist.destroy_process_group = meet
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def _progress():
    """Return a function that is called with each step's number and prints it, at most every PROGRESS seconds."""
    begin = last = time.monotonic()

    def progress(step):
        nonlocal last
        if (now := time.monotonic()) - last >= PROGRESS:
            last = now
            print(f"safeops trace: step {step} after {now - begin:.0f} s", file=sys.stderr, flush=True)

    return progress


def _locating(arguments):
    return locate_errors() if getattr(arguments, "locate", False) else contextlib.nullcontext()


def problem_of(script):
    """Return why the script cannot be run, or None."""
    if not os.path.exists(script):
        return f"no such file: {script}"
    if os.path.isdir(script):
        return f"{script} is a folder, not a script"
    if script.endswith(".ipynb"):
        return f"{script} is a notebook: export it first (jupyter nbconvert --to script {script})"
    try:
        with tokenize.open(script) as file:  # in the encoding that the file declares
            compile(file.read(), script, "exec", dont_inherit=True)
    except SyntaxError as error:  # also a declared encoding that does not exist
        return f"{script} does not parse: {error}"
    except (UnicodeDecodeError, ValueError) as error:
        return f"{script} cannot be read as Python source: {error}"
    except OSError as error:
        return f"{script} cannot be read: {error}"
    return None


def _problem_of_module(name, error):
    """Why a module could not be run, or None where its code, or that of its package, has begun."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, (ImportError, SyntaxError)) or not all(map(_is_a_tools_or_imports, frames)):
        return None
    return f"{name} does not parse: {error}" if isinstance(error, SyntaxError) else str(error)


@contextlib.contextmanager
def _as_main(script, arguments):
    """sys.argv and sys.path as `python SCRIPT ...` would have them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _exit_code(end):
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _print_traceback(error):
    """Print the traceback as Python does, without the frames of the runner and the tools."""
    report = traceback.TracebackException.from_exception(error)
    shown = report
    while shown is not None:
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not _is_a_tools(f)])
        shown = shown.__cause__ or shown.__context__
    print("".join(report.format()), end="", file=sys.stderr)


def _is_a_tools(frame):
    name, asks_the_mode = frame.filename, (frame.line or "").startswith("return handle_torch_function(")
    return name.startswith(_TOOLS) or name.endswith(f"{os.sep}runpy.py") or asks_the_mode


def _is_a_tools_or_imports(frame):
    return _is_a_tools(frame) or frame.filename.startswith("<frozen importlib") or frame.filename == _IMPORTLIB


def _print_trace(tracer, crashed):
    for report in tracer.reports:
        if report.rank in (None, tracer._rank):
            print(f"safeops trace: {report}")
    stuck = len(tracer.overflows) == tracer.steps > 2  # every step overflowed, though each halved GradScaler's scale
    if tracer.overflows:
        first = tracer.overflows[0]
        if stuck and first.instead == SCALED:
            first = dataclasses.replace(first, instead=STUCK)
        steps = ", ".join(str(report.step) for report in tracer.overflows[:8])
        more = ", ..." if len(tracer.overflows) > 8 else ""
        print(
            f"safeops trace: in {len(tracer.overflows)} of {tracer.steps} steps ({steps}{more}) a scaled gradient "
            f"overflowed and GradScaler skipped the step: "
            + ("no weight has moved in this run" if stuck else "no bug while it stays rare")
            + f". The first:\n{first}"
        )
    if not (tracer.reports or crashed or stuck or tracer._rank):
        steps = f"{tracer.steps} step{'s' * (tracer.steps != 1)}"
        no = "GradScaler handled this; no other" if tracer.overflows else "no"
        print(f"safeops trace: {no} NaN or inf reached a loss or a gradient in {steps}")
    return bool(tracer.reports) or stuck


def _print_audit(auditor, crashed, strict):
    if (auditor.findings or not crashed) and auditor.told_by == auditor._rank:
        print(f"safeops {auditor}")
    return any(strict or not finding.waits for finding in auditor.findings)
