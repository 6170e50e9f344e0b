"""The record of an op, its subjects (op, definition, samples) for the contract's checks, the op by either route."""

import dataclasses
import functools
import os
import shutil

import torch

import safeops
from safeops.core.op import registry
from safeops.testing import CHECKS, Subject
from safeops.verify.checks import kernels_off

DEVICE = os.environ.get("SAFEOPS_TEST_DEVICE", "cpu")
COMPILER = any(map(shutil.which, ("c++", "g++", "clang++", "cc", "gcc", "clang")))  # Inductor needs one of them
COMPOSITE = "runs as the composite, which may save and copy"
RECORDS = {}  # {the op's name: its record}


class Record:
    """Holds all that the tests know of one op. A field may be a sentence instead: it says why the op has none.

    definition   the op in plain differentiable torch, without code of safeops: in float64 it is the truth.
    samples      the calls on which each clause of the contract is checked.
    bad_calls    calls that must be refused, with the words the error must contain.
    call         {argument: value}: one plain call, which the tests in tests/callers vary.
    gpu          (n, dtype, seed) -> a call on about n elements on a GPU, as a `tests.ops.gpu.Case`.
    kernel_call  changes to `call` with which a kernel computes it.
    no_route     why tests cannot see if a kernel or the composite computes `call`; None if they can.
    launches     on a GPU: ((kernels, memory operations) of the forward, the same of the backward). Instead of a pair, a
                 function of n, or None if the number depends on the size.
    workspace    bytes per element that a GPU needs beside the results: sorted keys, a mask's ranks.
    variants     {name: (samples, fields)}: further subjects, for cases that the kernels do not compute.
    subjects     further subjects, complete.
    adapt        (op or definition) -> the function that the samples call, whose operands broadcast.
    of_rows      True if `tests.ops.row_loss` has made the record.
    kind         the file of its definition. Slow tests compile only the first op of a kind.
    domain       for each operand, a function that maps any number into the op's domain.
    sizes        (*operands) -> the sizes of the value's terms, and of each derivative's.
    fields       further fields of `safeops.testing.Subject`: torch's twin, dtype rule, tolerances, skips.
    """

    def __init__(
        self, name, definition, samples, *, bad_calls, call, gpu, kernel_call=None, no_route=None,
        launches=((1, 0), (1, 0)), workspace=0, variants=None, subjects=(), adapt=lambda op: op, domain=None,
        sizes=None,
        **fields,
    ):  # fmt: skip
        assert name not in RECORDS, f"{name}: a second record"
        self.name, self.definition, self.call, self.gpu = name, definition, call, gpu
        self.samples, self.bad_calls = (x if isinstance(x, str) else list(x) for x in (samples, bad_calls))
        self.kernel_call, self.no_route = kernel_call or {}, no_route
        self.launches, self.workspace = launches, workspace
        self.variants, self.ready, self.fields = variants or {}, subjects, fields
        self.adapt, self.domain, self.sizes = adapt, domain, sizes
        self.kind = definition.__module__.removeprefix("tests.ops.")
        self.of_rows = self.kind == "row_loss"
        RECORDS[name] = self

    def subjects(self):
        """Returns the subjects of the contract's checks: the op itself, its composite, its variants."""
        if not isinstance(self.samples, str):
            subject = self.subject("", self.samples, **self.fields)
            yield subject
            yield by_composite(subject)
        for name, (samples, fields) in self.variants.items():
            yield self.subject(f" ({name})", samples, **fields)
        yield from self.ready

    def subject(self, suffix, samples, skip=None, **fields):
        skip = dict(skip or {})
        if not registry[self.name].runs_on(DEVICE):
            skip.update(saved_bytes=COMPOSITE, peak_memory=COMPOSITE)
        if not COMPILER:
            skip["inductor"] = "there is no compiler here, and Inductor needs one"
        elif not suffix and self.keeps_kernel() and self.name not in firsts(Record.keeps_kernel):
            skip["inductor"] = "its graph is one call of a raw op, as that of the first of its kind"
        return Subject(
            self.adapt(on("kernel", self.name)),
            self.adapt(self.definition),
            tuple(samples),
            direct=self.adapt(getattr(torch.ops.safeops, self.name)),
            routes={"composite": self.adapt(on("composite", self.name))},
            errors=self.bad_calls,
            device=DEVICE,
            workspace=self.workspace,
            skip=skip,
            name=self.name + suffix,
            **fields,
        )

    def keeps_kernel(self):
        """Returns True if torch.compile keeps the raw op in the graph."""
        return DEVICE in getattr(registry.get(self.name), "compiled", ())

    def tensors(self):
        """Returns {argument: tensor} of `call`."""
        return {key: x for key, x in self.call.items() if isinstance(x, torch.Tensor)}

    def of_one(self, device="cpu"):
        """Returns (function of one tensor, the tensor): `call` with `kernel_call`, and a copy of its first floating
        tensor."""
        tensors = {key: x.to(device, copy=True) for key, x in self.tensors().items()}
        first = next(key for key, x in tensors.items() if x.is_floating_point())

        def call(x, **changes):
            changes = {**tensors, **self.kernel_call, first: x, **changes}
            result = getattr(safeops, self.name)(**{**self.call, **changes})
            return result[0] if isinstance(result, tuple) else result

        return call, tensors[first]


