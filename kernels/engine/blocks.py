"""How blocks that work on one result hand their parts to each other, in one launch.

A sum over many tiles is split among blocks, and the last of them to finish adds up the parts of all (`is_last`).

Where every element of a long row needs the row's sum, such as in a softmax, no result can be written before all parts
are summed, and a block that waits may keep the blocks it waits for from starting at all. So blocks draw tickets as they
start. A row's first `splits` tickets sum one part each and wait for nothing. Its next `splits` tickets write one part
each, and wait only for sums whose tickets were drawn before, by blocks that run and will end. Whatever order blocks
start in, one of them can always go on.

A block that needs all parts loads them in order of part: the bits of the result are the same in every run. If there are
more parts than a block loads at a time, the block that sums the last one merges all of them, and stores the result in
place of the first: otherwise each writing block would take that many round trips.

Counters are 0 between launches. `is_last` has one for each result. Tickets have one for the tickets drawn, and two for
each group of rows: the parts summed and the parts written.
"""

import triton
import triton.language as tl


@triton.jit
def is_last(counter, splits):
    """True in the last of `splits` blocks to finish, which puts the counter back to 0.

    A block's stores come before it counts (barrier, release), and all counts before the loads of the last block
    (acquire): the last block sees what all the others stored."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(counter, 0)  # as the next launch on this stream expects it
    return last


@triton.jit
def is_finished(counter, splits):
    """`is_last` for a result that may have one block. With one block, a barrier shows its stores to all its threads."""
    last = splits == 1
    if last:
        tl.debug_barrier()
    else:
        last = is_last(counter, splits)
    return last


@triton.jit
def draw_ticket(counter, splits, groups):
    """Draws a block's task. Returns (group of rows, part, True to sum the part or False to write it)."""
    ticket = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    if ticket == 2 * splits * groups - 1:
        tl.store(counter, 0)  # this was the last ticket
    rest = ticket % (2 * splits)
    return ticket // (2 * splits), rest % splits, rest < splits


@triton.jit
def count_summed(counter, group):
    """Counts a part whose sum is stored: all threads' stores come before the count (barrier, release). Returns how many
    were counted before. The block that counts last then sees what the others stored (acquire)."""
    tl.debug_barrier()
    return tl.atomic_add(counter + 1 + 2 * group, 1, sem="acq_rel", scope="gpu")


@triton.jit
def await_sums(counter, group, counts):
    """Waits until a group of rows has counted `counts` sums: one per part, and one more if the parts are merged into
    one. The stored sums are then visible (acquire)."""
    done = tl.atomic_add(counter + 1 + 2 * group, 0, sem="acquire", scope="gpu")
    while done < counts:
        done = tl.atomic_add(counter + 1 + 2 * group, 0, sem="acquire", scope="gpu")


@triton.jit
def count_written(counter, group, splits):
    """Counts a written part. A group's last writer sets both its counters to 0: no block waits for them any more."""
    done = tl.atomic_add(counter + 2 + 2 * group, 1, sem="acq_rel", scope="gpu")
    if done == splits - 1:
        tl.store(counter + 1 + 2 * group, 0)
        tl.store(counter + 2 + 2 * group, 0)


@triton.jit
def load(pointer, inside):
    """Loads what other blocks stored. .cg reads from L2, where stores go: L1 may hold values of an earlier launch."""
    return tl.load(pointer, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def load_partials(partial, splits, first, output, outputs, BS: tl.constexpr, ACROSS: tl.constexpr):
    """Returns (value, inside): the numbers that splits first, ..., first + BS - 1 stored for each output, and whether
    there is such a split and output. ACROSS: the dimension of the splits in the result."""
    s = tl.expand_dims(first + tl.arange(0, BS), 1 - ACROSS)
    output = tl.expand_dims(output, ACROSS)
    inside = (s < splits) & (output < outputs)
    return load(partial + s * outputs + output, inside), inside


@triton.jit
def add_partials(partial, splits, output, outputs, BS: tl.constexpr, BO: tl.constexpr, ARRAYS: tl.constexpr = 1):
    """Returns three sums (BO,) in fp64 over all splits, one per array of partials; 0 for arrays beyond ARRAYS. The
    order is fixed, whichever block finishes last. All arrays are loaded at once, and threads' sums are added at the
    end: this takes few round trips."""
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
