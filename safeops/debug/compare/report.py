"""A Comparison as text."""

from safeops.debug.compare.entry import BACKWARD, FORWARD, PARAMETERS
from safeops.debug.compare.projection import LARGEST, ZEROS

MOST = 8  # names in a list


def text(comparison):
    a, b = comparison.names
    lines = [f"a: {_run(comparison, 0)}", f"b: {_run(comparison, 1)}"]
    for phase, first in ((FORWARD, comparison.forward), (BACKWARD, comparison.backward)):
        of_phase = [d for d in comparison.differences if (d.phase == FORWARD) == (phase == FORWARD)]
        if first is not None:
            lines += _finding(phase, first, of_phase)
        elif of_phase:
            most = max(of_phase, key=lambda d: d.ratio)
            lines.append(
                f"{phase}: no difference beyond rounding in {len(of_phase)} tensor{'s' * (len(of_phase) != 1)}; "
                f"the largest is {most.ratio:.2g} of its budget, at {most.module}"
            )
        else:
            lines.append(f"{phase}: nothing to compare")
    for name, modules in (("a", comparison.only_a), ("b", comparison.only_b)):
        if modules:
            lines.append(f"only in {name}: {_some(modules)}")
    if comparison.shapes:
        shapes = [f"{name}: {x} and {y}" for name, x, y in comparison.shapes]
        lines.append(f"other shapes, not compared: {_some(shapes, '; ')}")
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)])


def _run(comparison, i):
    facts, ranks = comparison.facts[i], comparison.ranks[i]
    parts = [f"torch {facts.get('torch')}", facts.get("device"), *facts.get("dtypes", [])]
    if ranks > 1:
        parts.append(f"{ranks} ranks")
    return f"{comparison.names[i]} ({', '.join(map(str, parts))})"


def _finding(phase, d, of_phase):
    before = of_phase[: of_phase.index(d)]
    agree = f"the {len(before)} before it agree" if len(before) > 1 else "the one before it agrees" if before else ""
    more = sum(other.differs for other in of_phase) - 1
    lines = [f"{phase}: the first difference is at {d.module}, the {d.what}"]
    if d.difference == float("inf"):
        lines.append(f"  differs     in NaN or inf: {_nonfinite(d.a)} in a, {_nonfinite(d.b)} in b")
    else:
        lines.append(f"  differs     by {d.difference:.2g} of its length; rounding explains {d.budget:.2g}")
    if d.call:
        lines.append(f"  call        {d.call + 1} of this module in the step")
    lines += [f"  a           {_entry(d.a)}", f"  b           {_entry(d.b)}"]
    if agree:
        lines.append(f"  before it   {agree}: at most {max(x.ratio for x in before):.2g} of the budget")
    if more:
        lines.append(f"  after it    {more} more differ")
    return lines


def _entry(entry):
    dtype = entry.dtype + (f" (autocast {entry.autocast})" if entry.autocast and entry.autocast != entry.dtype else "")
    shape = f"{entry.path} {entry.shape}" if entry.phase == PARAMETERS else f"{entry.shape}"
    zeros = f", {entry.stats[ZEROS]:.0f} zeros" if entry.stats[ZEROS] else ""
    bad = f", {_nonfinite(entry)}" if any(entry.nonfinite) else ""
    numbers = f"norm {entry.norm:.4g}, largest {entry.stats[LARGEST]:.4g}, mean {entry.mean:.2g}"
    return f"{dtype} {shape}: {numbers}{zeros}{bad}"


def _nonfinite(entry):
    counted = [f"{n:.0f} {kind}" for n, kind in zip(entry.nonfinite, ("NaN", "inf", "-inf")) if n]
    return ", ".join(counted) or "none"


def _some(names, comma=", "):
    return comma.join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")
