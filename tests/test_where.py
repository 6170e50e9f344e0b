"""scripts/where.py: for each op, every step from the public function to its test and page leads to an existing line."""

import pytest

from safeops.core import private_torch
from safeops.core.op import Op, registry
from scripts import where

ALWAYS = {"public function", "record", "  its class", "test record", "benchmark", "docs"}
OF_OPS = {"  prepare", "definition", "call", "route", "gradients"}


@pytest.mark.parametrize("name", where.OPS)
def test_each_line_has_what_it_is_named_for(name):
    hops = list(where.road(name))
    for hop in hops:
        assert hop.name in hop.path.read_text().splitlines()[hop.line - 1], hop
    kinds = {hop.what for hop in hops}
    assert ALWAYS | (OF_OPS if isinstance(registry[name], Op) else set()) <= kinds
    for raw in registry[name].raw:  # none for ops composed of other ops
        assert (
            (f"cpu {raw}" in kinds)
            == (f"cuda {raw}" in kinds)
            == private_torch.dispatcher_has(f"safeops::{raw}", "CPU")
        )


def test_the_road_of_a_mean():
    road = [(hop.what.strip(), hop.path.name, hop.name) for hop in where.road("masked_mean")]
    begin = [("public function", "masked_mean.py", "masked_mean"), ("record", "sums.py", "masked_mean")]
    assert road[:2] == begin
    for hop in [
        ("loop", "weighted_sum.h", "value_loop"),
        ("kernel", "sums.py", "sum_kernel"),
        ("loop", "masked_sum.cpp", "gradient_loop"),
    ]:
        assert hop in road


def test_what_is_no_op_is_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["where", "masked_men"])
    with pytest.raises(SystemExit):
        where.main()
    assert "masked_men is no op: did you mean masked_mean" in capsys.readouterr().err
