"""The executor finds planted faults, and passes a correct twin of each."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.kernels.executed import compiling, handwritten, launching, machine
from tests.kernels.executed.handwritten import execute, needs_compiler

# xdist_group: one worker compiles the executor
pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.xdist_group("machine")]
SHARED = ".shared .align 16 .b8 room[1024];"
MINE = "add.s64 %d1, %x, %at; add.s64 %d2, %out, %at;"  # %d1, %d2: addresses of the thread's elements of x and out


def numbers(*shape, dtype=torch.int32):
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=dtype).view(shape)


def found(kind, body, tensors, **options):
    """Assert that executing the body raises a Fault whose text contains `kind`."""
    with pytest.raises(machine.Fault, match=kind):
        execute(body, tensors, **options)


def pair(count=64):
    return {"x": numbers(count), "out": torch.zeros(count, dtype=torch.int32)}


# ---- bounds and alignment


@pytest.mark.parametrize("offset, fault", [(0, None), (4 * 64, "reads out of bounds"), (-16, "reads out of bounds")])
def test_reads_beside_a_tensor(offset, fault):
    body = f"{MINE} ld.global.b32 %r1, [%d1+{offset}]; st.global.b32 [%d2], %r1;"
    execute(body, pair(), grid=2) if fault is None else found(fault, body, pair(), grid=2)


@pytest.mark.parametrize("offset", (4, -4, 4096, -(1 << 40), (1 << 63) - 8))
def test_writes_beside_a_tensor(offset):
    body = f"{MINE} mov.b64 %d3, {{}}; add.s64 %d2, %d2, %d3; st.global.b32 [%d2], 1;"
    execute(body.format(0), pair(32))
    found("writes out of bounds", body.format(offset), pair(32))
    found("writes out of bounds", "atom.global.add.u32 %r1, [%out+128], 1;", pair(32))


def test_a_null_pointer():
    found("reads out of bounds", "mov.b64 %d1, 0; ld.global.b32 %r1, [%d1];", pair())
    found("reads out of bounds", "mov.b64 %d1, -4; ld.global.b32 %r1, [%d1];", pair())
    found("writes out of bounds", "mov.b64 %d1, -4; st.global.b32 [%d1], 0;", pair())


def test_what_lies_behind_an_end_does_not_count():
    """A vector read may cross a tensor's end within an aligned 16 bytes; a result that depends on the bytes beyond is
    found, as they are garbage."""
    body = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x]; st.global.b32 [%out], %rNUMBER;"
    tensors = {"x": numbers(3), "out": torch.zeros(1, dtype=torch.int32)}
    execute(body.replace("NUMBER", "3"), tensors, threads=1, orders=2)
    found("depend on", body.replace("NUMBER", "4"), tensors, threads=1, orders=2)


@pytest.mark.parametrize(
    "access", ("ld.{}.b32 %r1, [{}+{}]", "st.{}.b16 [{}+{}], %h1", "ld.{}.v2.b32 {{%r1, %r2}}, [{}+{}]")
)
@pytest.mark.parametrize("space, base", [("global", "%x"), ("shared", "%r9")])
def test_misaligned(access, space, base):
    body = f"{SHARED} mov.u32 %r9, room; mov.u16 %h1, 0; " + access + ";"
    execute(body.format(space, base, 8), pair(), threads=1)
    found(
        "misaligned", body.format(space, base, 1 if "16" in access else 4 if "v2" in access else 2), pair(), threads=1
    )


@pytest.mark.parametrize("offset", (1024, -4, 1 << 30))
def test_bounds_of_shared_memory(offset):
    for access in ("ld.shared.b32 %r1, [%r9+{}]", "st.shared.b32 [%r9+{}], 1", "atom.shared.add.u32 %r1, [%r9+{}], 1"):
        body = f"{SHARED} mov.u32 %r9, room; {access};"
        execute(body.format(1020), {}, threads=1)
        found("out of bounds of shared memory", body.format(offset), {}, threads=1)


def test_bounds_of_local_memory():
    body = ".local .align 4 .b8 depot[16]; mov.u64 %d1, depot; st.local.b32 [%d1+{}], 1;"
    execute(body.format(12), {})
    found("out of bounds of local memory", body.format(16), {})
    found("out of bounds of local memory", body.format(-4), {})


def test_dynamic_shared_memory_is_as_large_as_the_launch_says():
    text = handwritten.TEXT.replace(".visible .entry", ".extern .shared .align 16 .b8 pool[];\n.visible .entry")
    with mock.patch.object(handwritten, "TEXT", text):
        body = "mov.u32 %r1, pool; mad.lo.s32 %r1, %thread, 4, %r1; st.shared.b32 [%r1], 1;"
        execute(body, {}, shared=128)
        found("out of bounds of shared memory", body, {}, shared=124)


def test_writes_between_the_elements_of_a_view():
    columns = torch.zeros(32, 2, dtype=torch.int32)[:, 0]
    body = "mad.wide.u32 %d1, %thread, 8, %out; st.global.b32 [%d1+{}], 1;"
    execute(body.format(0), {"out": columns})
    found("writes beside the elements", body.format(4), {"out": columns})
    found("writes beside the elements", "st.global.v2.b32 [%out], {1, 1};", {"out": columns}, threads=1)


# ---- races in a block


def meeting(first, second, between, threads=64):
    """Returns PTX in which warp 0 does `first` and warp 1 `second`. between: code of both warps between the two."""
    return f"""
    {SHARED}
    mov.u32 %r9, room; setp.lt.u32 %p1, %thread, 32;
    and.b32 %r8, %thread, 31; mad.lo.s32 %r9, %r8, 4, %r9;
    @%p1 {first}; {between}
    @!%p1 {second};
    """


@pytest.mark.parametrize(
    "first, second, fault",
    [
        ("st.shared.b32 [%r9], %r8", "ld.shared.b32 %r1, [%r9]", "reads what another writes"),
        ("ld.shared.b32 %r1, [%r9]", "st.shared.b32 [%r9], %r8", "overwrites what another reads"),
        ("st.shared.b32 [%r9], 1", "st.shared.b32 [%r9], 2", "overwrites what another writes"),
        ("atom.shared.add.u32 %r1, [%r9], 1", "ld.shared.b32 %r1, [%r9]", "reads what another writes"),
        ("ld.shared.b32 %r1, [%r9]", "atom.shared.add.u32 %r1, [%r9], 1", "overwrites what another reads"),
    ],
)
def test_missing_barrier(first, second, fault):
    execute(meeting(first, second, "bar.sync 0;"), {}, threads=64)
    found(fault, meeting(first, second, ""), {}, threads=64)
    found(fault, meeting(first, second, "bar.warp.sync -1;"), {}, threads=64)
    found(fault, meeting(first, second, "membar.cta;"), {}, threads=64)


def test_what_warps_may_do_without_a_barrier():
    for both in ("atom.shared.add.u32 %r1, [%r9], 1", "st.shared.b32 [%r9], 5", "ld.shared.b32 %r1, [%r9]"):
        execute(meeting(both, both, ""), {}, threads=64)
    execute(meeting("st.shared.b8 [%r9], %h1", "st.shared.b8 [%r9+1], %h1", ""), {}, threads=64)


def test_lanes_that_write_one_address():
    body = "mov.b64 %d1, %out; {} st.global.b32 [%d1], %thread;"
    execute(body.format("add.s64 %d1, %d1, %at;"), {"out": torch.zeros(32, dtype=torch.int32)}, orders=2)
    found("depend on the order", body.format(""), {"out": torch.zeros(32, dtype=torch.int32)}, orders=2)


def test_a_buffer_that_is_used_again():
    """A buffer that is used again needs a barrier between the reads of one round and the writes of the next."""
    body = f"""
    {SHARED}
    mov.u32 %r1, room; mad.lo.s32 %r1, %thread, 4, %r1; xor.b32 %r2, %thread, 32; mov.u32 %r3, room;
    mad.lo.s32 %r3, %r2, 4, %r3; mov.u32 %r4, 0; mov.u32 %r5, 0;
