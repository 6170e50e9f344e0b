"""A stand-in for a GPU's driver: CPU tensors take the launchers of the Triton kernels, which are compiled and, by
Triton's own launcher, launched into a libcuda that does nothing. What a call costs its caller, but for the driver's and
the CUDA allocator's own time, can be measured so without a GPU. For a process of its own."""

import ctypes
import importlib.util
import itertools
import os
import shutil
import subprocess
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, RUNTIME = (Path(__file__).with_name(name) for name in ("standin.c", "standin_cuda.c"))
ARCH = 90


def unusable() -> str | None:
    """Why there can be no stand-in here, or None."""
    try:
        import triton.backends.nvidia.driver  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    if importlib.util.find_spec("safeops._C") is None:
        return "the extension is not built"
    return None if shutil.which("gcc") else "there is no gcc"


def install(folder: Path):
    """Compile the libcuda into this folder, and have torch and Triton take it for the driver of a GPU."""
    libcuda = folder / "libcuda.so.1"
    command = ["gcc", "-O2", "-w", "-shared", "-fPIC", f"-Wl,-soname,{libcuda.name}", "-o", libcuda, SOURCE]
    subprocess.run(command, check=True)
    (folder / "libcuda.so").symlink_to(libcuda.name)
    os.environ["TRITON_LIBCUDA_PATH"], os.environ["TRITON_CACHE_DIR"] = str(folder), str(folder / "cache")
    ctypes.CDLL(libcuda, mode=ctypes.RTLD_GLOBAL)  # Triton's launcher opens it by its name
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    # as quick as what they stand for: functions in C that look a number up
    torch.cuda.current_device, torch.cuda.is_current_stream_capturing = itertools.repeat(0).__next__, bool
    torch._C._cuda_getCurrentRawStream = {0: 0}.__getitem__
    torch.cuda.get_device_capability = lambda device=None: divmod(ARCH, 10)
    driver.set_active(CudaDriver())

    from safeops.kernels.engine import launch, start

    from safeops.core import library
    from safeops.core.op import registry

    start.TORCH = libcuda
    launch.gpu_target = lambda index: GPUTarget("cuda", ARCH, 32)
    launch.gpu_index = lambda device: 0
    lazy = list(library.launchers.values())
    kernels = torch.library.Library("safeops", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the C++ kernels are overridden
        for launcher in lazy:
            library.cache_launches(launcher, getattr(torch.ops.safeops, f"_{launcher.name}").default, kernels, "CPU")
    for record in registry.values():  # those whose kernels are Triton's alone run on the CPU now
        for op in (record, *record.parts):
            op.cpu = op.cpu or bool(op.raw) and all(library.has_kernel(name, "CPU") for name in op.raw)
    return kernels, lazy  # to be kept: the kernels go with the library


# ---- the same of the C++ ops: our objects, linked with a CUDA runtime that does nothing


def objects() -> list[Path]:
    """The latest object of each file of csrc/cuda; none where this build is without."""
    results = {}
    for path in sorted(ROOT.glob("build/ninja/*/csrc/cuda/**/*.o"), key=lambda path: path.stat().st_mtime):
        results[path.relative_to(ROOT / "build/ninja").parts[1:]] = path
    return [path for parts, path in results.items() if ROOT.joinpath(*parts).with_suffix("").is_file()]


def install_cuda(folder: Path):
    """Have the C++ kernels for CUDA in the place of those for CPUs."""
    import torch

    library, torch_libraries = folder / "standin_cuda.so", Path(torch.__file__).with_name("lib")
    runtime = ["gcc", "-O2", "-w", "-fPIC", "-c", RUNTIME, "-o", folder / "runtime.o"]
    link = ["g++", "-shared", folder / "runtime.o", *objects(), "-Wl,-Bsymbolic", f"-L{torch_libraries}"]
    subprocess.run(runtime, check=True)
    subprocess.run([*link, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-o", library], check=True)
    import safeops  # noqa: F401  (whose CPU kernels are overridden)

    torch.ops.load_library(library)
