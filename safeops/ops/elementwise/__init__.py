"""Elementwise functions: each element of the result from the same element of the operands.

`_unary.py` and `_binary.py` are the two kinds: dtypes, stand-ins, saturation and numbers as operands are theirs; an op
adds its function and where that has no value. `masked_fill` and `apply_where` are their own.
"""
