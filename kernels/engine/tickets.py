"""Rows so few and so long that each is spread over several blocks, folded and then written, in one launch.

No result of a row can be written before all of it has been folded, and a block that waits may keep the blocks it waits
for from starting at all. So blocks draw tickets as they start. A row's first `splits` tickets fold one part of it each
and wait for nothing; its next `splits` write one part each, and wait for folds alone, whose tickets were all drawn
before, by blocks that run and will end. Whatever order blocks start in, somebody always gets on.

counter: the tickets drawn, and for each group of rows the parts folded and the parts written, all of them 0 between
launches. Who writes a part gathers the partial states in order of part: the bits are the same in every run.
"""

import triton
import triton.language as tl


@triton.jit
def draw(counter, splits, groups):
    """(group of rows, part, whether to fold it: otherwise to write it)."""
    ticket = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if ticket == 2 * splits * groups - 1:
        tl.store(counter, 0)  # nobody draws another
    rest = ticket % (2 * splits)
    return ticket // (2 * splits), rest % splits, rest < splits


@triton.jit
def folded(counter, group):
    """All threads' partials come before the count: barrier, release."""
    tl.debug_barrier()
    tl.atomic_add(counter + 1 + 2 * group, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_folds(counter, group, splits):
    """Until every part has been folded: acquires their partials."""
    done = tl.atomic_add(counter + 1 + 2 * group, 0, sem="acquire", scope="gpu")
    while done < splits:
        done = tl.atomic_add(counter + 1 + 2 * group, 0, sem="acquire", scope="gpu")


@triton.jit
def written(counter, group, splits):
    """The last writer of a group, after whom none waits, puts its counts back."""
    done = tl.atomic_add(counter + 2 + 2 * group, 1, sem="acq_rel", scope="gpu")
    if done == splits - 1:
        tl.store(counter + 1 + 2 * group, 0)
        tl.store(counter + 2 + 2 * group, 0)
