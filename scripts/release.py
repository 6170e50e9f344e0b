"""Builds, checks and lists the files of a release: the source distribution, and a wheel for each architecture.

    python scripts/release.py --dry-run [--arch x86_64 aarch64]
    python scripts/release.py             also uploads the files (twine asks for a token)

An architecture other than this machine's needs its cross compiler. `make release` installs the Python packages.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
POLICY = "manylinux_2_28"


def run(*command) -> str:
    return subprocess.run([*map(str, command)], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def versions() -> dict[str, str]:
    """Returns {file: the version that it states}."""
    places = {
        "safeops/core/__init__.py": r'^VERSION = "(.+)"$',
        "CHANGELOG.md": r"^## (\d\S*)",
        "CITATION.cff": r"^version: (.+)$",
    }
    return {path: re.search(row, (ROOT / path).read_text(), re.MULTILINE)[1] for path, row in places.items()}


def audit(wheel: Path) -> list[str]:
    """Returns the reasons why a wheel breaks the policy of its platform tag: symbols newer than the policy allows, or
    libraries that neither the policy allows nor torch has."""
    report = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    tag, libraries = report["sym_tag"], set(report["external_libs"]) - {"libtorch.so", "libtorch_cpu.so"}
    policy = re.fullmatch(r"manylinux_2_(\d+)_\w+", tag)
    problems = [f"needs the library {name}" for name in sorted(libraries)]
    if not policy or int(policy[1]) > 28:
        problems.append(f"has symbols of {tag}: {report['versioned_symbols']}")
    if POLICY not in wheel.name:
        problems.append(f"has no tag {POLICY}")
    return [f"{wheel.name} {problem}" for problem in problems]


def build(archs: list[str]) -> list[Path]:
    DIST.mkdir(exist_ok=True)
    for old in (*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")):
        old.unlink()
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", DIST)
    for arch in archs:
        run("make", "--no-print-directory", "wheel", f"ARCH={arch}")
    return sorted((*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="build, check and list, and publish nothing")
    parser.add_argument("--arch", nargs="+", default=[os.uname().machine], help="architectures of the wheels")
    options = parser.parse_args()
    if len(set(versions().values())) > 1:
        raise SystemExit(f"release: the versions differ: {versions()}")
    if changes := run("git", "status", "--porcelain"):
        raise SystemExit(f"release: the tree is not clean:\n{changes}")
    files = build(options.arch)
    wheels = [file for file in files if file.suffix == ".whl"]
    if problems := [problem for wheel in wheels for problem in audit(wheel)]:
        raise SystemExit("release: " + "\n".join(problems))
    run(sys.executable, "-m", "abi3audit", "--strict", *wheels)
    print(run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files), end="")
    for file in files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.stat().st_size / 2**20:6.1f} MiB  {file.name}")
    if not options.dry_run:
        subprocess.check_call([sys.executable, "-m", "twine", "upload", *map(str, files)])


if __name__ == "__main__":
    main()
