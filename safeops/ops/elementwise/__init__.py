"""Elementwise functions: each element of the result from the same element of the operands.

`_unary.py` and `_binary.py` have the records of two kinds: they handle dtypes, fill values, saturation and numbers as
operands; an op adds its function and where that has no value. `masked_fill` and `apply_where` stand alone.
"""
