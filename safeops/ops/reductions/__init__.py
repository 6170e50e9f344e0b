"""Masked reductions over dims.

The record of all is in `core/reduction.py`. The sum, the mean and the count are in `core/sums.py`, since other families
use them. `_statistic.py` is shared by the other reductions: one backward, which reads two numbers for each result.
"""
