"""`safeops run SCRIPT`: run a script, unmodified, in safe mode, and print at its end what was replaced. With `--record`
it runs as it is, under the flight recorder."""

import argparse
import sys

from safeops.debug.command import record
from safeops.debug.command.script import CANNOT_RUN, execute, problem_of, run_main
from safeops.safe.mode import enter_process


def add_parser(commands):
    """The `run` subcommand."""
    what = "run a script in safe mode: torch's losses, softmax, norms and half sums call their twins; or record it"
    epilog = (
        "Exit code: the script's own, 1 after an exception, 2 if it cannot be run. With --record that of safeops "
        "trace: 1 something found, 3 the script ended with an exception of its own."
    )
    parser = commands.add_parser("run", help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=epilog)
    record.add_options(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, run as it is")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="for the script")


def run(arguments):
    """Run the script; return its exit code. The report is printed when the process ends."""
    script = arguments.script
    if arguments.record:
        return record.run(arguments)
    if chosen := [name for name in record.OPTIONS if getattr(arguments, name) is not None]:
        print(f"safeops run: --{chosen[0].replace('_', '-')} is an option of --record", file=sys.stderr)
        return CANNOT_RUN
    if problem := None if arguments.module else problem_of(script):
        print(f"safeops run: {problem}", file=sys.stderr)
        return CANNOT_RUN
    enter_process()
    code, crashed = execute("run", script, arguments.arguments, lambda: run_main(arguments))
    sys.stdout.flush()
    return code or int(crashed)
