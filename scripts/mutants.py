"""Break the library on purpose, one small change at a time, and see which test notices.

    make mutants ARGS="--count 100 --seed 13"
    make mutants ARGS="--count 100 --seed 13 --again"    tries the survivors once more, after tests were added
    make mutants ARGS="--only reductions/masked_var"     in paths that contain this

A mutant has one change in a kernel, a definition or a tool: another comparison, sign, constant or operator, no mask, or
no guard. It is made in a copy of the checkout under build/mutants, never in the checkout. The copy is rebuilt, and the
tests of the changed file run until one fails. A test kills a mutant if it fails with it and passes without it. CUDA
sources are executed from their PTX, Triton's by its interpreter. A mutant that does not compile does not count.

Each result is a line of build/mutants/log.jsonl; a new run continues from it. The table goes to build/mutants/table.md.
A mutant takes half a minute of a core if a test kills it, and some minutes if none does.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutant_tests import stages  # noqa: E402
from mutations import mutations  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1200  # the time limit of one stage's tests, of which none takes nearly as long
PARTS, SOURCES = ("csrc", "kernels", "safeops", "tests"), (".py", ".h", ".cpp", ".cu", ".cuh")

# {folder: how many of a hundred mutants are made there}
SHARES = {
    "csrc/cpu": 32,
    "csrc/common": 4,
    "csrc/cuda": 14,
    "kernels": 18,
    "safeops/ops": 17,
    "safeops/amp": 3,
    "safeops/debug": 5,
    "safeops_lint": 5,
    "safeops": 2,  # the files directly in safeops/
}


class Tree:
    """The copy of the checkout. It is built once; then one mutant after another is made in it and undone."""

    def __init__(self, folder):
        self.folder, self.clean = folder / "tree", folder / "clean"
        self.passing, self.failing = set(), set()  # tests, by their outcome without a mutant
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        wanted = {name for name in listed.splitlines() if (ROOT / name).is_file()}
        self.built = False
        for source, target in ((ROOT / name, self.folder / name) for name in wanted):
            if not target.exists() or source.stat().st_mtime != target.stat().st_mtime:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        for path in (path for part in PARTS for path in (self.folder / part).rglob("*.*")):
            if path.suffix in SOURCES and path.relative_to(self.folder).as_posix() not in wanted:
                path.unlink()
        for library in (ROOT / "safeops").glob("*.so"):  # the copy uses these until it has built its own
            shutil.copy2(library, self.folder / "safeops")
        link = self.folder / "safeops" / "kernels"  # without it safeops.kernels would be the checkout's folder
        link.is_symlink() or link.symlink_to("../kernels")

    def build_first(self):
        if (self.clean / "done").exists():
            self.copy(self.clean, self.folder)  # an interrupted run may have left a mutant's objects
        if not self.build():
            raise SystemExit("mutants: the checkout does not build")
        shutil.rmtree(self.clean, ignore_errors=True)
        (self.clean / "safeops").mkdir(parents=True)
        self.copy(self.folder, self.clean)
        (self.clean / "done").touch()
        self.built = True

    def copy(self, source, target):
        """Copies objects, ninja's log and libraries. Their times are kept: by them ninja knows what is up to date."""
        shutil.rmtree(target / "build", ignore_errors=True)
        shutil.copytree(source / "build", target / "build")
        for library in (source / "safeops").glob("*.so"):
            shutil.copy2(library, target / "safeops")

    def build(self):
        environment = os.environ | {"SAFEOPS_NO_CUDA": "1", "MAX_JOBS": "1"}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True).returncode == 0

    def spoil(self, mutant):
        """Makes the mutant in the copy. Returns False if it does not compile."""
        path, compiled = self.folder / mutant["path"], mutant["path"].startswith(("csrc/cpu/", "csrc/common/"))
        if compiled and not self.built:
            self.build_first()
        text = path.read_text()
        path.write_text(text[: mutant["start"]] + mutant["text"] + text[mutant["stop"] :])
        return not compiled or self.build()  # Python needs no build; CUDA sources are compiled by their tests

    def mend(self, mutant):
        shutil.copy2(ROOT / mutant["path"], self.folder / mutant["path"])
        if self.built:
            self.copy(self.clean, self.folder)

    def test(self, arguments):
        """Runs pytest. Returns None if all tests pass, else the test that failed, or how the process ended."""
        arguments = ["-qx", "--tb=line", "-pno:cacheprovider", *arguments]
        arguments += [f"--deselect={test}" for test in self.failing]
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                self.run(arguments, output.fileno())
            until = time.time() + SECONDS
            while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
                if time.time() > until:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    return "does not end"
                time.sleep(0.1)
            output.seek(0)
            said = output.read()
        code = os.waitstatus_to_exitcode(status[1])
        if code in (0, 5):  # 5: no test was selected
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", said, re.MULTILINE)
        return failed[1] if failed else f"crash ({code})"

    def run(self, arguments, output):
        """Runs pytest in the forked child process, and ends the child."""
        code = 70
        try:
            os.setsid()
            os.chdir(self.folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output, 1), os.dup2(output, 2)
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.path.insert(0, str(self.folder))
            if any("/interpreted/" in argument for argument in arguments):  # read by Triton when it is imported
                os.environ["TRITON_INTERPRET"] = "1"
                os.execv(sys.executable, [sys.executable, "-B", "-m", "pytest", *arguments])
            import pytest

            code = int(pytest.main(arguments))
            sys.stdout.flush()
        finally:
            os._exit(code)

    def judge(self, mutant):
        """Returns the mutant's dict with "killed" (the test that failed, or None), "valid" (it compiles), "seconds"."""
        begun, killer = time.time(), None
        try:
            valid = self.spoil(mutant)
            for arguments in stages(mutant["path"]) if valid else ():
                if killer := self.test(arguments):
                    break
        finally:
            self.mend(mutant)
        if killer and killer.startswith("tests/") and killer not in self.passing:
            if self.test([killer]):
                if "::" not in killer:
                    raise SystemExit(f"mutants: {killer} cannot run")
                print(f"{killer} fails without a mutant too, and is left out from here on", flush=True)
                self.failing.add(killer)
                return self.judge(mutant)
            self.passing.add(killer)
        return {**mutant, "killed": killer, "valid": valid, "seconds": round(time.time() - begun)}


