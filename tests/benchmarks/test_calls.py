"""In the table of call costs the parts add up to the call, and a missed goal is reported."""

import pytest

from benchmarks import calls, report, standin

pytestmark = pytest.mark.slow


@pytest.mark.skipif(bool(standin.unusable()), reason=str(standin.unusable()))
def test_the_parts_make_the_call():
    (record,) = calls.measure(["masked_sum"], cpp=())
    parts, total = record["parts"], record["parts"]["total"]
    assert sum(parts[part] for part in calls.PARTS) == pytest.approx(total)
    assert all(0 < parts[part] < total for part in calls.PARTS), parts
    # A new number costs Python's part of a launch, the first size also a plan, and the second size also a trace.
    assert min(record["traced"], record["first_size"]) > parts["python"] > record["new_size"] > record["aten"] > 0
    (line,) = [line for line in report._calls([record]) if "masked_sum" in line]
    assert f"{total:.1f}" in line


@pytest.mark.skipif(bool(standin.unusable()) or not standin.objects(), reason="csrc/cuda is not built")
def test_calls_of_cpp_ops_run_the_host_code_alone():
    (record,) = calls.measure([], cpp=["masked_fill"])
    assert record["parts"]["total"] > record["aten"] > 0
    (line,) = [line for line in report._calls([record]) if "masked_fill (C++)" in line]
    assert f"{record['parts']['total']:.1f}" in line and line.count(" - ") == 6


def test_a_missed_goal_is_named():
    def missed(total, **new_size):
        record = {"op": "masked_sum", "parts": {"total": total}, "aten": 1.5} | new_size
        results = {"settings": {"device": "cpu"}, "speed": [], "overhead": [], "memory": [], "calls": [record]}
        return report.misses(results)

    assert missed(9.9, new_size=9.9) == missed(7.9) == []
    assert missed(8.1) == ["masked_sum: a call takes 5.4 times an aten op's, not 5.3"]
    assert missed(10.1, new_size=9.9) == ["masked_sum: a call takes 6.7 times an aten op's, not 6.7"]
    assert missed(9.9, new_size=20.0) == ["masked_sum: one of a new size takes 13.3 times an aten op's, not 6.7"]