LOOP:
    add.s32 %r6, %thread, %r4; st.shared.b32 [%r1], %r6;
    bar.sync 0;
    ld.shared.b32 %r7, [%r3]; add.s32 %r5, %r5, %r7;
    {{}}
    add.s32 %r4, %r4, 1; setp.lt.s32 %p1, %r4, 4;
    @%p1 bra LOOP;
    {MINE} st.global.b32 [%d2], %r5;
    """
    tensors = pair()
    execute(body.format("bar.sync 0;"), tensors, threads=64, orders=3)
    assert tensors["out"].tolist() == [4 * (k ^ 32) + 6 for k in range(64)]
    found("unordered", body.format(""), tensors, threads=64)


# ---- barriers


def test_barrier_that_lanes_do_not_reach_together():
    body = "setp.lt.u32 %p1, %thread, {}; @%p1 bra LEFT; bar.sync 0; bra JOIN; LEFT: bar.sync 0; JOIN: {}"
    execute(body.format(32, ""), {}, threads=64)
    found("divergent barrier", body.format(16, ""), {}, threads=64)
    found("divergent barrier", "setp.lt.u32 %p1, %thread, 16; @%p1 bar.sync 0;", {}, threads=64)
    execute("setp.lt.u32 %p1, %thread, 16; @%p1 ret; bar.sync 0;", {}, threads=64)


def test_barrier_that_a_warp_does_not_reach():
    """A warp that waits for a write which the other warp makes only after the barrier is found."""
    body = f"""
    {SHARED} setp.ge.u32 %p1, %thread, 32; @%p1 bra WAIT;
