"""Runs the linter on published packages, and prints its findings by rule and the seconds that it takes.

    pip install --no-deps --target FOLDER -r requirements-lint-corpus.txt
    python -m benchmarks.lint_corpus FOLDER [PACKAGE ...] [--everything]

Without --everything, only files are taken whose path names losses, metrics or distances (ABOUT_LOSSES).
"""

import argparse
import collections
import pathlib
import re
import sys
import time

from safeops_lint.run import Options, lint_paths

ABOUT_LOSSES = re.compile(
    r"loss|(?<!geo)metric|distance|criterion|(?<!multi_)objective|functional|regulari[sz]er|ssim|dice", re.IGNORECASE
)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lint_corpus", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the packages were installed")
    parser.add_argument("packages", nargs="*", help="only these of them")
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
    return 0


def chosen(options):
    folders = [options.folder / name for name in options.packages] or [options.folder]
    files = sorted(path for folder in folders for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    return [p for p in files if options.everything or ABOUT_LOSSES.search(str(p.relative_to(options.folder)))]


if __name__ == "__main__":
    sys.exit(main())
