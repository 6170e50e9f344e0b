"""Starts compiled kernels through the extension (csrc/launch), which then launches calls like it without Python.

Triton's own way, `compiled[grid](...)`, asks for the device, prepares arguments for launch hooks that nobody has set,
calls those hooks, and asks the driver about each pointer that comes as a tensor: three quarters of its time.
"""

import ctypes
from array import array
from functools import cache

import triton
from triton import knobs
from triton.runtime import driver

from safeops.core.library import cpu_extension

RELEASES = ((3, 6), (3, 7))  # releases whose kernels take two scratch addresses after their arguments
CUDA, TORCH = "libcuda.so.1", "libtorch_cuda.so"  # both are loaded already


def current_stream(index):
    """The handle of a device's current stream."""
    return driver.active.get_current_stream(index)


def starter(compiled, index, places):
    """Returns start(plan, addresses, floats), which launches on the current stream of device `index`. places: each
    kernel parameter's index among the words of a launch (Plan.places).

    start launches in Triton's own way if the extension cannot, or if launch hooks are set, as by a profiler."""

    def slowly(plan, addresses, floats):
        compiled[plan.grid](*plan.arguments(addresses, floats))

    run, function, metadata, hooks = compiled.run, compiled.function, compiled.metadata, knobs.runtime
    if cpu_extension is None or not _plain(run, metadata):
        return slowly
    connect()
    launch, threads, shared = cpu_extension.launch, metadata.num_warps * 32, metadata.shared

    def start(plan, addresses, floats):
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return slowly(plan, addresses, floats)
        present, tail, split, apart = plan.words
        pointers = array("Q", [addresses[i] for i in present]).tobytes()
        words = b"".join((pointers, array("d", flat(floats)).tobytes(), tail))
        if launch(function, plan.grid, threads, shared, index, len(present), split, apart, words, places):
            slowly(plan, addresses, floats)  # Triton handles a missing context, and names the error

    return start


def _plain(run, metadata):
    """True if the extension knows this release of Triton, and a launch takes nothing but a grid and arguments."""
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    special = (run.global_scratch_size, run.profile_scratch_size, run.launch_cooperative_grid, run.launch_pdl)
    ours = type(run).__module__ == "triton.backends.nvidia.driver" and release in RELEASES
    return ours and not any(special) and metadata.num_ctas == 1


@cache
def connect():
    """Pass the addresses of the driver's functions and Triton's lists of launch hooks to the extension."""
    cuda, torch = ctypes.CDLL(CUDA), ctypes.CDLL(TORCH)
    functions = (cuda.cuLaunchKernelEx, cuda.cuStreamIsCapturing, cuda.cuCtxGetDevice,
                 torch.aoti_torch_get_current_cuda_stream)  # fmt: skip
    hooks = (knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls)
    cpu_extension.use_driver(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions), *hooks)


def share(index, stream, partials, counters):
    """Register the buffers that the launches of a stream share with the extension."""
    if cpu_extension is not None:
        cpu_extension.keep_buffers(index, stream, partials.data_ptr(), counters.data_ptr())


def flat(values):
    """Yields the numbers in `values`, and those in its tuples and lists."""
    for x in values:
        if isinstance(x, (tuple, list)):
            yield from x
        else:
            yield x
