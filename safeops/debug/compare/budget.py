"""How far two runs of one step may be apart by rounding alone.

A module's output is rounded to its dtype, with a relative error of at most u, half the distance between 1 and the next
number (2^-24 in float32, 2^-11 in float16, 2^-8 in bfloat16), and its sums of n terms are accumulated in float32 (in
float64, for float64). Roundings are independent, so their errors add as squares do, and a sum of n terms has an error
of about sqrt(n) roundings (Higham and Mary, 2019). At the k-th module call, if no module amplifies what comes in:

    e_k^2 = sum over j = 1 ... k of  u_j^2 + n_j v_j^2      relative to the output's length (2-norm)

u_j is that of the coarser of both runs' dtypes at call j (autocast's, where it is on), v_j that of the accumulator, n_j
the number of inputs of each output of the module's weight (64 if it has none, or fewer). Outputs may differ by

    forward    4 e_k

The backward pass goes on counting: its k-th call has all of the forward pass behind it. There a kink (ReLU, max, the
index of a maximum) is passed on the other side where a value is closer to it than its error: for a share of the
elements of about e_k. It changes the gradient of these elements as a whole, so its length by the square root of that:

    backward   4 e_k + 2 sqrt(e_k)

A network does amplify, by what its condition is, which only the run itself tells. So twice the largest difference of
the calls before, in the same pass, is always within the budget, where they were within theirs: a module has a condition
of at most 2, or it hides in the constant 4. A mistake is a jump, and amplification none.

A single number made of many (a loss) has the absolute error of the logits as its relative one (log, exp): its budget
is multiplied by max(1, the largest magnitude of the output before it).
"""

import math

import torch

from safeops.debug.compare.entry import FORWARD
from safeops.debug.compare.projection import LARGEST

ROUNDINGS = 4.0  # as in 4 e_k: 16 roundings a module
KINKS = 2.0
CONDITION = 2.0  # of a module: by how much it may amplify
TERMS = 64  # of a sum, at least
TF32 = 2.0**-11


def unit_roundoff(entry, tf32=False):
    """u of the coarser of an entry's dtype and autocast's. tf32: matrix products of float32 have TF32's."""
    u = max((_of(name) for name in (entry.dtype, entry.autocast) if name), default=0.0)
    return max(u, TF32) if tf32 and entry.dtype == "float32" else u


def _of(name):
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        return 2.0**-24  # a later torch's dtype
    return torch.finfo(dtype).eps / 2


class Budget:
    """Counts the module calls of a step in their order. slack: a factor on every budget."""

    def __init__(self, a, b, slack=1.0):
        self.slack, self.tf32 = slack, bool(a.facts.get("tf32") and b.facts.get("tf32"))
        self.squares, self.counted = 0.0, set()
        self.of_call = {}  # (module, call) -> u of its forward pass, which that of its backward pass is at least
        self.largest = 1.0  # magnitude of the output before
        self.within = {True: 0.0, False: 0.0}  # forward or not -> the largest difference so far within its budget
        # A module that only one run shows was run by the other too, in a dtype that nobody saw.
        self.unseen = max(max((unit_roundoff(x, self.tf32) for x in run.of(FORWARD)), default=0.0) for run in (a, b))

    def add(self, a, b=None):
        """The budget of the next entry, in the order of execution: that of run a, and of run b where it has it."""
        forward, call = a.phase == FORWARD, (a.module, a.call)
        u = max(unit_roundoff(a, self.tf32), self.unseen if b is None else unit_roundoff(b, self.tf32))
        u = max(u, self.of_call.get(call, 0.0))
        if forward:
            self.of_call[call] = u
        if (forward, call) not in self.counted:
            self.counted.add((forward, call))
            accumulator = max(_of("float64"), min(u, _of("float32")))
            self.squares += u**2 + max(TERMS, a.terms) * accumulator**2
        e = math.sqrt(self.squares)
        budget = ROUNDINGS * e + (0.0 if forward else KINKS * math.sqrt(e))
        if forward:
            if math.prod(a.shape) == 1:
                budget *= self.largest
            self.largest = max(1.0, a.stats[LARGEST])
        return max(self.slack * budget, CONDITION * self.within[forward])

    def compared(self, phase, difference, budget):
        """Tell the difference of what `add` was asked about: those within their budgets bound the amplification."""
        if difference <= budget:
            self.within[phase == FORWARD] = max(self.within[phase == FORWARD], difference)
