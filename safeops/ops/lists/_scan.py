"""Shared by scans over lists of tensors, one launch for a list.

They are raw ops for safeops.debug and safeops.amp, without autograd. Each function of the family runs the kernel if the
device has one, else its definition. The tensors of a list are on one device and may differ in dtype (fp16, bf16, fp32,
fp64), shape and strides. The host reads no value.
"""

from safeops.core.op import Op
from safeops.core.route import route


class Scan(Op):
    """The record of a scan. A list takes the route of any one of its tensors, since all are on one device."""

    owner = "C++/CUDA"
    user: str | None = None  # the public function that calls it, if it has another name
    differentiable = ()
    compiled = ("cpu", "cuda")

    def either(self, tensors, kernel, definition):
        """`kernel` if these tensors of the list run it, else `definition`."""
        return kernel if route(self, tensors) else definition


def nothing(*args):
    """The fake of an op that only writes into its arguments."""
