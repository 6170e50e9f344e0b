"""`safeops demo`: run every variant of the loss, print the record, draw the picture.

Exit codes: 0 the safeops run stayed finite and learned; 1 it did not; 2 the demo could not start.
"""

import importlib.util
import pathlib
import sys
import time

EXTRAS = {"numpy": "numpy", "skimage": "scikit-image", "matplotlib": "matplotlib", "rich": "rich"}


def main(*, steps=60, seed=0, device=None, out="safeops-demo.png"):
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
    # A second thread gains these small fp16 layers little, and on a busy machine they wait for it: 3 times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(pair, steps, seed, out)
    finally:
        torch.set_num_threads(threads)


def _run(pair, steps, seed, out):
    from safeops.demo import losses, picture, screen
    from safeops.demo.training import loss_milliseconds, train

    usual = [
        losses.boolean_write,
        losses.multiply_by_mask,
        losses.boolean_index,
        losses.where_after_division,
        losses.half_mask,
    ]
    complete = [losses.repaired_by_hand, losses.with_safeops]
    console, start, runs = screen.make_console(), time.perf_counter(), {}
    height, width = pair.truth.shape[-2:]
    console.print(
        f"Stereo matching on the Middlebury Motorcycle pair, {width} x {height}, "
        f"{100 * (~pair.known).float().mean().item():.1f} % of the disparities unknown (inf).\n"
        f"fp16 autocast and GradScaler on {pair.left.device}, {steps} steps, seed {seed}. "
        "One loss, written seven ways: disparity error + depth error, measured pixels only."
    )
    with screen.make_progress(console) as progress:
        for number, loss in enumerate(usual + complete, 1):
            screen.announce(console, number, loss.__name__)
            task = progress.add_task(screen.TITLES[loss.__name__][0], total=steps)

            def on_step(step, task=task):
                screen.print_step(console, step, steps)
                progress.advance(task)

            run = runs[loss.__name__] = train(loss, pair, steps=steps, seed=seed, on_step=on_step)
            screen.print_end(console, run)
            progress.remove_task(task)
        ours = runs["with_safeops"]
        milliseconds = {f.__name__: loss_milliseconds(f, ours.prediction, pair.truth) for f in complete}
    screen.print_table(console, runs.values())
    times = ", ".join(f"{screen.TITLES[name][0]} {ms:.1f} ms" for name, ms in milliseconds.items())
    console.print(f"The loss alone, forward and backward: {times}.")
    captions = [(screen.TITLES[f.__name__][0], screen.verdict(runs[f.__name__]), runs[f.__name__]) for f in usual]
    picture.draw(out, pair, captions, runs["repaired_by_hand"], ours)
    console.print(f"Picture: {out}   Time: {time.perf_counter() - start:.0f} s")
    if ours.learned:
        console.print("[bold green]The safeops run stayed finite and learned.[/]")
        return 0
    console.print(f"[bold red]The safeops run did not learn: {screen.verdict(ours)}. {steps} steps may be too few.[/]")
    return 1


def _unwritable(path):
    """Why a file cannot be written at `path`, or None; known before the minute of training."""
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
