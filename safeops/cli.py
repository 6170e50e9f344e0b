"""The `safeops` command: demo, doctor, verify, lint, trace, audit, compare, sketch, replay, run. It needs torch; demo
needs more."""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys

import torch

import safeops
from safeops.core import availability, failures, library
from safeops.core.op import registry
from safeops.debug.command import compare, replay, script
from safeops.safe import command as safe
from safeops.verify import command as verify
from safeops_lint import command as lint

ISA = ("baseline", "AVX2", "AVX-512")  # index: what _C.cpu_isa() returns


def main(argv=None):
    """Run the command; return its exit code (argparse exits 2 by itself on an unknown command or option)."""
    return lint.piped(_run, argv)


def _run(argv):
    parser = _parser()
    argv, of_script = replay.divided(sys.argv[1:] if argv is None else list(argv))
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # report them with the subcommand's usage, unlike parse_args
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command == "doctor":
        return doctor(arguments.json)
    if arguments.command in ("trace", "audit"):
        return script.run(arguments)
    if arguments.command == "compare":
        return compare.run_compare(arguments)
    if arguments.command == "sketch":
        return compare.run_sketch(arguments)
    if arguments.command == "replay":
        return replay.run(arguments, of_script)
    if arguments.command == "run":
        return safe.run(arguments)
    if arguments.command == "verify":
        return verify.run(arguments)
    if arguments.command == "lint":
        return lint.run(arguments)
    from safeops.demo.run import main as demo

    return demo(steps=arguments.steps, seed=arguments.seed, device=arguments.device, out=arguments.out)


def _parser():
    parser = argparse.ArgumentParser(
        prog="safeops", description="Loss building blocks for PyTorch that stay correct under mixed precision."
    )
    parser.add_argument("--version", action="version", version=f"safeops {safeops.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    demo = commands.add_parser("demo", help="an AMP training run with the usual losses and with safeops")
    demo.add_argument("--steps", type=_positive, default=40, help="training steps of a complete run (default: 40)")
    demo.add_argument("--seed", type=int, default=0, help="of the network's weights (default: 0)")
    demo.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    demo.add_argument("--out", default="safeops-demo.png", help="the picture (default: safeops-demo.png)")

    doctor = commands.add_parser("doctor", help="versions, extensions, devices, and the route of every op")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")

    verify.add_parser(commands)
    script.add_parser(commands)
    compare.add_parser(commands)
    replay.add_parser(commands)
    safe.add_parser(commands)
    lint.add_parser(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


# ---- doctor


def doctor(as_json=False):
    report = examine()
    print(json.dumps(report, indent=2) if as_json else _text(report))
    return 0


def examine():
    """The report of `safeops doctor`, as plain data."""
    return {
        "versions": {
            "safeops": safeops.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        },
        "platform": platform.platform(),
        "cpu": {
            "kernels": _cpu_kernels(),
            "threads": torch.get_num_threads(),
        },
        "extensions": {
            "_C": "loaded" if library.cpu_extension else "not built",
            "_cuda": "loaded" if library.cuda_extension else "not built",
        },
        "devices": ["cpu", *_cuda_devices()],
        "kernels": availability.mode(),
        "failures": {"path": str(failures.path()), "recorded": len(failures.read())},
        "ops": sorted(map(_op, registry.values()), key=lambda op: op["name"]),
    }


def _cpu_kernels():
    if library.cpu_extension is None:
        return None
    try:
        return ISA[library.cpu_extension.cpu_isa()]
    except ValueError as error:  # every op raises it; the doctor goes on with its report
        message = str(error).splitlines()[0]
        return f"none can run: {message[message.find('SAFEOPS_CPU_ISA') :]}"


def _cuda_devices():
    names = []
    for i in range(_cuda_count()):
        name, (major, minor) = availability.gpu(i)
        names.append(f"cuda:{i} {name} (sm_{major}{minor})")
    return names


def _cuda_count():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _op(op):
    return {
        "name": getattr(op, "user", None) or op.name,
        "cpu": _route(op.cpu),
        "cuda_kernel": op.owner if availability.has_kernels(op) else None,
        "parts": [part.name for part in op.parts if part.raw and part.name != op.name],
        "devices": {f"cuda:{i}": _on_cuda(op, i) for i in range(_cuda_count())},
    }


def _on_cuda(op, index):
    """The route on a device, and the reason. An op that only calls other ops has no route of its own."""
    if not op.owner:
        return {"route": "its parts'", "reason": ""}
    result = availability.availability(op, index)
    return {"route": _route(result.kernel), "reason": result.reason}


def _route(kernel):
    return "kernel" if kernel else "composite"


def _text(report):
    triton = report["versions"]["triton"] or "not installed"
    lines = [
        ("safeops", report["versions"]["safeops"]),
        ("Python", report["versions"]["python"]),
        ("torch", report["versions"]["torch"]),
        ("Triton", triton),
        ("platform", report["platform"]),
        ("CPU kernels", f"{report['cpu']['kernels'] or 'none'}, {report['cpu']['threads']} threads"),
        ("C++ extension", report["extensions"]["_C"] + _hint(report["extensions"]["_C"])),
        ("CUDA extension", report["extensions"]["_cuda"]),
        ("devices", ", ".join(report["devices"])),
        ("kernels", f"{availability.VARIABLE}={report['kernels']}"),
        ("failures", "{recorded} recorded in {path}".format(**report["failures"])),
    ]
    devices = report["ops"][0]["devices"]
    rows = [("op", "on CPU", "CUDA kernel", *(f"on {device}" for device in devices))]
    for op in report["ops"]:
        cuda = op["cuda_kernel"] or ("its parts'" if op["parts"] else "none")
        rows.append((op["name"], op["cpu"], cuda, *map(_told, op["devices"].values())))
    text = "\n".join(f"{name:<16}{value}" for name, value in lines)
    return f"{text}\n\n{_columns(rows)}"


def _told(entry):
    return f"{entry['route']} ({entry['reason']})" if entry["reason"] else entry["route"]


def _hint(state):
    return " (every op takes the composite: correct, slower)" if state == "not built" else ""


def _columns(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
