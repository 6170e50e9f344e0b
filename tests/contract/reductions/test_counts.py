"""The traced graph of a count without a mask."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from safeops.core.definitions import count_kept


@pytest.mark.parametrize("dim, keepdim", [(None, False), ((), True), ((1,), False), ((0, -1), True)])
def test_a_count_of_everything_is_a_number(dim, keepdim):
    """Without a mask the count must be a constant: Inductor would sum ones, which Triton 3.6 does not compile."""
    x = torch.zeros(2, 3, 4)
    graph = make_fx(lambda x: count_kept(None, x, dim, keepdim))(x).graph
    assert not [node for node in graph.nodes if "sum" in str(node.target)]
    wanted = torch.ones_like(x, dtype=torch.int64).sum(dim or None, keepdim=keepdim)
    torch.testing.assert_close(count_kept(None, x, dim, keepdim), wanted, rtol=0, atol=0)
