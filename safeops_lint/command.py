"""The command `safeops lint`: its arguments and exit codes. libcst is imported only when the command runs."""

import argparse
import importlib.util
import os
import signal
import sys

FORMATS = ("text", "json", "github", "sarif")
EXIT_CLEAN, EXIT_FINDINGS, EXIT_TROUBLE = 0, 1, 2


HELP = "find what breaks losses under mixed precision, and rewrite what can be rewritten"
EPILOG = (
    "Exit codes: 0 no findings; 1 findings (with --fix: findings left); 2 bad arguments, or a file that could not be "
    "linted (the others still are). `# noqa: SO101` silences a line, [tool.safeops.lint] configures."
)


def main(argv=None, prog="safeops-lint"):
    """Run `safeops lint`, `safeops-lint` or `python -m safeops_lint`, without torch. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=HELP, epilog=EPILOG)
    return piped(run, _options(parser).parse_args(argv))


def piped(run, arguments):
    """Returns the exit code of run(arguments). Prints no traceback if the reader of its output closes the pipe."""
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as by `| head`; what Python still writes at exit goes to devnull
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def add_parser(commands):
    """Add the subcommand `lint` to the parser of `safeops`. Its parsed arguments have `.run`, the function to call."""
    _options(commands.add_parser("lint", help=HELP, epilog=EPILOG))


def _options(lint):
    lint.add_argument("paths", nargs="+", metavar="PATH", help="files, notebooks and folders")
    mode = lint.add_mutually_exclusive_group()
    mode.add_argument(
        "--fix", action="store_const", dest="mode", const="fix", default="check", help="rewrite the files"
    )
    mode.add_argument("--diff", action="store_const", dest="mode", const="diff", help="show what --fix would write")
    lint.add_argument(
        "--select",
        type=_codes,
        default=(),
        metavar="CODES",
        help="rules: SO101,SO2 or ALL, and what is but possible (default: what is likely)",
    )
    lint.add_argument("--ignore", type=_codes, default=(), metavar="CODES", help="rules to leave out")
    lint.add_argument("--format", choices=FORMATS, default="text", help="of the report (default: text)")
    lint.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one per core)")
    lint.set_defaults(run=run)
    return lint


def _codes(text):
    codes = tuple(code.strip().upper() for code in text.split(",") if code.strip())
    if not codes:
        raise argparse.ArgumentTypeError(f"no codes in {text!r}")
    return codes


def run(arguments):
    """Lint what the parsed arguments say, print the report, and return the exit code."""
    try:
        missing = importlib.util.find_spec("libcst") is None
    except ValueError:  # sys.modules["libcst"] is None
        missing = True
    if missing:
        print("safeops lint needs libcst: pip install libcst", file=sys.stderr)
        return EXIT_TROUBLE
    from safeops_lint import output
    from safeops_lint.config import BadConfig
    from safeops_lint.rules import unknown
    from safeops_lint.run import Options, lint_paths

    for option in ("select", "ignore"):
        wrong = unknown(getattr(arguments, option))
        if wrong:
            print(f"safeops lint: --{option}: no rule has the code {wrong[0]!r}", file=sys.stderr)
            return EXIT_TROUBLE
    if arguments.jobs < 0:
        print(f"safeops lint: --jobs must be at least 0, got {arguments.jobs}", file=sys.stderr)
        return EXIT_TROUBLE
    options = Options(arguments.select, arguments.ignore, arguments.mode, arguments.jobs)
    try:
        outcome = lint_paths(arguments.paths, options)
    except BadConfig as error:
        print(f"safeops lint: {error}", file=sys.stderr)
        return EXIT_TROUBLE
    write = output.diff if arguments.mode == "diff" else output.FORMATS[arguments.format]
    report = write(outcome).rstrip("\n")
    if report:
        print(report)
    if arguments.mode == "diff":
        for line in output.text(type(outcome)(problems=outcome.problems)).splitlines():
            print(line, file=sys.stderr)
    if arguments.format == "text":
        print(output.summary(outcome, arguments.mode), file=sys.stderr)
    return EXIT_TROUBLE if outcome.problems else EXIT_FINDINGS if outcome.findings else EXIT_CLEAN
