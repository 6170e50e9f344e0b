"""`safeops demo`: run every variant of the loss, print the record, draw the picture.

Exit codes: 0 every run ended as `losses.VERDICTS` says; 1 one did not; 2 the demo could not start.
"""

import importlib.util
import pathlib
import sys
import time

EXTRAS = {"numpy": "numpy", "skimage": "scikit-image", "matplotlib": "matplotlib", "rich": "rich"}


def main(*, steps=40, seed=0, device=None, out="safeops-demo.png"):
    missing = [package for module, package in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return _refuse(f'needs {", ".join(missing)}: pip install "safeops[demo]"')
    if problem := _unwritable(pathlib.Path(out)):
        return _refuse(f"cannot write --out {out}: {problem}")

    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return _refuse(f"device {device!r} cannot be used: {str(error).splitlines()[0]}")
    from safeops.demo import data

    try:
        pair = data.load(device)
    except FileNotFoundError as error:
        return _refuse(str(error))
    return _run(pair, steps, seed, out)


def _run(pair, steps, seed, out):
    from safeops.demo import losses, picture, screen
    from safeops.demo.training import loss_milliseconds, train

    console, start, runs = screen.make_console(), time.perf_counter(), {}
    height, width = pair.truth.shape[-2:]
    console.print(
        f"Stereo matching on the Middlebury Motorcycle pair, {width} x {height}, "
        f"{100 * (~pair.known).float().mean().item():.1f} % of the disparities unknown (0, as KITTI stores them).\n"
        f"fp16 autocast and GradScaler on {pair.left.device}, {steps} steps, seed {seed}. "
        "One loss, written seven ways: error in pixels + scale-invariant error, measured pixels only."
    )
    with screen.make_progress(console) as progress:
        for number, loss in enumerate(losses.VERDICTS, 1):
            screen.announce(console, number, loss.__name__)
            task = progress.add_task(screen.TITLES[loss.__name__][0], total=steps)

            def on_step(step, task=task):
                screen.print_step(console, step, steps)
                progress.advance(task)

            run = runs[loss] = train(loss, pair, steps=steps, seed=seed, on_step=on_step)
            screen.print_end(console, run)
            progress.remove_task(task)
        by_hand, ours = (runs[f] for f in losses.COMPLETE)
        times = [
            f"{screen.TITLES[f.__name__][0]} {loss_milliseconds(f, ours.prediction, pair.truth):.1f} ms"
            for f in losses.COMPLETE
            if runs[f].exception is None
        ]
    screen.print_table(console, runs.values())
    console.print(f"The loss alone, forward and backward: {', '.join(times)}.")
    usual = [(screen.TITLES[f.__name__][0], screen.verdict(runs[f]), runs[f]) for f in losses.USUAL]
    picture.draw(out, pair, usual, by_hand, ours)
    console.print(f"Picture: {out}   Time: {time.perf_counter() - start:.0f} s")
    surprises = {f: verdict for f, run in runs.items() if (verdict := screen.verdict(run)) != losses.VERDICTS[f]}
    for f, verdict in surprises.items():
        expected = f"expected on any device: {losses.VERDICTS[f]}"
        hint = f" ({steps} steps may be too few)" if f in losses.COMPLETE else ""
        console.print(f"[bold red]{screen.TITLES[f.__name__][0]}: {verdict}; {expected}{hint}.[/]")
    if surprises:
        return 1
    console.print("[bold green]The usual losses failed as they must; the safeops run stayed finite and learned.[/]")
    return 0


def _unwritable(path):
    """Why a file cannot be written at `path`, or None. Asked before the minute of training."""
    if path.is_dir():
        return "it is a folder"
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        return error.strerror
    if not existed:
        path.unlink()
    return None


def _refuse(reason):
    print(f"safeops demo: {reason}", file=sys.stderr)
    return 2
