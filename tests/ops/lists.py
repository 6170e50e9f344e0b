"""The functions that scan lists of tensors: health, grad_norm, clip_grad_norm_. The contract's checks take no lists, so
hand-written tests check its clauses: tests/contract/lists/test_lists.py and tests/gpu/test_lists.py for all three,
tests/amp for the public grad_norm and clip_grad_norm_."""

from tests.contract.lists.tensor_lists import scans
from tests.ops.record import Record

IN = "of lists: tests/{}"


def _scan(name, definition):
    where = "amp" if name != "health" else "debug"
    Record(
        name,
        definition,
        IN.format("contract/lists/test_lists.py"),
        bad_calls=IN.format(where),
        call=IN.format(where),
        no_route=IN.format("contract/lists/test_lists.py"),
        gpu=IN.format("gpu/test_lists.py"),
    )


_scan("health", scans.health_definition)
_scan("grad_norm", scans.norm_definition)
_scan("clip_grad_norm_", scans.scale_definition)
