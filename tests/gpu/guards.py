"""Places guards, tensors of known bytes, before and after the results that a call allocates: a kernel that writes
outside of its results changes them.

torch's allocator gives a tensor the smallest free block that holds it. A freed block between two live ones is therefore
reused by the next tensor of its size.
"""

import torch

PATTERN = 0x5A
MIB = 2**20
SMALL = MIB  # bytes; larger requests come from the allocator's pool of large blocks
TRIES = 20


def allocate(size):
    return torch.full((size,), PATTERN, dtype=torch.uint8, device="cuda")


def between_guards(size, allocate):
    """Returns (hole, guards), or None if no place is found. hole: a tensor of `size` bytes, to be freed for a result.
    guards: the tensors before and after the hole, and all tensors of failed tries."""
    guard = 2 * MIB if size > SMALL else 64 * 2**10
    guards = []
    for _ in range(TRIES):
        allocate(size + 2 * guard)  # freed at once, so that the three tensors below come from this block
        before, hole, behind = (allocate(n) for n in (guard, size, guard))
        guards += before, behind
        begins = [t.data_ptr() for t in (before, hole, behind)]
        if begins[1] == begins[0] + guard and begins[2] - begins[1] - size in range(512):
            return hole, guards
        guards.append(hole)
    return None


def guarded(run, results, allocate=allocate, free=torch.cuda.empty_cache):
    """Run once more, with the results between guards. Raises AssertionError if a guard has changed. Returns False if
    the allocator gave no place between guards, or placed no result there."""
    free()
    places = [between_guards(t.nbytes, allocate) for t in results if t.nbytes]
    if None in places:
        return False
    holes = {hole.data_ptr() for hole, _ in places}
    guards = [guard for _, guards in places for guard in guards]
    del places  # frees the holes, for the results to take
    results = [t for _, t in run()]
    for guard in guards:
        changed = (guard != PATTERN).nonzero()
        assert not len(changed), f"{len(changed)} bytes beside the results are written"
    return any(t.data_ptr() in holes for t in results)