SPIN: ld.volatile.global.u32 %r1, [%x]; setp.eq.s32 %p2, %r1, 7; @%p2 bra SPIN;
WAIT: bar.sync 0;
    """
    with mock.patch.object(machine, "MOST_STEPS", 1 << 21):
        execute(body, {"x": torch.tensor([8], dtype=torch.int32)}, threads=64)
        found("more steps", body, {"x": torch.tensor([7], dtype=torch.int32)}, threads=64)


def test_endless_loop():
    with mock.patch.object(machine, "MOST_STEPS", 1 << 21):
        found("more steps", "LOOP: bra LOOP;", {})
        execute("mov.u32 %r1, 0; LOOP: add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 1000; @%p1 bra LOOP;", {})


# ---- unwritten memory


def test_shared_memory_that_nobody_wrote():
    body = f"{SHARED} ld.shared.b32 %r1, [room]; ld.shared.b32 %r2, [room]; {{}} {MINE} st.global.b32 [%d2], %r1;"
    execute(body.format("mov.u32 %r1, 3;"), pair(32), orders=2)
    execute(body.format("and.b32 %r1, %r1, 0;"), pair(32), orders=2)
    found("depend on", body.format(""), pair(32), orders=2)


def test_registers_that_nobody_wrote():
    body = f"{{}} {MINE} st.global.b32 [%d2], %r70;"
    execute(body.format("mov.u32 %r70, 1;"), pair(32), orders=2)
    found("depend on", body.format(""), pair(32), orders=2)


@pytest.mark.parametrize("access", ("ld.global.b32 %r1, [%d1]", "atom.global.add.u32 %r1, [%d1], 1"))
def test_global_memory_that_nobody_wrote(access):
    body = f"{MINE} {{}} {access};"
    execute(body.format(""), pair(32))
    execute(body.format("st.global.b32 [%d1], 0;"), pair(32), fresh=["x"])
    found("reads what nobody wrote", body.format(""), pair(32), fresh=["x"])


def test_a_result_that_is_not_written_whole():
    """A result of which a part is not written is no fault; a later read of that part is one."""
    halves = torch.empty(7, dtype=torch.bfloat16)
    body = "mov.u16 %h1, 5; mad.wide.u32 %d1, %thread, 2, %out; st.global.b16 [%d1], %h1;"
    execute(body, {"out": halves}, threads=4, orders=2, fresh=["out"])
    pattern = machine.GARBAGE[1].to_bytes(4, "little") * 4
    assert halves.view(torch.uint8).numpy().tobytes()[8:] == pattern[8:14]


# ---- blocks


def test_blocks_that_write_one_address():
    body = "setp.eq.u32 %p1, %thread, 0; @%p1 {};"
    out = {"out": torch.zeros(2, dtype=torch.int32)}
    execute(body.format("atom.global.add.u32 %r1, [%out], 1"), out, grid=3, orders=2)
    found("overwrites what another writes", body.format("st.global.b32 [%out], 1"), out, grid=3)
    found("overwrites what another writes", body.format("st.global.b32 [%out], %block"), out, grid=3)


def test_blocks_of_which_one_reads_what_another_writes():
    """A block that reads what another block writes is found, also if it runs first in the first order of the blocks."""
    body = "setp.eq.u32 %p1, %block, 1; @%p1 {}; @!%p1 {};"
    for first, second in (("ld.global.b32 %r1, [%x]", "st.global.b32 [%x], 9"),) * 1:
        found("unordered", body.format(first, second), pair(), grid=2, threads=1, orders=2)
        found("unordered", body.format(second, first), pair(), grid=2, threads=1, orders=2)
        execute(body.format(first, second.replace("%x", "%out")), pair(), grid=2, threads=1, orders=2)


def test_a_result_of_the_order_of_blocks():
    body = "atom.global.add.u32 %r1, [%x], 1; mad.wide.u32 %d1, %block, 4, %out; st.global.b32 [%d1], {};"
    tensors = {"x": torch.zeros(1, dtype=torch.int32), "out": torch.zeros(4, dtype=torch.int32)}
    execute(body.format("%block"), tensors, grid=4, threads=1, orders=2)
    found("depend on the order", body.format("%r1"), tensors, grid=4, threads=1, orders=2)


def test_the_read_only_cache():
    body = f"{MINE} {{}} ld.global{{}}.u32 %r1, [%d1]; st.global.b32 [%d2], %r1;"
    execute(body.format("", ".nc"), pair(32))
    execute(body.format("st.global.b32 [%d1], 5;", ""), pair(32))
    found("read-only cache", body.format("st.global.b32 [%d1], 5;", ".nc"), pair(32))


# Every block writes a number, and the last block adds them up: thread 0 counts the blocks, and a barrier passes its
# count to the block's other threads.
LAST_BLOCK = f"""
    {SHARED}
    mad.wide.u32 %d1, %block, 4, %parts;
    add.s32 %r1, %block, 100;
    setp.eq.u32 %p1, %thread, 37;
    @%p1 st.global.b32 [%d1], %r1;
    {{before}}
    setp.eq.u32 %p2, %thread, 0;
    mov.u32 %r2, 0;
    @!%p2 bra COUNTED;
    {{count}}
    st.shared.b32 [room], %r2;
