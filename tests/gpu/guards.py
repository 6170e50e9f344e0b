"""Guards before and behind what a call allocates: bytes that a kernel writes beside its results show there.

torch's allocator gives a tensor the smallest free block that holds it. A block that a tensor of the same size has left
between two others is therefore the next such tensor's place.
"""

import torch

PATTERN = 0x5A
MIB = 2**20
SMALL = MIB  # bytes: up to so many come from the allocator's small blocks, and more from its large ones
TRIES = 20


def allocate(size):
    return torch.full((size,), PATTERN, dtype=torch.uint8, device="cuda")


def between_guards(size, allocate):
    """(hole of so many bytes, guards: one before it, one behind it, and what the allocator has put elsewhere); None
    where it gives no such place."""
    guard = 2 * MIB if size > SMALL else 64 * 2**10
    guards = []
    for _ in range(TRIES):
        allocate(size + 2 * guard)  # and back: large blocks are divided
        before, hole, behind = (allocate(n) for n in (guard, size, guard))
        guards += before, behind
        begins = [t.data_ptr() for t in (before, hole, behind)]
        if begins[1] == begins[0] + guard and begins[2] - begins[1] - size in range(512):
            return hole, guards
        guards.append(hole)
    return None


def guarded(run, results, allocate=allocate, free=torch.cuda.empty_cache):
    """Run once more, between guards of the results' sizes: AssertionError where one is written. False where there is no
    place between guards, or where none of the new results lies there."""
    free()
    places = [between_guards(t.nbytes, allocate) for t in results if t.nbytes]
    if None in places:
        return False
    holes = {hole.data_ptr() for hole, _ in places}
    guards = [guard for _, guards in places for guard in guards]
    del places  # and with it the holes
    results = [t for _, t in run()]
    for guard in guards:
        changed = (guard != PATTERN).nonzero()
        assert not len(changed), f"{len(changed)} bytes beside the results are written"
    return any(t.data_ptr() in holes for t in results)
