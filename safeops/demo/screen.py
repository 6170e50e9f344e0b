"""The demo's output: a few lines for each run as it goes, then one table."""

import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from safeops.demo.training import PATIENCE

# name -> (title, what is usual about it)
TITLES = {
    "boolean_write": ("boolean write", "disparity[unknown] = 0"),
    "multiply_by_mask": ("times the mask", "(log(truth) - log(disparity)) * mask"),
    "half_eps": ("+ 1e-8 in half", "log(truth.type_as(disparity) + 1e-8)"),
    "where_after_log": ("where()", "where(mask, log(truth / disparity), 0)"),
    "half_mask": ("mask in half", "mask.type_as(disparity);  ... / mask.sum()"),
    "repaired_by_hand": ("repaired by hand", "disparity.float()[mask].clamp(min=1)"),
    "with_safeops": ("safeops", "smooth_l1_loss(disparity, truth, mask=mask)"),
}
SHOWN_FIRST, SHOWN_EVERY = 2, 20


def make_console():
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=110)  # a log or a pipe: no wrapping of the table
    return console


def make_progress(console):
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def announce(console, number, name):
    title, code = TITLES[name]
    style = "green" if name == "with_safeops" else "cyan" if name == "repaired_by_hand" else "yellow"
    console.print(f"\n[bold {style}]{number}  {title}[/]   [dim]{escape(code)}[/]")


def print_step(console, step, last):
    """Print the first steps, the last one, and every 20th between them."""
    if step.number > SHOWN_FIRST and step.number % SHOWN_EVERY and not step.number == last:
        return
    loss = f"{step.loss:8.3f}"
    loss = loss if math.isfinite(step.loss) else f"[red]{loss}[/]"
    gradients = "gradients finite    " if step.finite_gradients else "[red]gradients not finite[/]"
    if step.finite_gradients and not step.moved:
        gradients = "[red]gradients all 0     [/]"
    outcome = "[red]skipped[/]" if step.skipped else "[red]nothing moved[/]" if not step.moved else ""
    where = f"step {step.number:3d}   loss {loss}   scale {step.scale:5g}"
    console.print(f"   {where}   {gradients}   EPE {step.epe:6.2f} px   {outcome}")


def print_end(console, run):
    if run.exception is not None:
        text = escape(run.exception.split(" Hint:")[0])
        console.print(Padding(f"[red]{text}[/]", (0, 0, 0, 3)))
    elif run.gave_up:
        why = f"{PATIENCE} steps in a row moved no weight (same data, scale now {run.scale:g})"
        console.print(f"   stopped after step {len(run.steps)}: {why}")


def verdict(run):
    """How a run ended, in a few words, from its record alone."""
    if run.exception is not None:
        return f"raises at step {len(run.steps) + 1}"
    for step in run.steps:
        if not math.isfinite(step.loss):
            return f"loss is {step.loss} from step {step.number}"
    if not any(s.moved for s in run.steps):
        if run.nonfinite_gradients:
            return "gradients not finite"
        return f"loss is {run.steps[-1].loss:g}, silently"
    return "learns" if run.learned else "finite, but not learned"


def print_table(console, runs):
    title = "The same network, data and seed; only the loss differs"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    table.add_column("loss written with", no_wrap=True)
    for heading in (
        "steps\nrun",
        "steps\nskipped",
        "loss not\nfinite",
        "grads not\nfinite",
        "EPE\npx",
        "bad-2.0\n%",
        "depth\nerror m",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what happens")
    for i, run in enumerate(runs, 1):
        style = "bold green" if run.learned and run.name == "with_safeops" else None if run.learned else "red"
        table.add_row(
            f"{i} {TITLES[run.name][0]}",
            *(str(n) for n in (len(run.steps), run.skipped, run.nonfinite_losses, run.nonfinite_gradients)),
            f"{run.epe:.2f}",
            f"{run.bad2:.1f}",
            f"{run.depth_error:.2f}",
            verdict(run),
            style=style,
        )
    console.print()
    console.print(table)
