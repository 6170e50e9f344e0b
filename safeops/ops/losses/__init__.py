"""Pointwise losses: the loss of each element, masked, weighted and reduced.

`_pointwise.py` is the record: a loss adds the loss of one element and its parameters.
"""
