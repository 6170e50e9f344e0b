"""DTensors, sharded and replicated, on two processes: right values and gradients, or a refusal by name."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.callers.calls import CALLS, tensors

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.callers import ranks  # noqa: E402

OLD = torch.__version__ < "2.12"
REFUSED = ("cox_loss", "group_advantages", "masked_compact", "masked_scatter", "masked_select", "ms_ssim",
           "multilabel_margin_loss", "plackett_luce_loss", "safe_gather", "segment_max", "segment_mean",
           "segment_sum")  # fmt: skip
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "outcomes"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["."] + sys.path)}
    subprocess.run([sys.executable, ranks.__file__, str(path)], env=environment, check=True, timeout=300)
    return [json.loads((path.parent / f"outcomes.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ranks.CASES)
@pytest.mark.parametrize("how", ranks.PLACEMENTS)
def test_right_or_refused_by_name(outcomes, how, case):
    name = ranks.CASES[case][0]
    for rank in outcomes:
        got = rank[f"{how}: {case}"]
        if OLD and "aten.frexp.Tensor does not have a sharding strategy" in got:
            continue  # torch itself refuses this call
        assert got == "right" or (name in REFUSED and re.match(rf"TypeError: {name}: \w+ must be no DTensor", got))


MIXED = [(name, key) for name in CALLS for key, x in list(tensors(name).items())[1:] if x.dim()]


@pytest.mark.parametrize("name, key", MIXED)
def test_a_plain_tensor_beside_a_dtensor_is_refused_by_name(outcomes, name, key):
    for rank in outcomes:
        got = rank[f"mixed: {name}, {key}"]
        assert got.startswith(f"TypeError: {name}: ") and "DTensor" in got
        assert key in got and " as [" in got and "of no mesh" in got or name in REFUSED, got


def test_every_function_was_called():
    assert {name for name, _ in ranks.CASES.values()} == set(CALLS)
    assert torch.distributed.is_gloo_available()
