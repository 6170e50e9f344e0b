"""Build of safeops: the Python package, and two extension modules that use nothing but LibTorch's stable ABI.

    safeops._C      csrc/cpu/*.cpp, csrc/module.cpp  wherever there is a C++ compiler
    safeops._cuda   csrc/cuda/**/*.cu, *.cpp         where nvcc is found too, also beside a CPU-only torch

Both are `abi3` modules: one wheel serves every Python from 3.10 and every torch from 2.11. Environment:

    SAFEOPS_NO_EXT=1         pure Python (every op runs its composite)
    SAFEOPS_NO_CUDA=1        no safeops._cuda
    SAFEOPS_CUDA_ARCH=9.0    compute capabilities to build for, separated by space, comma or semicolon
    MAX_JOBS=2               compilations at a time
    CXX, CUDA_HOME           the compilers

Without a C++ compiler the install is pure Python, and says so. A compiler that fails, fails the build.
torch's own BuildExtension is not used: it refuses an nvcc that differs from torch's CUDA, links more of torch
than the stable ABI, and needs ninja. Recompiling only what changed takes a dependency file per object.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "objects"  # shared by the development install and the wheel

CXX_FLAGS = """-std=c++17 -O3 -fPIC -Wall -fopenmp-simd -fno-math-errno -fno-trapping-math
    -fvisibility=hidden -fvisibility-inlines-hidden""".split()
# nvcc has its own numerics; no fast-math, whose division and logarithm would break the contract.
NVCC_FLAGS = "-std=c++17 -O3 --expt-relaxed-constexpr -Xcompiler -fPIC,-fvisibility=hidden -DUSE_CUDA".split()
# torch 2.11, Python 3.10
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DPy_LIMITED_API=0x030a0000"]
TORCH_HEADERS = [f"torch/csrc/{name}.h" for name in ("inductor/aoti_torch/c/shim", "stable/library", "stable/tensor")]
CUDA_ARCHS = ("8.0", "9.0", "10.0", "12.0")


def flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() not in ("", "0", "off", "no", "false")


def find_cxx() -> list[str] | None:
    """The C++ compiler as an argument list (CXX may hold a launcher: `ccache g++`), or None."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for command in map(shlex.split, names):
        if all(shutil.which(word) for word in command if not word.startswith("-")):
            return command
    return None


