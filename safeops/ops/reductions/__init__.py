"""Masked reductions over dims.

`core/reduction.py` has the record of all. `core/sums.py` has the sum, the mean and the count, since other families use
them. `_statistic.py` is shared by the other reductions: they have one backward, which reads two numbers per result.
"""
