"""Makes and runs small kernels written in PTX, for the tests of the executor."""

import pytest
import torch

from tests.kernels.executed import machine

needs_compiler = pytest.mark.skipif(not machine.available(), reason="needs g++")

# Registers: %thread: the thread's number in its block; %block: the block's number; %index: the thread's number in the
# launch; %at: 4 %index, a byte offset.
TEXT = """
.version 8.7
.target sm_90a
.address_size 64
{functions}
.visible .entry kernel({parameters})
{{
    .reg .pred %p<16>;
    .reg .b16 %h<32>;
    .reg .b32 %r<80>, %thread, %block, %size, %index;
    .reg .b64 %d<32>, %at{pointers};
    {loads}
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mad.lo.s32 %index, %block, %size, %thread;
    mul.wide.u32 %at, %index, 4;
{body}
    ret;
}}
"""


def program(body, names=(), functions=""):
    """Returns a kernel with this body. Each name in `names` is a pointer parameter, which is in the register %name."""
    return machine.Program(
        TEXT.format(
            functions=functions,
            body=body,
            parameters=", ".join(f".param .u64 {name}" for name in names),
            pointers="".join(f", %{name}" for name in names),
            loads=" ".join(f"ld.param.u64 %{name}, [{name}];" for name in names),
        )
    )


def execute(body, tensors, *, grid=1, threads=32, orders=1, functions="", fresh=(), **options):
    """Run a kernel with this body on {name: tensor}. fresh: names of the tensors that count as unwritten memory. Raises
    machine.Fault."""
    kernel = body if isinstance(body, machine.Program) else program(body, tensors, functions)
    operands = machine.Operands(tensors.items(), {tensors[name].untyped_storage().data_ptr() for name in fresh})
    launch = machine.run if orders == 1 else machine.run_in_orders
    options |= {"orders": orders} if orders > 1 else {}
    params = kernel.pack([t.data_ptr() for t in tensors.values()])
    launch(kernel, operands, params, (grid, 1, 1), (threads, 1, 1), **options)


def lanes(body, *columns, dtype=torch.int32, **options):
    """Runs the body in one warp. Thread i gets element i of each column in %r1, %r2, ...; returns every thread's
    %r0."""
    names = [f"x{k}" for k in range(len(columns))]
    tensors = dict(zip(names, (torch.as_tensor(column, dtype=torch.int64).to(torch.int32) for column in columns)))
    tensors["out"] = torch.zeros(32, dtype=torch.int32)
    loads = "".join(f"add.s64 %d0, %{n}, %at; ld.global.u32 %r{k}, [%d0];\n" for k, n in enumerate(names, 1))
    execute(f"{loads}{body}\nadd.s64 %d0, %out, %at; st.global.u32 [%d0], %r0;", tensors, **options)
    return tensors["out"].tolist()