def drawn(seed, only):
    """Yields mutants in an order that the seed fixes: draws a folder by its share, and then a line in it."""
    random_, places, lines = random.Random(seed), {}, set()
    for place in SHARES:
        paths = (p for p in (ROOT / place).glob("*" if place == "safeops" else "**/*") if p.suffix in SOURCES)
        names = sorted(p.relative_to(ROOT).as_posix() for p in paths)
        places[place] = [mutant for name in names if only in name for mutant in mutations(ROOT / name, name)]
        random_.shuffle(places[place])
    while any(places.values()):
        (place,) = random_.choices([p for p in places if places[p]], [SHARES[p] for p in places if places[p]])
        mutant = places[place].pop()
        if (line := (mutant["path"], mutant["line"])) not in lines:  # at most one mutant per line
            lines.add(line)
            yield mutant


def table(results):
    killed = sum(r["killed"] is not None for r in results)
    rows = [f"{len(results)} mutants, {killed} killed ({killed / max(1, len(results)):.2f})", ""]
    rows += ["| place | mutation | killed by |", "|---|---|---|"]
    for r in results:
        old, new = (re.sub(r"\s+", " ", r[key]).replace("|", "\\|") or " " for key in ("old", "text"))
        rows.append(f"| {r['path']}:{r['line']} | {r['what']}: `{old}` → `{new}` | {r['killed'] or '**survived**'} |")
    return "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="PATH")
    parser.add_argument("--again", action="store_true", help="run those that survived once more")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="of the copy, log and table")
    options = parser.parse_args()
    os.nice(10)
    sys.dont_write_bytecode = True
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis  # noqa: E401, F401  (once, here: the tests of a mutant are forked)

    tree, log = Tree(options.folder.resolve()), options.folder / "log.jsonl"
    earlier = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    judged = {(r["path"], r["start"], r["old"], r["text"]): r for r in earlier}
    results = []
    for mutant in drawn(options.seed, options.only):
        if len(results) == options.count:
            break
        result = judged.get(tuple(mutant[key] for key in ("path", "start", "old", "text")))
        if result is None or (options.again and result["valid"] and result["killed"] is None):
            result = tree.judge(mutant)
            with log.open("a") as file:
                file.write(json.dumps(result) + "\n")
        if not result["valid"]:
            continue
        results.append(result)
        (options.folder / "table.md").write_text(table(results))
        change = f"{result['path']}:{result['line']} {result['what']} {result['old']!r} → {result['text']!r}"
        print(f"{len(results)} {change}: {result['killed'] or 'SURVIVED'} ({result['seconds']} s)", flush=True)
    print(table(results).splitlines()[0])


if __name__ == "__main__":
    main()
