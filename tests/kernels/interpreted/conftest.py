"""Fixtures of the interpreted tests. test_triton_interpreter.py runs this folder in a process with TRITON_INTERPRET=1;
without that variable pytest collects nothing here."""

import importlib
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.executed.launching import on_launchers

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def patched_once():
    """Patches Triton's language once. The interpreter does so at every call of a jit function, even within a kernel,
    and takes most of its time for it. Nothing else in the process needs the unpatched language."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    with pytest.MonkeyPatch.context() as patch:
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda fn: SimpleNamespace(restore=lambda: None))
        yield


@pytest.fixture(autouse=True, scope="session")
def made_once():
    """Makes each object that depends on a type or shape alone only once, and skips broadcasts between equal shapes. The
    interpreter would spend most of its time on both."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter
    from triton.language.semantic import TritonSemantic

    block, np_dtype, broadcast = tl.block_type.__init__, interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
    blocks, shapes, dtypes, constants = {}, {}, {}, {}

    def init_block(self, element_ty, shape):
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def get_np_dtype(kind):
        if kind.name not in dtypes:
            dtypes[kind.name] = np_dtype(kind)
        return dtypes[kind.name]

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = type.shape if type.is_block() else ()
        if id(shape) not in constants:
            constants[id(shape)] = shape, tl.tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))
        _, self.shape, self.numel = constants[id(shape)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", get_np_dtype)
        patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_impl_value)
        patch.setattr(tl.tensor, "__init__", init_tensor)
        patch.setattr(tl.block_type, "__init__", init_block)
        yield


EXACTLY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@pytest.fixture(autouse=True, scope="session")
def integers_fit():
    """Raises an error if arithmetic of narrow integers overflows. It replaces the interpreter's own check, which takes
    half of the time, and whose final assertion is switched off."""
    from triton.language.semantic import TritonSemantic

    def check(self, lhs, rhs, operation):
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            exact = EXACTLY[operation.__name__](*(np.asarray(t.handle.data, np.int64) for t in (lhs, rhs)))
            fits = kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value()
            assert fits, f"{operation.__name__} overflows {kind}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check)
        yield


@pytest.fixture(autouse=True, scope="session")
def unread_is_garbage():
    """Fills the lanes that a load masks out without `other` with NaN, True or the largest integer. On a GPU they are
    undefined, in the plain interpreter 0."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self, ptrs, mask, other, *options):
        if other is None:
            kind = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(kind)
            if kind.is_bf16():  # the interpreter stores bf16 as its bits
                garbage = 0x7FC0
            elif np.issubdtype(dtype, np.integer):
                garbage = np.iinfo(dtype).max
            else:
                garbage = np.nan  # becomes True for bool
            other = interpreter.TensorHandle(np.full_like(ptrs.data, garbage, dtype=dtype), kind)
        return load(self, ptrs, boolean(mask), other, *options)

    # In the interpreter `block & scalar` gives integers, which Triton 3.9 and later refuse as a mask.
    def boolean(mask):
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    def create_masked_store(self, ptrs, value, mask, *options):
        return store(self, ptrs, value, boolean(mask), *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", create_masked_load)
        patch.setattr(builder, "create_masked_store", create_masked_store)
        yield


@pytest.fixture(autouse=True, scope="session")
def accesses_are_in_bounds():
    """Raises an error if an access is outside of the storages of the launch's tensors. A read may extend to the aligned
    16 bytes around it, since unaligned rows are read in words."""
    import triton.runtime.interpreter as interpreter
    from safeops.kernels.engine import launch

    builder, call, storages = interpreter.InterpreterBuilder, launch.Plan.__call__, []
    load, store = builder.create_masked_load, builder.create_masked_store

    def noted(plan, tensors, *arguments):
        tensors = list(tensors)
        each = [t.untyped_storage() for t in tensors if t is not None]
        storages[:] = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in each]
        try:
            return call(plan, tensors, *arguments)
        finally:
            storages.clear()  # else they would apply to a test's own kernel, launched without a plan

    def check(pointers, mask, word):
        places = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        if places.size and storages:
            size = (pointers.get_element_ty().primitive_bitwidth + 7) // 8
            first, end = int(places.min()), int(places.max()) + size
            inside = (start // word * word <= first and end <= -(-stop // word) * word for start, stop in storages)
            assert any(inside), f"bytes {first} to {end} of {storages}"

    def create_masked_load(self, ptrs, mask, *options):
        check(ptrs, mask, 16)
        return load(self, ptrs, mask, *options)

    def create_masked_store(self, ptrs, value, mask, *options):
        check(ptrs, mask, 1)
        return store(self, ptrs, value, mask, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Plan, "__call__", noted)
        patch.setattr(builder, "create_masked_load", create_masked_load)
        patch.setattr(builder, "create_masked_store", create_masked_store)
        yield


@pytest.fixture(autouse=True, scope="session")
def fused_once():
    """Makes tl.fma round only the sum, as on a GPU, by fp64 arithmetic. The interpreter's own fma also rounds the
    product."""
    import triton.runtime.interpreter as interpreter

    def create_fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
        yield


@pytest.fixture(autouse=True, scope="session")
def products_of_numbers():
    """Makes tl.dot multiply bf16 numbers. The interpreter's own multiplies their bits as integers."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def number(x):
        wide = (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar.is_bf16() else x.data
        return interpreter.TensorHandle(wide.astype(np.float32), tl.float32)

    def create_dot(self, a, b, *others):
        return dot(self, number(a), number(b), *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    """Fills torch.empty with NaN, so that an element that a kernel does not write shows in the result."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Makes tiles so small that a few hundred elements take many blocks, which split rows, and a last block that adds
    up their partial results."""
    from safeops.kernels.engine import elementwise, launch, tiling
    from safeops.kernels.engine import row_plan as plan
    from safeops.kernels.engine.kernel import KERNELS, Config

    from safeops import kernels

    for path in Path(kernels.__file__).parent.glob("*/*.py"):  # to import a module declares its kernels
        importlib.import_module(f"safeops.kernels.{path.parent.name}.{path.stem}")
    launch._plans.clear()
    small = Config(threads=16, tile_bytes=512)
    for kernel in KERNELS:
        monkeypatch.setitem(kernel.configs, None, small)
    monkeypatch.setattr(elementwise, "WIDEST", 32)
    monkeypatch.setattr(plan, "MOST_THREADS", 16)
    monkeypatch.setattr(plan, "WIDE", 32)
    monkeypatch.setattr(plan, "FEWEST_TILES", 1)
    monkeypatch.setattr(plan, "PER_THREAD", 64)  # a row of more than 256 fp32 elements is read in parts
    monkeypatch.setattr(
        tiling, "POLICY", tiling.Policy(blocks=8, most_splits=4, widest=32, widest_kept=16, partials=32)
    )


@pytest.fixture
def triton_route():
    """Makes public functions call the interpreted Triton kernels where they would call the CPU kernels."""
    with on_launchers():
        yield
