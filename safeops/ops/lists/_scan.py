"""Scans over lists of tensors, one launch for a list: what they have in common.

Raw ops, for safeops.debug and safeops.amp; they know nothing of autograd. Each public function here takes the kernel
where the device has one, else its definition. Tensors of a list are on one device and may differ in
dtype (fp16, bf16, fp32, fp64), shape and strides. Nothing is read by the host.
"""

from safeops.core.op import Op
from safeops.core.route import route


class Scan(Op):
    """The route of a list, which is that of any one tensor: they are on one device."""

    owner = "C++/CUDA"
    user: str | None = None  # the public function that calls it, where that has another name
    differentiable = ()
    compiled = ("cpu", "cuda")

    def either(self, tensors, kernel, definition):
        """The kernel where these tensors of the list have one, else the definition."""
        return kernel if route(self, tensors) else definition


def nothing(*args):
    """The fake of an op that only writes into its arguments."""