def find_cuda() -> Path | None:
    """The CUDA toolkit's folder (the one with bin/nvcc and include/cuda_runtime.h), or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    if nvcc:  # on the PATH there may be a wrapper script; nvcc itself knows where it lives
        plan = [nvcc, "--dryrun", "-x", "cu", "-E", os.devnull]
        report = subprocess.run(plan, capture_output=True, text=True).stderr
        top = re.search(r"^#\$ TOP=(.+)$", report, re.MULTILINE)
        homes.append(top.group(1).strip() if top else None)
    for home in map(Path, filter(None, [*homes, "/usr/local/cuda"])):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home.resolve()
    return None


def gencode(nvcc: Path, tuned: bool) -> list[str]:
    """-gencode flags: machine code for each architecture asked for that this nvcc knows, and PTX for those to come. One
    run of the front end serves all; code that is tuned for each architecture needs a run for each."""
    names = re.split(r"[ ,;]+", os.environ.get("SAFEOPS_CUDA_ARCH", " ".join(CUDA_ARCHS)).strip())
    wanted = sorted((name.replace(".", "").removeprefix("sm_") for name in names), key=int)
    known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True).split()
    archs = [arch for arch in wanted if f"compute_{arch}" in known]
    if not archs:
        raise SystemExit(f"safeops: {nvcc} knows none of the architectures {wanted} (it knows {known})")
    virtual = archs if tuned else [archs[0]] * len(archs)
    flags = [f"-gencode=arch=compute_{front},code=sm_{arch}" for front, arch in zip(virtual, archs)]
    return [*flags, f"-gencode=arch=compute_{virtual[-1]},code=compute_{virtual[-1]}"]


def torch_folder() -> Path:
    spec = find_spec("torch")  # found, not imported: an import costs seconds at each build
    if spec is None:
        raise SystemExit(
            "safeops: the extension is built against torch>=2.11: install it first and build with "
            "--no-build-isolation, or set SAFEOPS_NO_EXT=1 for a pure-Python install"
        )
    return Path(spec.origin).parent


class BuildExt(build_ext):
    """Compiles what changed (the source, a header, the command, torch), two at a time, and links."""

    def build_extensions(self):
        torch = torch_folder()
        python = sysconfig.get_path("include")
        if not (Path(python) / "Python.h").exists():
            raise SystemExit(
                f"safeops: there is a C++ compiler, but no {python}/Python.h: install Python's headers "
                "(Debian, Ubuntu: python3-dev), or set SAFEOPS_NO_EXT=1 for a pure-Python install"
            )
        self.includes = ["-isystem", str(torch / "include"), "-isystem", python]
        # Errors name their source file: not by the path it had on the build machine.
        self.prefixes = [f"-ffile-prefix-map={ROOT}/=", f"-ffile-prefix-map={torch / 'include'}/="]
        self.torch_libs = f"-L{torch / 'lib'} -Wl,--no-as-needed -ltorch -ltorch_cpu".split()
        self.cxx = find_cxx()
        self.cuda = find_cuda()
        self.precompiled = self.precompile()
        for extension in self.extensions:
            self.build_extension(extension)

    def precompile(self) -> str:
        """torch's headers, read once for all C++ sources: half of the time that a short source takes."""
        command = [*self.cxx, *CXX_FLAGS, *self.prefixes, *DEFINES, *self.includes, "-x", "c++-header"]
        signature = hashlib.sha256(f"{command} torch {version('torch')}".encode()).hexdigest()[:12]
        header = OBJECTS / f"torch.{signature}.h"
        compiled = header.with_suffix(".h.gch")
        if not compiled.exists():
            OBJECTS.mkdir(parents=True, exist_ok=True)
            header.write_text("".join(f"#include <{name}>\n" for name in TORCH_HEADERS))
            partial = header.with_suffix(f".{os.getpid()}.part.gch")
            self.call([*command, str(header), "-o", str(partial)], "compile torch's headers")
            os.replace(partial, compiled)
        return str(header)

    def build_extension(self, ext):
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 2))) as pool:
            objects = list(pool.map(lambda source: self.compile_one(ext, source), ext.sources))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Nothing but the init function is visible, whatever a source forgot to hide.
        exports = OBJECTS / f"{ext.name}.map"
        exports.write_text(f"{{ global: PyInit_{ext.name.rpartition('.')[2]}; local: *; }};\n")
        link = [*self.cxx, "-shared", *map(str, objects), *self.torch_libs, f"-Wl,--version-script={exports}"]
        if self.is_cuda(ext):
            folders = [self.cuda / "lib64", self.cuda / "lib"]
            link += [f"-L{folder}" for folder in folders if folder.exists()]
            link += ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]
        # Linked under another name and moved: a process that has the old file mapped keeps it whole.
        fresh = target.with_suffix(".new")
        self.call([*link, "-o", str(fresh)], f"link {target.name}")
        os.replace(fresh, target)

    def compile_one(self, ext, source: str) -> Path:
        if source.endswith(".cu"):
            nvcc = self.cuda / "bin" / "nvcc"
            host = ["-ccbin", self.cxx[-1]] if os.environ.get("CXX") else []
            prefixes = [f"-Xcompiler={flag}" for flag in self.prefixes]
            command = [str(nvcc), *host, *NVCC_FLAGS, *prefixes]
            command += gencode(nvcc, tuned="#include <cub/" in (ROOT / source).read_text())
            command += [*DEFINES, *self.includes]
        else:
            command = [*self.cxx, *CXX_FLAGS, *self.prefixes, *DEFINES, *self.includes]
            if self.is_cuda(ext):
                command += ["-DUSE_CUDA", "-isystem", str(self.cuda / "include")]
            else:
                command += ["-include", self.precompiled]
        command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT}", "-c", source]
        # The object's name carries the command, so that builds with other flags do not undo each other. torch's
        # headers are system headers, absent from the dependency file: its version stands for them.
        signature = hashlib.sha256(f"{command} torch {version('torch')}".encode()).hexdigest()[:12]
        target = OBJECTS / ext.name / f"{source}.{signature}.o"
        depfile = target.with_suffix(".d")
        if not self.is_fresh(target, depfile):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(f".{os.getpid()}.part.o")  # complete or absent: an object that exists is whole
            begun = time.time()
            self.call([*command, "-MMD", "-MF", str(depfile), "-o", str(partial)], f"compile {source}")
            if self.is_cuda(ext):
                self.weaken(partial)
            os.utime(partial, (begun, begun))  # a source that changed while it was compiled is newer
            os.replace(partial, target)
        return target

    @staticmethod
    def weaken(target: Path):
        """Make torch's CUDA functions weak references: a CPU-only torch lacks them, and must still load the
        module (Python loads with RTLD_NOW, which wants every strong symbol). Only CUDA tensors lead to a call."""
        undefined = subprocess.check_output(["nm", "--undefined-only", target], text=True)
        names = sorted(set(re.findall(r"\b(?:aoti_)?torch_\w*cuda\w*", undefined)))
        if names:
            subprocess.check_call(["objcopy", *(f"--weaken-symbol={name}" for name in names), str(target)])

    @staticmethod
    def is_fresh(target: Path, depfile: Path) -> bool:
        if not (target.exists() and depfile.exists()):
            return False
        _, _, dependencies = depfile.read_text().replace("\\\n", " ").partition(": ")
        files = [Path(name.replace("\0", " ")) for name in dependencies.replace("\\ ", "\0").split()]
        built = target.stat().st_mtime
        return all(file.exists() and file.stat().st_mtime < built for file in files)

    @staticmethod
    def is_cuda(ext) -> bool:
        return ext.name.endswith("._cuda")

    @staticmethod
    def call(command: list[str], label: str):
        sys.stderr.write(f"safeops: {label}\n")  # one write: two threads share the stream
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        sys.stderr.write(result.stdout + result.stderr)
        if result.returncode:
            raise SystemExit(f"safeops: failed ({result.returncode}): {label}\n{shlex.join(command)}")