COUNTED:
    bar.sync 0;
    ld.shared.b32 %r2, [room];
    {{after}}
    setp.ne.u32 %p3, %r2, 3;
    @%p3 ret;
    ld.global.b32 %r3, [%parts]; ld.global.b32 %r4, [%parts+4];
    ld.global.b32 %r5, [%parts+8]; ld.global.b32 %r6, [%parts+12];
    add.s32 %r3, %r3, %r4; add.s32 %r5, %r5, %r6; add.s32 %r3, %r3, %r5;
    @%p2 st.global.b32 [%out], %r3;
    @%p2 st.global.b32 [%counter], 0;
"""


def last_block(before, count, after=""):
    body = LAST_BLOCK.format(before=before, count=count, after=after)
    tensors = {"parts": torch.zeros(4, dtype=torch.int32), "counter": torch.zeros(1, dtype=torch.int32)}
    tensors["out"] = torch.zeros(1, dtype=torch.int32)
    execute(body, tensors, grid=4, threads=64, orders=3, fresh=["parts", "out"])
    assert tensors["out"].item() == 406 and tensors["counter"].item() == 0


COUNT = "atom.global.gpu.{}.add.u32 %r2, [%counter], 1;"
RELAXED = "atom.global.add.u32 %r2, [%counter], 1;"


@pytest.mark.parametrize(
    "before, count",
    [
        ("bar.sync 0;", COUNT.format("acq_rel")),
        ("bar.sync 0;", f"membar.gl; {RELAXED} membar.gl;"),
        ("membar.gl; bar.sync 0;", f"membar.gl; {RELAXED} fence.acq_rel.gpu;"),
        ("bar.sync 0;", COUNT.format("release") + " fence.acq_rel.gpu;"),
        ("bar.sync 0;", "fence.acq_rel.gpu;" + COUNT.format("acquire")),
    ],
)
def test_last_block(before, count):
    last_block(before, count)


@pytest.mark.parametrize(
    "before, count, after",
    [
        ("", COUNT.format("acq_rel"), ""),  # no barrier between the block's writes and its count
        ("bar.sync 0;", COUNT.format("relaxed"), ""),
        ("bar.sync 0;", COUNT.format("release"), ""),
        ("bar.sync 0;", COUNT.format("acquire"), ""),
        ("bar.sync 0;", f"{RELAXED} membar.gl;", ""),  # the fence comes after the count: too late
        ("bar.sync 0;", f"membar.gl; {RELAXED}", ""),
        ("bar.sync 0;", f"membar.cta; {RELAXED} membar.cta;", ""),
        ("membar.gl; bar.sync 0;", f"{RELAXED} membar.gl;", ""),  # each thread's fence orders its own writes only
        ("", f"membar.gl; {RELAXED} membar.gl;", ""),
    ],
)
def test_last_block_without_order(before, count, after):
    with pytest.raises(machine.Fault, match="reads what another writes, unordered"):
        last_block(before, count, after)


def test_atomics_in_shared_memory_order_no_blocks():
    body = f"""
    {SHARED}
    atom.shared.add.u32 %r1, [room], 1; membar.gl;
    st.global.b32 [%out], %block; membar.gl;
    atom.shared.add.u32 %r1, [room], 1;
    """
    found("overwrites what another writes", body, pair(), grid=2, threads=1)


def test_acquire_elsewhere():
    """An acquire at one address does not make visible what was released at a second address, though that was read
    before."""
    body = """
    setp.eq.u32 %p1, %block, 1; @%p1 bra READ;
    st.release.gpu.global.b32 [%other], 1; st.global.b32 [%x], 5; st.release.gpu.global.b32 [%flag], 1; ret;
