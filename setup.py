"""Builds safeops: the Python package, and two extension modules that use only LibTorch's stable ABI.

    safeops._C      csrc/{cpu,launch,module.cpp}  if there is a C++ compiler
    safeops._cuda   csrc/cuda                     if there is nvcc too, even with a CPU-only torch

Both are `abi3` modules: one wheel serves every Python from 3.10 and every torch from 2.11. A development build
(`pip install --editable`, `build_ext --inplace`) has CUDA kernels for this machine's GPUs only, and none if it has no
GPU. A wheel (`pip wheel`, `pip install .`) has them for all architectures. Environment:

    SAFEOPS_NO_EXT=1         pure Python (every op runs its composite)
    SAFEOPS_NO_CUDA=1        no safeops._cuda
    SAFEOPS_CUDA_ARCH=9.0    `native`, `all`, or compute capabilities, separated by space, comma or semicolon
    SAFEOPS_PLATFORM=...     manylinux_2_28_x86_64 or manylinux_2_28_aarch64: the binaries also run with the glibc and
                             libstdc++ of that policy, and the wheel has its tag (make wheel)
    MAX_JOBS=2               compilations at a time
    CXX, CUDA_HOME           the compilers

Without a C++ compiler the install is pure Python, and prints so. If the compiler fails, the build fails.
This file writes build/ninja/build.ninja, which uses the rules of csrc/rules.ninja, and runs ninja. It does not use
torch's BuildExtension, which refuses an nvcc of another version than torch's CUDA, and links more of torch than the
stable ABI.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

# Paths are relative, so that error messages have no folders of the build machine.
BUILD = Path("build/ninja")  # shared by the development install and the wheel

FLAGS = """-std=c++17 -O3 -fPIC -Wall -fopenmp-simd -fno-math-errno -fno-trapping-math
    -fvisibility=hidden -fvisibility-inlines-hidden""".split()
# the oldest versions: torch 2.11, Python 3.10
FLAGS += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000", "-Icsrc"]
# nvcc forwards g++'s flags. No --use_fast_math: its division and logarithm are too inexact for the ops' contract.
NVCC_FLAGS = ["--forward-unknown-to-host-compiler", "--expt-relaxed-constexpr"]
CUDA_ARCHS = ("8.0", "9.0", "10.0", "12.0")
PLATFORM = os.environ.get("SAFEOPS_PLATFORM")
LOADERS = {"manylinux_2_28_x86_64": "ld-linux-x86-64.so.2", "manylinux_2_28_aarch64": "ld-linux-aarch64.so.1"}


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "off", "no", "false")


def say(text: str):
    print(f"safeops: {text}", file=sys.stderr)


def find_cxx() -> list[str] | None:
    """The C++ compiler as an argument list, or None. CXX may contain a launcher: `ccache g++`."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for command in map(shlex.split, names):
        if all(shutil.which(word) for word in command if not word.startswith("-")):
            return command
    return None


def find_cuda() -> Path | None:
    """The CUDA toolkit's folder (the one with bin/nvcc and include/cuda_runtime.h), or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):  # it may be a wrapper script, so nvcc is asked for its folder
        plan = [nvcc, "--dryrun", "-x", "cu", "-E", os.devnull]
        report = subprocess.run(plan, capture_output=True, text=True).stderr
        homes += re.findall(r"^#\$ TOP=(.+?)\s*$", report, re.MULTILINE)
    for home in map(Path, filter(None, [*homes, "/usr/local/cuda"])):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home.resolve()
    return None


def prerequisites() -> tuple[Path, str]:
    """Returns the folders of torch and of Python's headers. Exits if one of them is missing, or ninja."""
    torch, python = find_spec("torch"), sysconfig.get_path("include")  # not `import torch`, which takes seconds
    missing = None
    if torch is None:
        missing = "the extension is built against torch>=2.11: install it first and build with --no-build-isolation"
    elif not os.path.exists(f"{python}/Python.h"):
        missing = f"no {python}/Python.h: install Python's headers (Debian, Ubuntu: python3-dev)"
    elif find_spec("ninja") is None:
        missing = "no ninja: `pip install ninja`"
    elif PLATFORM and PLATFORM not in LOADERS:
        missing = f"SAFEOPS_PLATFORM must be one of {', '.join(LOADERS)}, got {PLATFORM!r}"
    if missing:
        raise SystemExit(f"safeops: {missing}, or set SAFEOPS_NO_EXT=1 for a pure-Python install")
    return Path(torch.origin).parent, python