class BuildPy(build_py):
    def run(self):
        # setuptools copies onto what is there: a module deleted since the last wheel would still be packed
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def extensions() -> list[Extension]:
    if flag("SAFEOPS_NO_EXT"):
        return []
    if find_cxx() is None:
        print(
            "safeops: NO C++ COMPILER FOUND: installing without the extension; every op runs its composite "
            "(correct, slower). Install g++ or set CXX, and install again, for the kernels.",
            file=sys.stderr,
        )
        return []
    found = []
    if cpu := sources("csrc/cpu/**/*.cpp", "csrc/module.cpp"):
        found.append(Extension("safeops._C", cpu, py_limited_api=True))
    if sources("csrc/cuda/**/*.cu") and not flag("SAFEOPS_NO_CUDA"):
        if find_cuda():
            cuda = sources("csrc/cuda/**/*.cu", "csrc/cuda/**/*.cpp")
            found.append(Extension("safeops._cuda", cuda, py_limited_api=True))
        else:
            print("safeops: no nvcc found: building without the CUDA kernels", file=sys.stderr)
    return found


ext_modules = extensions()
kernels = ["safeops.kernels", *(f"safeops.kernels.{name}" for name in find_packages("kernels"))]
setup(
    packages=[*find_packages(include=["safeops", "safeops.*"]), *kernels],
    package_dir={"safeops": "safeops", "safeops.kernels": "kernels"},
    package_data={"safeops": ["verified.json", "py.typed"]},
    include_package_data=False,
    ext_modules=ext_modules,
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    # the wheel's tag: cp310-abi3-linux_… with extensions, py3-none-any without
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ext_modules else {},
)
