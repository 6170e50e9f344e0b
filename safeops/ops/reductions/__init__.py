"""Masked reductions over dims.

The record of all is `core/reduction.py`; the sum, the mean and the count are `core/sums.py`, on which other families
stand too. `_statistic.py` adds what the others share: one backward from two numbers for each result.
"""
