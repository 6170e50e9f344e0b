"""`safeops replay FOLDER --script SCRIPT`: a step that the recorder kept, once more, on this machine."""

import runpy
import sys
import tempfile

import torch

from safeops.debug.command.script import CANNOT_RUN, CRASHED, FOUND, execute, problem_of
from safeops.debug.recorder.body import Call
from safeops.debug.recorder.elsewhere import Replayed, Unfit, here, read
from safeops.debug.recorder.recorder import recorder

DTYPES = ("float64", "float32", "bfloat16", "float16")


def add_parser(commands):
    """The `replay` subcommand."""
    what = "run a step that safeops.debug.recorder kept once more, and name the line of its NaN or inf"
    codes = (
        "Exit code: 0 the step is finite here, 1 it is not, 2 it could not be run or is finite with other weights than "
        "its own, 3 the script raised before it."
    )
    parser = commands.add_parser("replay", help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=codes)
    parser.add_argument("folder", metavar="FOLDER", help="flight/step-123, or one rank's in it")
    help_ = "the training's script: it runs until its recorder's first step, which the recorded one replaces"
    parser.add_argument("--script", required=True, help=help_)
    help_ = "instead: a function of the script that returns (model, step); step(batch) runs forward and backward"
    parser.add_argument("--function", metavar="NAME", help=help_)
    parser.add_argument("--device", help="cpu, cuda:1, ...: move the model and the batch there")
    parser.add_argument("--dtype", choices=DTYPES, help="run the model and the batch in it")
    parser.add_argument("arguments", metavar="...", nargs="*", help="for the script; after an option, they follow --")


def divided(argv):
    """The words of a command line, and those after `--` that are for the replayed script. (argparse takes no words for
    it after an option.)"""
    place = argv.index("--") if argv[:1] == ["replay"] and "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def run(arguments, of_script):
    """Replay, print the report, and return the exit code. of_script: the words after `--`."""
    try:
        dtype = arguments.dtype and getattr(torch, arguments.dtype)
        try:
            device = arguments.device and torch.empty(0, device=arguments.device).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
        recorded = read(arguments.folder, device, dtype)
        if problem := problem_of(arguments.script):
            raise ValueError(problem)
        if recorded.step["is_loop"] and not arguments.function:
            raise ValueError(
                "the step was recorded by safeops run --record: a replay needs --function, or a recorder in the script"
            )
    except (OSError, ValueError) as error:
        print(f"safeops replay: {error}", file=sys.stderr)
        return CANNOT_RUN
    result = problem = None

    def replay():
        nonlocal result, problem
        recorder.take_over = recorded
        try:
            if arguments.function:
                _call(recorded, arguments.script, arguments.function)
            else:
                runpy.run_path(arguments.script, run_name="__main__")
        except Replayed as end:
            result = end
        except Unfit as error:
            problem = error
        finally:
            recorder.take_over = None

    code, crashed = execute("replay", arguments.script, [*arguments.arguments, *of_script], replay)
    if result is None:
        if not crashed:
            problem = problem or "the script ended before a step of a recorder began"
            print(f"safeops replay: {problem}", file=sys.stderr)
        return CRASHED if crashed and not code else CANNOT_RUN
    for note in result.notes:
        print(f"safeops replay: note: {note}")
    if result.report is None and not recorded.has_weights:
        step = recorded.about["step"]
        print(f"safeops replay: step {step} is finite with these weights, which says nothing of its own")
        return CANNOT_RUN
    if result.report is None:
        print(f"safeops replay: step {recorded.about['step']} is finite here ({here(recorded)})")
        return 0
    result.report.step = recorded.about["step"]
    print(f"safeops replay: {result.report}")
    return FOUND


def _call(recorded, script, name):
    """Run the step with the function that the script's function `name` returns."""
    names = runpy.run_path(script, run_name="__safeops_replay__")
    if not callable(names.get(name)):
        found = ", ".join(sorted(key for key, x in names.items() if callable(x) and not key.startswith("_")))
        raise Unfit(f"{script} has no function {name}; it has {found or 'none'}")
    try:
        model, step = names[name]()
    except (TypeError, ValueError) as error:
        raise Unfit(f"{name}() must return (model, step): {error}") from None
    batch = recorded.step["batch"]
    args, kwargs = batch if recorded.step["is_call"] else ((batch,), {})
    recorder.take_over = None
    with tempfile.TemporaryDirectory() as folder:
        made = recorder(model, torch.optim.SGD(model.parameters(), 0.0), folder=folder)
        recorded(made, made._slots[0], batch, lambda: Call(step, args, kwargs))