def present_gpus() -> set[str]:
    """The compute capabilities of this machine's GPUs that can run the kernels."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    results = subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which(query[0]) else []
    return {name for name in results if re.fullmatch(r"\d+\.\d", name) and float(name) >= 8}


def cuda_archs(cuda: Path, development: bool) -> list[str]:
    """The compute capabilities to build for, in nvcc's form ("90"). Empty: no CUDA build."""
    asked = os.environ.get("SAFEOPS_CUDA_ARCH", "").strip() or ("native" if development else "all")
    names = present_gpus() if asked == "native" else CUDA_ARCHS if asked == "all" else re.split(r"[ ,;]+", asked)
    if not names:
        say("no GPU found: building without the CUDA kernels (SAFEOPS_CUDA_ARCH=all builds them for all GPUs)")
        return []
    wanted = sorted((name.replace(".", "").removeprefix("sm_") for name in names), key=int)
    known = subprocess.check_output([cuda / "bin/nvcc", "--list-gpu-arch"], text=True).split()
    archs = [arch for arch in wanted if f"compute_{arch}" in known]
    if not archs:
        raise SystemExit(f"safeops: {cuda}/bin/nvcc knows none of the architectures {wanted} (it knows {known})")
    return archs


def gencode(archs: list[str], tuned: bool) -> list[str]:
    """-gencode flags: machine code for each architecture, and PTX for later ones. One run of the front end serves all
    architectures, unless the code is tuned for each (CUB's is)."""
    virtual = archs if tuned else [archs[0]] * len(archs)
    flags = [f"-gencode=arch=compute_{front},code=sm_{arch}" for front, arch in zip(virtual, archs)]
    return [*flags, f"-gencode=arch=compute_{virtual[-1]},code=compute_{virtual[-1]}"]