READ: ld.{}.gpu.global.b32 %r1, [%flag]; ld.acquire.gpu.global.b32 %r2, [%other];
    setp.eq.u32 %p2, %r1, 0; @%p2 ret;
    ld.global.b32 %r3, [%x];
    """
    tensors = {name: torch.zeros(1, dtype=torch.int32) for name in ("x", "flag", "other")}
    execute(body.format("acquire"), tensors, grid=2, threads=1)
    found(
        "reads what another writes",
        body.format("relaxed"),
        {k: t.zero_() for k, t in tensors.items()},
        grid=2,
        threads=1,
    )


# ---- asynchronous copies and products


def test_asynchronous_copy_that_is_not_waited_for():
    body = f"""
    {SHARED} {MINE} mov.u32 %r1, room; mad.lo.s32 %r1, %thread, 4, %r1;
    cp.async.ca.shared.global [%r1], [%d1], 4; cp.async.commit_group;
    {{}}
    xor.b32 %r2, %thread, 33; mov.u32 %r3, room; mad.lo.s32 %r3, %r2, 4, %r3;
    ld.shared.b32 %r4, [%r3]; st.global.b32 [%d2], %r4;
    """
    tensors = pair()
    execute(body.format("cp.async.wait_group 0; bar.sync 0;"), tensors, threads=64, orders=2)
    assert tensors["out"].tolist() == [1 + (k ^ 33) for k in range(64)]
    execute(body.format("cp.async.wait_all; bar.sync 0;"), tensors, threads=64, orders=2)
    for between in (
        "bar.sync 0;",
        "cp.async.wait_group 1; bar.sync 0;",
        "cp.async.wait_group 0;",
        "bar.sync 0; cp.async.wait_group 0;",
    ):
        found("depend on|unordered", body.format(between), tensors, threads=64, orders=2)


def test_asynchronous_copy_onto_what_is_still_read():
    """An asynchronous copy may write as soon as it is issued, so a barrier before its wait does not protect earlier
    reads."""
    body = f"""
    {SHARED} setp.lt.u32 %p1, %thread, 32; {MINE} mov.u32 %r1, room; and.b32 %r2, %thread, 31;
    mad.lo.s32 %r1, %r2, 4, %r1;
    @!%p1 ld.shared.b32 %r3, [%r1];
    {{}}
    @%p1 cp.async.ca.shared.global [%r1], [%d1], 4;
    bar.sync 0;
    cp.async.wait_all;
    """
    execute(body.format("bar.sync 0;"), pair(), threads=64)
    found("unordered", body.format(""), pair(), threads=64, orders=2)


def test_groups_of_copies_and_products_are_counted_apart():
    body = f"""
    {SHARED} {MINE} mov.u32 %r1, room; mad.lo.s32 %r1, %thread, 4, %r1;
    cp.async.ca.shared.global [%r1], [%d1], 4; cp.async.commit_group;
    {{}} 0;
    ld.shared.b32 %r4, [%r1]; st.global.b32 [%d2], %r4;
    """
    execute(body.format("cp.async.wait_group"), pair(), orders=2)
    found("depend on", body.format("wgmma.wait_group.sync.aligned"), pair(), orders=2)


# A (64, 16) and B (16, 8) are ones: A in registers that hold two each, B in shared memory. The result is D (64, 8).
PRODUCT = f"""
    .shared .align 1024 .b8 room[2048];
    mov.u32 %r1, room; mad.lo.s32 %r1, %thread, 4, %r1;
    mov.u32 %r2, 0x3C003C00; st.shared.b32 [%r1], %r2; st.shared.b32 [%r1+512], %r2;
    {{fence}}
    {{barrier}}
    mov.b64 %d3, {1 << 62 | 64 << 32:#x}; mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{{%r4, %r5, %r6, %r7}}}},
        {{{{%r2, %r2, %r2, %r2}}}}, %d3, 0, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    {{wait}}
    add.s64 %d2, %out, %at; st.global.b32 [%d2], %r4;
    {{late}}
"""
RIGHT = {
    "fence": "fence.proxy.async.shared::cta;", "barrier": "bar.sync 0;", "wait": "wgmma.wait_group.sync.aligned 0;",
    "late": "",
}  # fmt: skip


def product(**parts):
    tensors = {"out": torch.zeros(128)}
    execute(PRODUCT.format(**RIGHT | parts), tensors, threads=128, orders=2)
    assert (tensors["out"] == 16).all(), "the product is not there yet"


def test_product():
    product()
    product(fence="", barrier="bar.sync 0; fence.proxy.async.shared::cta;")
    late = "wgmma.wait_group.sync.aligned 0;"
    with pytest.raises(AssertionError, match="not there yet"):
        product(wait="", late=late)
    with pytest.raises(machine.Fault, match="no fence.proxy.async"):
        product(fence="")
    with pytest.raises(machine.Fault, match="no fence.proxy.async"):
        product(fence="bar.sync 0;", barrier="st.shared.b32 [%r1], %r2; bar.sync 0;")
    with pytest.raises(machine.Fault, match="reads what another writes"):
        product(barrier="")
    with pytest.raises(machine.Fault, match="reads what another writes"):  # the barrier comes after the product
        product(barrier="", wait="bar.sync 0; wgmma.wait_group.sync.aligned 0;")
    with pytest.raises(machine.Fault, match="overwrites|reads what"):  # B's memory is written again too early
        product(wait="st.shared.b32 [%r1], 0; wgmma.wait_group.sync.aligned 0;")


# ---- lanes


def test_shuffle_from_a_lane_that_does_not_take_part():
    body = f"""
    setp.lt.u32 %p1, %thread, 16; mov.u32 %r0, %thread;
    @%p1 shfl.sync.idx.b32 %r0, %thread, {{}}, 31, 0xFFFF;
    {MINE} st.global.b32 [%d2], %r0;
    """
    execute(body.format(15), pair(32), orders=2)
    found("depend on", body.format(16), pair(32), orders=2)


def test_shuffle_that_lanes_do_not_reach():
    """A shuffle that not all of its lanes reach is found: one half of the warp waits in it, the other half in
    another."""
    body = """
    setp.lt.u32 %p1, %thread, 16;
    @%p1 bra LEFT;
    shfl.sync.bfly.b32 %r1, %thread, 1, 31, {};
    bra JOIN;
LEFT: shfl.sync.bfly.b32 %r1, %thread, 1, 31, {};
JOIN:
    """
    execute(body.format("0xFFFF0000", "0xFFFF"), {})
    found("wait for each other", body.format("-1", "-1"), {})


# ---- launches


def launched(body, counter):
    """Execute a plan with this kernel through launching.py; returns the recorded launches."""
    text = handwritten.TEXT.format(
        functions="", body=body, parameters=".param .u64 counter", pointers=", %counter",
        loads="ld.param.u64 %counter, [counter];",
    )  # fmt: skip
    plan = SimpleNamespace(
        kernel=SimpleNamespace(pointers=["counter"], fn=SimpleNamespace(__name__="kernel")), grid=(2, 1, 1),
        arguments=lambda pointers, floats: pointers, template=["*i32"],
    )  # fmt: skip
    executor = launching.Executor(90, "none", 2, 0)
    with mock.patch.object(compiling, "compiled", lambda *_: compiling.Binary(text, 1, 0)), executor.fresh:
        executor.launch(plan, [counter()], None)
    return executor.launches


def test_counters_that_are_left():
    pytest.importorskip("triton")
    body = "setp.eq.u32 %p1, %thread, 0; @!%p1 ret; atom.global.gpu.acq_rel.add.u32 %r1, [%counter], 1; {}"
    reset = "setp.eq.u32 %p2, %r1, 1; @%p2 st.global.b32 [%counter], 0;"
    assert [x.steps > 0 for x in launched(body.format(reset), lambda: torch.zeros(1, dtype=torch.int32))] == [True]
    with pytest.raises(machine.Fault, match="counters are not zero"):
        launched(body.format(""), lambda: torch.zeros(1, dtype=torch.int32))


def test_a_launch_that_reads_what_torch_left_empty():
    pytest.importorskip("triton")
    body = "{} mad.wide.u32 %d1, %thread, 4, %counter; atom.global.add.u32 %r1, [%d1], 0;"
    write = "mad.wide.u32 %d1, %thread, 4, %counter; setp.eq.u32 %p1, %block, 0; st.global.b32 [%d1], 0;"
    launched(body.format(""), lambda: torch.empty(32, dtype=torch.int32).zero_())
    launched(write.replace("st.", "@%p1 st."), lambda: torch.empty(64, dtype=torch.int32))  # half unused
    with pytest.raises(machine.Fault, match="reads what nobody wrote"):
        launched(body.format(""), lambda: torch.empty(32, dtype=torch.int32))
