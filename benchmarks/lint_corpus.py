"""The linter on code nobody here wrote: findings by rule, seconds, and a sample to be read by hand.

    pip install --no-deps --target FOLDER $(sed -n "/^# base/,/^$/{/^[a-z]/p}" requirements-lint-corpus.txt)
    python -m benchmarks.lint_corpus FOLDER [PACKAGE ...] [--sample 60] [--seed 0] [--least 12]
                                     [--most 6] [--everything]

Files are those whose path speaks of losses, metrics or distances; --everything takes all. The sample is drawn from the
sorted findings by the seed, so it is the same for everyone, with at least twelve (--least) of each group of rules where
there are as many, and of no package more than --most of a group: rule, place, message, and the lines around it.
"""

import argparse
import collections
import linecache
import pathlib
import random
import re
import sys
import time

from safeops.lint.run import Options, lint_paths

ABOUT_LOSSES = re.compile(
    r"loss|(?<!geo)metric|distance|criterion|(?<!multi_)objective|functional|regulari[sz]er|ssim|dice", re.IGNORECASE
)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lint_corpus", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the packages were installed")
    parser.add_argument("packages", nargs="*", help="only these of them")
    parser.add_argument("--sample", type=int, default=0, help="how many findings to show (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--least", type=int, default=12, help="of each group of rules in it (default: 12)")
    parser.add_argument("--most", type=int, help="of a group in one package (default: any number)")
    parser.add_argument("--everything", action="store_true", help="all files, not those about losses alone")
    options = parser.parse_args(argv)
    files = [str(path) for path in chosen(options)]
    if not files:
        print(f"no such files in {options.folder}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    outcome = lint_paths(files, Options())
    seconds = time.perf_counter() - start
    counts = collections.Counter(finding.code for finding in outcome.findings)
    print(f"{outcome.files} files, {seconds:.1f} s, {len(outcome.findings)} findings, {len(outcome.problems)} problems")
    for code, count in sorted(counts.items()):
        print(f"  {code} {count}")
    found = sorted(outcome.findings, key=lambda finding: (finding.path, finding.line, finding.column, finding.code))
    order = random.Random(options.seed).sample(found, len(found))
    order = spread(order, options.folder, options.most) if options.most else order
    for finding in sorted(drawn(order, options.sample, options.least), key=found.index):
        show(finding, options.folder)
    return 0


def chosen(options):
    folders = [options.folder / name for name in options.packages] or [options.folder]
    files = sorted(path for folder in folders for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    return [p for p in files if options.everything or ABOUT_LOSSES.search(str(p.relative_to(options.folder)))]


def spread(order, folder, most):
    """The findings, less those of a package that has shown `most` of their group already."""
    seen = collections.Counter()
    for finding in order:
        key = pathlib.Path(finding.path).relative_to(folder).parts[0], finding.code[:3]
        seen[key] += 1
        if seen[key] <= most:
            yield finding


def drawn(order, size, least):
    """`size` of the findings, at least `least` of a group (SO1, SO2, ...) that has as many."""
    groups = collections.Counter()
    first, rest = [], []
    for finding in order if size else ():
        group = finding.code[:3]
        groups[group] += 1
        (first if groups[group] <= least else rest).append(finding)
    return first + rest[: max(0, size - len(first))]


def show(finding, folder, around=6):
    print(f"\n{finding.code} {pathlib.Path(finding.path).relative_to(folder)}:{finding.line} {finding.message}")
    for number in range(max(1, finding.line - around), finding.line + 2):
        print(f"  {'>' if number == finding.line else ' '} {linecache.getline(finding.path, number).rstrip()}")


if __name__ == "__main__":
    sys.exit(main())