def firsts(of=lambda record: True):
    """Returns the names of the first op of each kind among those with of(record): compiling siblings adds little."""
    return set({record.kind: name for name, record in reversed(RECORDS.items()) if of(record)}.values())


def along_a_dim():
    """The functions of rows with a result per element or row: softmaxes, normalize, cosine_similarity."""
    families = "classification", "vectors"
    return [name for name, record in RECORDS.items() if "dim" in record.call and registry[name].family in families]


def on(route, name):
    """Returns the public function, with its kernels switched off if route is "composite"."""
    function = getattr(safeops, name)
    if route == "kernel":
        return function

    @functools.wraps(function)
    def call(*args, **kwargs):
        with kernels_off((registry[name], *registry[name].parts)):
            return function(*args, **kwargs)

    return call


NUMERICS = (
    "value gradient dtypes mixed_dtypes accumulation finite gradient_overflow partial_gradients masked_garbage "
    "masked_upstream weight_zero kept_nonfinite kept_upstream nothing_kept layouts upstream_layouts sizes "
    "inputs_unchanged uninitialized repeatable no_sync autocast"
).split()


def by_composite(kernel):
    """Returns the subject with its kernels switched off: the composite must keep the contract, too."""
    once = {c: "the kernel's subject checks it: transforms and compilation take the composite there" for c in CHECKS}
    skip = {c: reason for c, reason in (once | dict(kernel.skip)).items() if c not in NUMERICS or c in kernel.skip}
    op, name = kernel.routes["composite"], f"{kernel.name} (composite)"
    return dataclasses.replace(kernel, op=op, name=name, skip=skip, direct=None)


# ---- reasons to skip a check, shared by several families

NO_SUM = {"accumulation": "nothing is summed"}
NO_MASK = {
    check: "has no mask" for check in ("masked_garbage", "masked_upstream", "masked_garbage_transforms", "nothing_kept")
}
NO_WEIGHT = {"weight_zero": "has no weight"}
ONE_OPERAND = {check: "one floating operand" for check in ("mixed_dtypes", "partial_gradients")}
NOT_SAFE = {"finite": "not a safe_* function: a kept inf shows"}
ELSEWHERE = "the op's main subject checks it"
# Skips of variants that the composite computes.
BY_COMPOSITE = {"saved_bytes": COMPOSITE, "peak_memory": COMPOSITE} | dict.fromkeys(
    ("inductor", "export", "errors", "accumulation"), ELSEWHERE
)
