"""A stand-in for a GPU's driver, to measure the host time of a call without a GPU. Calls on CPU tensors run the
launchers of the Triton kernels. The kernels are compiled, and launched into a libcuda that does nothing. The measured
time lacks that of the driver and of the CUDA allocator. Install the stand-in in a process of its own."""

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
    """Returns why no stand-in can be made here, or None if one can."""
    try:
        import triton.backends.nvidia.driver  # noqa: F401
    except ImportError:
        return "Triton is not installed"
    if importlib.util.find_spec("safeops._C") is None:
        return "the extension is not built"
    return None if shutil.which("gcc") else "there is no gcc"


def install(folder: Path):
    """Compile the libcuda into this folder, and make torch and Triton use it as the driver of a GPU. Returns (the torch
    Library of the kernels, which the caller must keep alive; the launchers)."""
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

    # C functions that return a number: as fast as the functions of torch that they replace
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
        warnings.simplefilter("ignore")  # torch warns that the C++ kernels are overridden
        for launcher in lazy:
            library.cache_launches(launcher, getattr(torch.ops.safeops, f"_{launcher.name}").default, kernels, "CPU")
    for record in registry.values():  # ops that have only Triton kernels run on the CPU now
        for op in (record, *record.parts):
            op.cpu = op.cpu or bool(op.raw) and all(library.has_kernel(name, "CPU") for name in op.raw)
    return kernels, lazy  # freeing `kernels` unregisters them


# ---- the stand-in for C++ ops: this build's objects, linked with a CUDA runtime that does nothing


def objects() -> list[Path]:
    """Returns the latest object file of each source in csrc/cuda; empty if this build has none."""
    results = {}
    for path in sorted(ROOT.glob("build/ninja/*/csrc/cuda/**/*.o"), key=lambda path: path.stat().st_mtime):
        results[path.relative_to(ROOT / "build/ninja").parts[1:]] = path
    return [path for parts, path in results.items() if ROOT.joinpath(*parts).with_suffix("").is_file()]


def install_cuda(folder: Path):
    """Make calls on CPU tensors run the host code of the C++ kernels for CUDA, with a runtime that does nothing."""
    import torch

    library, torch_libraries = folder / "standin_cuda.so", Path(torch.__file__).with_name("lib")
    runtime = ["gcc", "-O2", "-w", "-fPIC", "-c", RUNTIME, "-o", folder / "runtime.o"]
    link = ["g++", "-shared", folder / "runtime.o", *objects(), "-Wl,-Bsymbolic", f"-L{torch_libraries}"]
    subprocess.run(runtime, check=True)
    subprocess.run([*link, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-o", library], check=True)
    import safeops  # noqa: F401  (registers the CPU kernels, which the library below overrides)

    torch.ops.load_library(library)
