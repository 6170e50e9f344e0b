"""Shared by scans over lists of tensors, one launch per list.

They are raw ops without autograd, for safeops.debug and safeops.amp. Each function of the family runs the kernel if the
device has one, else its definition. The tensors of a list are on one device and may differ in dtype (fp16, bf16, fp32,
fp64), shape and strides. The host reads no value.
"""

from safeops.core.op import Op
from safeops.core.route import route


class Scan(Op):
    """The record of a scan. All tensors of a list are on one device, so that one of them decides the route."""

    owner = "C++/CUDA"
    user: str | None = None  # the public function that calls the scan, if its name differs
    differentiable = ()
    compiled = ("cpu", "cuda")

    def either(self, tensors, kernel, definition):
        """`kernel` if a call with these tensors runs the kernel, else `definition`."""
        return kernel if route(self, tensors) else definition


def nothing(*args):
    """The fake of an op that only writes into its arguments."""
