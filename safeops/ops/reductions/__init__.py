"""Masked reductions over dims.

`_reduction.py` is the record of all, and of the sum and the mean; `_statistic.py` adds what the others share: one
backward from two numbers for each result, its origin and its scale.
"""
