"""Runs launchers on CPU tensors as on a GPU, and executes the launches that they plan.

with executed(arch=90) as launches:
    cross_entropy_reduced(x, target)     # a launcher, called with CPU tensors
with executed() as launches, on_launchers():
    safeops.cross_entropy(x, target)     # a public function, which runs the GPU's kernels
"""

import contextlib
import copy
from unittest import mock

import numpy as np
import torch

from safeops.core import private_torch
from tests.kernels.executed import compiling, machine

UNUSED = torch.tensor([0, *machine.GARBAGE], dtype=torch.int64).to(torch.int32)


class Fresh(private_torch.TorchDispatchMode):
    """Keeps the storages that nobody has written: those of torch.empty and the like, until torch or a kernel writes
    them."""

    def __init__(self):
        super().__init__()
        self.storages = {}  # address: tensor, which keeps the address from being reused

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function._schema.name.partition("::")[2].startswith(("empty", "new_empty")):
            self.storages[result.untyped_storage().data_ptr()] = result
        for argument, value in zip(function._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.storages.pop(value.untyped_storage().data_ptr(), None)
        return result


class Executor:
    def __init__(self, arch, version, orders, bias):
        self.arch, self.version, self.orders, self.bias = arch, version, orders, bias
        self.fresh, self.launches = Fresh(), []

    @private_torch.disable_modes()  # else Fresh would record this method's own operations
    def launch(self, plan, tensors, addresses, *floats):
        """Executes a plan; it replaces Plan.__call__, which launches it."""
        from safeops.kernels.engine.operand import is_constant, leaves

        names = plan.kernel.pointers
        binary = compiling.compiled(plan, self.arch, self.version)
        program = self.program(binary)
        arguments = plan.arguments([0 if t is None else t.data_ptr() for t in tensors], floats)
        kinds = [kind for _, kind in leaves(plan.template)]
        values = [x for (_, x), kind in zip(leaves(arguments), kinds) if not is_constant(kind)]
        kinds = [kind for kind in kinds if not is_constant(kind)]
        values = [np.float64(x).view(np.uint64) if kind == "fp64" else x for x, kind in zip(values, kinds)]
        # Triton may add up to two parameters for scratch memory.
        if len(program.parsed.params) - len(values) not in (0, 1, 2):
            raise AssertionError(f"{program.parsed.name} takes {len(program.parsed.params)}, not {len(values)}")
        operands = machine.Operands(zip(names, tensors), self.fresh.storages)
        steps = machine.run_in_orders(
            program, operands, program.pack(map(int, values)), plan.grid, (binary.warps * 32, 1, 1), binary.shared,
            orders=self.orders, bias=self.bias,
        )  # fmt: skip
        for start in operands.watched:
            self.fresh.storages.pop(start, None)
        for name, tensor in zip(names, tensors):
            # A used counter must be 0 again. Counters that no block uses keep their initial garbage, UNUSED.
            if name == "counter" and tensor is not None and not torch.isin(tensor, UNUSED).all():
                raise machine.Fault(f"{program.parsed.name}: its counters are not zero after the launch")
        launched = plan.kernel.fn.__name__, plan.grid, binary.warps * 32, binary.shared, operands.wide, steps
        self.launches.append(machine.Launched(*launched))

    programs = {}  # {PTX: Program}, for the whole process

    def program(self, binary):
        if binary.ptx not in self.programs:
            self.programs[binary.ptx] = machine.Program(binary.ptx)
        return self.programs[binary.ptx]


@contextlib.contextmanager
def planned(call, arch=90):
    """Context manager: launches are planned for this architecture and call call(plan, tensors, addresses, *floats)."""
    from safeops.kernels.engine import launch

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch.Plan, "__call__", call))
        stack.enter_context(mock.patch.object(launch, "arch_of", lambda device: arch))
        stack.enter_context(mock.patch.dict(launch._plans, clear=True))
        yield


@contextlib.contextmanager
def executed(arch=90, version=None, orders=machine.ORDERS, bias=0):
    """Context manager: plans are executed instead of launched. Yields the list of their launches.

    version: Triton's version; None: the pinned one. orders: how many orders of blocks and warps must give the same
    bits. bias: -1 or 1 moves each approximate instruction's result down or up by the largest error that the ISA
    allows."""
    executor = Executor(arch, version or compiling.pinned(), orders, bias)

    def call(plan, *arguments):
        executor.launch(plan, *arguments)

    with planned(call, arch), executor.fresh:
        yield executor.launches


@contextlib.contextmanager
def on_launchers():
    """Context manager: public functions call the GPU's launchers where they would call the CPU's kernels."""
    from safeops.core import library
    from safeops.core.autograd import autograd_function
    from safeops.core.op import Op, registry

    with contextlib.ExitStack() as stack:
        for op in {id(op): op for each in registry.values() for op in (each, *each.parts)}.values():
            if isinstance(op, Op) and op.forward in library.launchers:
                routed = copy.copy(op)
                routed.forward, routed.backward = map(library.launchers.get, (op.forward, op.backward))
                routed.save = private_torch.save_directly
                recorded = private_torch.direct_apply(autograd_function(routed))
                stack.enter_context(mock.patch.object(op, "cpu", True))
                stack.enter_context(mock.patch.object(op, "eager", [(routed.forward, False), (recorded, False)]))
        yield