class BuildExt(build_ext):
    """Writes build.ninja and runs ninja, which compiles only what is out of date, MAX_JOBS files at a time."""

    def run(self):
        self.torch, python = prerequisites()
        self.cxx, self.edges = find_cxx(), f"builddir = {BUILD}\ninclude csrc/rules.ninja\n"
        headers = self.torch / "include"
        self.flags = [*FLAGS, f"-ffile-prefix-map={headers}/=", "-isystem", headers, "-isystem", python]
        self.stubs = self.add_stubs()
        libraries = {"safeops._C": self.cpu_library, "safeops._cuda": self.cuda_library}
        built = {extension.name: libraries[extension.name](extension.sources) for extension in self.extensions}
        self.extensions = [extension for extension in self.extensions if built[extension.name]]
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits: two ninjas must not share the folder
            (BUILD / "build.ninja").write_text(self.edges)
            jobs = ["-j", os.environ.get("MAX_JOBS", "2")]
            if subprocess.run([sys.executable, "-m", "ninja", "-f", BUILD / "build.ninja", *jobs]).returncode:
                raise SystemExit("safeops: the build failed; above stand the command and its error")
            for extension in self.extensions:
                target = self.get_ext_fullpath(extension.name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy(built[extension.name], f"{target}.new")
                os.replace(f"{target}.new", target)  # a process that has mapped the old file keeps its content

    def cpu_library(self, sources: list[str]) -> str:
        call = [*self.cxx, *self.flags]
        header = self.add("compile", "torch.h.gch", ["csrc/torch.h"], [*call, "-x", "c++-header"])
        call += ["-include", header.removesuffix(".gch")]
        return self.link("_C", [self.add("compile", f"{x}.o", [x], call, header) for x in sources])

    def cuda_library(self, sources: list[str]) -> str | None:
        cuda = find_cuda()
        archs = cuda_archs(cuda, development=self.inplace)
        if not archs:
            return None
        flags = [*self.flags, "-DUSE_CUDA"]
        cxx = [*self.cxx, *flags, "-isystem", cuda / "include"]
        nvcc = [cuda / "bin/nvcc", *NVCC_FLAGS, *flags]
        if os.environ.get("CXX"):  # -ccbin takes the compiler alone, without launcher and options
            nvcc += ["-ccbin", next(word for word in reversed(self.cxx) if not word.startswith("-"))]
        objects = []
        for source in sources:
            tuned = "#include <cub/" in Path(source).read_text()
            call = [*nvcc, *gencode(archs, tuned)] if source.endswith(".cu") else cxx
            call = [*cxx, f'-DSAFEOPS_ARCHS="{" ".join(archs)}"'] if source == "csrc/cuda/module.cpp" else call
            objects.append(self.add("compile_cuda", f"{source}.o", [source], call))
        runtime = [f"-L{cuda / 'lib64'}", f"-L{cuda / 'lib'}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
        return self.link("_cuda", objects, runtime)

    def link(self, name: str, objects: list[str], libraries=()) -> str:
        exports = "csrc/exports.map"
        call = [*self.cxx, "-shared", *objects, f"-Wl,--version-script={exports}", "-Wl,--no-as-needed"]
        call += [*self.stubs, *libraries]
        if PLATFORM:  # the default libraries that have no stub
            call += ["-nodefaultlibs", "-l:libc_nonshared.a", "-l:libpthread.so.0", "-lgcc_s", "-lgcc"]
        return self.add("link", f"{name}.so", [*objects, *self.stubs], call, exports)

    def add_stubs(self) -> list[str]:
        """Adds stub libraries, which have no code, and returns their paths. torch's stubs have only a name: the loader
        looks up their symbols. With PLATFORM, stubs of the system libraries have the symbols of the platform's policy,
        and symbols.o defines what the code needs beyond these."""
        empty = [*self.cxx, "-shared", "-nostdlib", "-xc", os.devnull]
        stubs = [self.add("link", x, [], [*empty, f"-Wl,-soname={x}"]) for x in ("libtorch.so", "libtorch_cpu.so")]
        if PLATFORM:
            stubs.append(self.add("compile", "symbols.o", ["csrc/manylinux/symbols.cpp"], [*self.cxx, *FLAGS]))
            script, names = "csrc/manylinux/stub.py", ["libc.so.6", "libm.so.6", "libstdc++.so.6", LOADERS[PLATFORM]]
            stubs += [self.add("stub", x, [script], [sys.executable, script, *self.cxx, x]) for x in names]
        return stubs

    def add(self, rule: str, output: str, inputs: list[str], call: list, needs: str = "") -> str:
        """Adds a build edge and returns its output's path. The folder's name is a hash of the command, so that builds
        with other flags keep their outputs, and of torch's version, since ninja does not track torch's headers."""
        call = shlex.join(map(str, call))
        folder = hashlib.sha256(f"{call} torch {version('torch')}".encode()).hexdigest()[:12]
        path, call = f"{BUILD}/{folder}/{output}", call.replace("$", "$$")
        self.edges += f"build {path}: {rule} {' '.join(inputs)} | {needs}\n  call = {call}\n"
        return path


class BuildPy(build_py):
    def run(self):
        # setuptools does not delete old files: a module deleted since the last wheel would still be packed.
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def sources(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def extensions() -> list[Extension]:
    if flag("SAFEOPS_NO_EXT"):
        return []
    if find_cxx() is None:
        say(
            "NO C++ COMPILER FOUND: installing without the extension; every op runs its composite "
            "(correct, slower). Install g++ or set CXX, and install again, for the kernels."
        )
        return []
    results = {"safeops._C": sources("csrc/module.cpp", "csrc/launch/*.cpp", "csrc/cpu/**/*.cpp")}
    if not flag("SAFEOPS_NO_CUDA"):
        if find_cuda():
            results["safeops._cuda"] = sources("csrc/cuda/**/*.cu", "csrc/cuda/**/*.cpp")
        else:
            say("no nvcc found: building without the CUDA kernels")
    return [Extension(name, files, py_limited_api=True) for name, files in results.items()]


ext_modules = extensions()
kernels = ["safeops.kernels", *(f"safeops.kernels.{name}" for name in find_packages("kernels"))]
# The package index shows the README, so its relative links become links to the repository.
REPOSITORY = "https://github.com/safeops/safeops"
README = re.sub(r"(!\[[^]]*\]\()(?!http)", rf"\1{REPOSITORY}/raw/main/", Path("README.md").read_text(encoding="utf-8"))
README = re.sub(r"(?<=\]\()(?!http|#)", f"{REPOSITORY}/blob/main/", README)

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["safeops", "safeops.*", "safeops_lint", "safeops_lint.*"]), *kernels],
    package_dir={"safeops": "safeops", "safeops.kernels": "kernels"},
    package_data={"safeops": ["py.typed", "*.pyi"], "safeops.debug.page": ["*.html", "*.js"]},
    include_package_data=False,
    ext_modules=ext_modules,
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    # the wheel's tag: cp310-abi3-linux_… with extensions, py3-none-any without
    options={"bdist_wheel": {"py_limited_api": "cp310", "plat_name": PLATFORM}} if ext_modules else {},
)
