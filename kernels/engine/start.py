"""How a compiled kernel is started: by the function in C that Triton's own launcher calls.

`compiled[grid](...)` spends three quarters of its time on what no call changes: it asks for the device, prepares what
hooks would read that nobody has set, calls those hooks, and asks the driver about each pointer that comes as a tensor.
"""

import triton
from triton import knobs
from triton.runtime import driver

RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))


def current_stream(index):
    """The handle of a device's current stream."""
    return driver.active.get_current_stream(index)


def starter(compiled, index):
    """start(grid, arguments), on the current stream of device `index`: pointers as addresses, constants in place.

    In Triton's own way where somebody, such as its profiler, is to be told of every launch, or Triton is another."""

    def slowly(grid, arguments):
        compiled[grid](*arguments)

    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if type(run).__module__ != "triton.backends.nvidia.driver" or RELEASE not in ((3, 6), (3, 7)) or _has_scratch(run):
        return slowly
    hooks, stream, launch = knobs.runtime, driver.active.get_current_stream, run.launch
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl

    def start_3_6(grid, arguments):
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return slowly(grid, arguments)
        launch(
            *grid, stream(index), function, cooperative, dependent, None, None, metadata, None, None, None, *arguments
        )

    if RELEASE == (3, 6):
        return start_3_6
    kinds, signature = run.arg_annotations, run.kernel_signature

    def start_3_7(grid, arguments):
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return slowly(grid, arguments)
        launch(*grid, stream(index), function, cooperative, dependent, metadata, None, None, None, None, None, kinds,
               signature, arguments)  # fmt: skip

    return start_3_7


def _has_scratch(run):
    return run.global_scratch_size > 0 or run.profile_scratch_size > 0
