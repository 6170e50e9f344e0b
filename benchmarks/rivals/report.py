"""Writes the table of the contests, and how often safeops is ahead, level or behind."""

from __future__ import annotations

from ..report import HOW, table
from ..report import _routes as routes
from .contest import FLOOR, OURS

LEVEL = 0.03  # relative difference of times up to which two contenders count as level
FAR = 0.1  # relative difference of full-size results above which the report names it
OTHERS = ("copy", OURS)


def standing(record: dict, entry: dict) -> dict:
    """Returns a dict with our share of the copy's speed (or our TFLOP/s), the fastest rival, and its time / our
    time."""
    times = record["milliseconds"]
    ours = times[OURS]
    rivals = {who: ms for who, ms in times.items() if who not in OTHERS and not who.startswith(FLOOR)}
    same = {who: ms for who, ms in rivals.items() if who not in entry["other"]} or rivals
    fastest = min(same, key=same.get, default=None)
    results = {"fastest": fastest, "ratio": same[fastest] / ours if fastest else None}
    if record["bytes"]:
        return results | {"share": f"{times['copy'] / ours:.2f}"}
    return results | {"share": f"{record['flops'] / ours / 1e9:.0f} TFLOP/s"}


def markdown(results: dict) -> str:
    entries = {entry["contest"]: entry for entry in results["contests"]}
    settings = results["settings"]
    lines = [f"# safeops and its rivals, {results['hardware']['device']}", ""]
    lines += [", ".join(f"{k} {v}" for k, v in results["hardware"].items() if k != "device") + ".", ""]
    lines += [HOW[settings["device"]].format(**settings), "", routes(results["routes"]), ""]
    if settings["small"]:
        lines += ["Small operands, in warm caches: this tries the machinery, and says nothing of speed.", ""]
    lines += _table(results["records"], entries, settings["device"] == "cuda")
    lines += [_sum_up(results["records"], entries), ""]
    absent, out, differ = {}, [], []
    for name, entry in entries.items():
        for who, why in entry["absent"].items():
            absent.setdefault(why, []).append(f"{name} {who}")
        out += [f"- {name}, {who}: {why}" for who, why in entry["left_out"].items()]
        differ += [f"- {name}, {who}: {why}" for who, why in entry["other"].items() if not who.startswith(FLOOR)]
        values = {
            who: it for who, it in entry["values"].items() if not who.startswith(FLOOR) and OURS in entry["values"]
        }
        differ += [
            f"- {name}, {who}: {value:.4g} where ours is {values[OURS]:.4g}, in the mean of the magnitudes"
            for who, value in values.items()
            if not abs(value - values[OURS]) <= FAR * abs(values[OURS])
        ]
    lines += ["Absent:", "", *(f"- {why}: {', '.join(names)}" for why, names in absent.items()), ""] * bool(absent)
    lines += ["Left out:", "", *out, ""] * bool(out)
    lines += ["Timed, but of another result:", "", *differ, ""] * bool(differ)
    return "\n".join([*lines, *_errors(entries)])


def _table(records, entries, cuda):
    head = ["contest", "operands", "direction", "GPU ms" if cuda else "ms", "share", "ratio", "fastest rival"]
    head += ["host us", "rival's host us", "MiB", "rival's MiB"] * cuda + ["the others, ms"]
    rows = []
    for record in records:
        it, times = standing(record, entries[record["contest"]]), record["milliseconds"]
        who = it["fastest"]
        row = [record["contest"], record["sizes"], record["direction"], f"{times[OURS]:.3f}", it["share"]]
        row += [f"{it['ratio']:.2f}", f"{who} {times[who]:.3f}"] if who else ["-", "-"]
        if cuda:
            for key, scale in (("host_us", 1), ("peak", 2**20)):
                row += [f"{record[key][name] / scale:.0f}" if name else "-" for name in (OURS, who)]
        rest = [f"{name} {ms:.3f}" for name, ms in times.items() if name not in (*OTHERS, who)]
        rows.append([*row, ", ".join(rest).replace("|", "\\|")])
    return table("Forward, and forward and backward in a row", head, rows)


def _sum_up(records, entries):
    ratios = []
    for record in records:
        it = standing(record, entries[record["contest"]])
        if it["ratio"]:
            ratios.append((it["ratio"], f"{record['contest']} {record['direction']} {it['ratio']:.2f}"))
    behind = sorted(pair for pair in ratios if pair[0] < 1 - LEVEL)
    level = sum(1 - LEVEL <= ratio < 1 + LEVEL for ratio, _ in ratios)
    counted = f"{len(records)} comparisons, {len(ratios)} of them with a rival: ahead in "
    counted += f"{len(ratios) - level - len(behind)}, level in {level}, behind in {len(behind)}"
    return f"{counted}: {', '.join(text for _, text in behind)}." if behind else f"{counted}."


def _errors(entries):
    rows = [
        [name, who, *(f"{result[key]:.0e}" if key in result else "-" for key in ("value", "gradient"))]
        for name, entry in entries.items()
        for who, result in entry["errors"].items()
    ]
    return table("Error against fp64, of the largest, on small operands", ["contest", "who", "value", "gradient"], rows)
