"""How blocks that work on one result hand their parts to each other, in one launch.

A sum over many tiles is split among blocks, and the last of them to finish adds up the parts of all (`is_last`).

Where every element of a long row needs the row's sum, such as in a softmax, no result can be written before all parts
are summed, and a block that waits may keep the blocks it waits for from starting at all. So blocks draw tickets as they
start. A row's first `splits` tickets sum one part of it each and wait for nothing; its next `splits` write one part
each, and wait only for sums whose tickets were all drawn before, by blocks that run and will end. Whatever order blocks
start in, there is always one that can go on.

Whoever needs the parts of all loads them in order of part: the bits of the result are the same in every run. Where they
are more than a block loads at a time, the last to sum a part makes one of all, and leaves it in the place of the first:
else each writing block would take that many round trips.

counter: 0 between launches. `is_last` has one for each result; tickets have one for those drawn, and two for each group
of rows: the parts summed and the parts written.
"""

import triton
import triton.language as tl


@triton.jit
def is_last(counter, splits):
    """True if all other parts were finished before this one; puts the counter back to 0.

    A block's stores come before it counts (barrier, release), and its count before what the last block then loads
    (acquire): the last block sees what all the others stored."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(counter, 0)  # as the next launch on this stream expects it
    return last


@triton.jit
def is_finished(counter, splits):
    """`is_last`, of a result that may have one block: what its threads stored is seen by all of them."""
    last = splits == 1
    if last:
        tl.debug_barrier()
    else:
        last = is_last(counter, splits)
    return last


@triton.jit
def draw_ticket(counter, splits, groups):
    """(group of rows, part, whether to sum it: otherwise to write it)."""
    ticket = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if ticket == 2 * splits * groups - 1:
        tl.store(counter, 0)  # nobody draws another
    rest = ticket % (2 * splits)
    return ticket // (2 * splits), rest % splits, rest < splits


@triton.jit
def count_summed(counter, group):
    """Says that a part's sum is stored: all threads' stores come before the count (barrier, release). How many were
    counted before: who is last then sees what the others stored (acquire)."""
    tl.debug_barrier()
    return tl.atomic_add(counter + 1 + 2 * group, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_sums(counter, group, counts):
    """Wait until every part of a group is summed, and those of many are made one; what was stored is then seen
    (acquire)."""
    done = tl.atomic_add(counter + 1 + 2 * group, 0, sem="acquire", scope="gpu")
    while done < counts:
        done = tl.atomic_add(counter + 1 + 2 * group, 0, sem="acquire", scope="gpu")


@triton.jit
def count_written(counter, group, splits):
    """Says that a part is written. The last writer of a group, after whom none waits, puts both its counts back."""
    done = tl.atomic_add(counter + 2 + 2 * group, 1, sem="acq_rel", scope="gpu")
    if done == splits - 1:
        tl.store(counter + 1 + 2 * group, 0)
        tl.store(counter + 2 + 2 * group, 0)


@triton.jit
def load(pointer, inside):
    """Partials of other blocks. .cg: from L2, where their stores are; L1 may hold what an earlier launch left there."""
    return tl.load(pointer, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def load_partials(partial, splits, first, output, outputs, BS: tl.constexpr, ACROSS: tl.constexpr):
    """(the numbers that BS splits from `first` on left for each output, which of them there are). ACROSS: the dimension
    of the splits in the result."""
    s = tl.expand_dims(first + tl.arange(0, BS), 1 - ACROSS)
    output = tl.expand_dims(output, ACROSS)
    inside = (s < splits) & (output < outputs)
    return load(partial + s * outputs + output, inside), inside


@triton.jit
def add_partials(partial, splits, output, outputs, BS: tl.constexpr, BO: tl.constexpr, ARRAYS: tl.constexpr = 1):
    """The sums over all splits of the partials of each output, in order of split whoever wrote last; zeros for arrays
    that there are not. All arrays are loaded at once, and added up across threads at the end: few round trips."""
    first_sum = tl.zeros([BS, BO], tl.float64)
    second_sum = first_sum
    third_sum = first_sum
    size = splits * outputs
    for first in range(0, splits, BS):
        s = first + tl.arange(0, BS)
        inside = (s < splits)[:, None] & (output < outputs)[None, :]
        offset = s[:, None] * outputs + output[None, :]
        first_sum += load(partial + offset, inside)
        if ARRAYS > 1:
            second_sum += load(partial + size + offset, inside)
        if ARRAYS > 2:
            third_sum += load(partial + size * 2 + offset, inside)
    return tl.sum(first_sum, 0), tl.sum(second_sum, 0), tl.sum(third_sum, 0)
